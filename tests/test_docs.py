"""README and docs: their commands, run as they stand in a copy of the repository, what these show,
diffs, links, and computed numbers. Blocks of bash and console are run, those of sh only shown."""

import os
import re
import time
from pathlib import Path

import pytest
import torch

import record
from copies import THREE_FILES
from pages import (
    CHAPTERS,
    DOCUMENTS,
    HOME,
    assert_shown,
    bash,
    shown_by,
    steps,
    try_block,
    try_chapter,
)
from prepare_data import draw_images
from second_node import second_node
from sizes import SIZES
from slurm import (
    LAUNCHERS,
    NAMESPACES,
    REPOSITORY,
    at_once,
    environment,
    ranks,
    run,
    stand_ins,
    wait_for,
)
from write_diffs import DIFF, with_diffs

TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.M | re.S)


def block(containing: str) -> str:
    found = [text for text in BLOCKS if containing in text]
    assert len(found) == 1, f"one block of the documents has {containing!r}"
    return found[0]


# --- what a block shows ---


def test_the_comparison_can_fail():
    rank = "[Rank: {0} | vm | world size: 2 | local rank: {0} | device: cpu]\n"
    zero, one = rank.format(0), rank.format(1)
    fresh = f"{one}{zero}Data: drawn\nepoch=1 step=4/4 loss=0.5\nFinished: epoch=1\n"
    assert_shown(f"{zero}{one}Data: drawn\n...\nFinished: epoch=3\n", fresh)
    assert_shown("...\nepoch=1 step=99/100 loss=1.25\nFinished: epoch=1\n", fresh)
    for wrong in (
        f"{zero}{zero}...\n",
        f"{zero}{one}Finished: epoch=1\n",
        f"{zero}{one}Data: drawn\n",
        "Data: drawn\n...\n",
        "...\nepoch=1 steps=4/4 loss=0.5\n...\n",
        "...\nFinished: epoch=1\n...\nData: drawn\n...\n",
    ):
        with pytest.raises(AssertionError, match="not in the output"):
            assert_shown(wrong, fresh)


# --- the blocks ---


def test_every_block_is_run():
    """Here, but five pages: containers.md in test_enroot.py, local/laptop/README.md in
    test_laptop.py, local/cluster/README.md in test_docker_compose.py, recipes.md in
    test_recipes.py, other_jobs.md in test_work_list.py and test_programs.py."""
    tried = (1, 3, 7, 8, 9, 10, 11, "launchers")  # by try_chapter
    chapters = [CHAPTERS[chapter] for chapter in tried]
    others = [path for path in DOCUMENTS if path not in chapters]
    counts = {
        str(path.relative_to(REPOSITORY)): path.read_text().count("```bash\n") for path in others
    }
    assert {name: count for name, count in counts.items() if count} == {
        "README.md": 1,
        "docs/containers.md": 1,
        "local/laptop/README.md": 1,
        "local/cluster/README.md": 1,
        "docs/other_jobs.md": 9,
        "docs/recipes.md": 7,
    }


@pytest.mark.long
def test_make_train(clone):
    [step] = steps(REPOSITORY / "README.md")
    shown = try_block(*step, clone)
    assert "SYNTHETIC" in shown and re.search(
        r"^epoch=1 test_loss=\S+ test_accuracy=0\.\d+\nFinished: epoch=1, ", shown, re.M
    )


@pytest.mark.matrix
def test_chapter_on_one_machine(clone):
    """Without Slurm."""
    assert try_chapter(9, clone)


def follow_two_jobs(printed: str, clone: Path, prefix: tuple, variables: dict):
    """The queue and the logs of chapter 1, after what sbatch has printed."""
    for _ in range(60):
        queue = bash("squeue --me", clone, prefix, **variables)
        if re.search(r" PD .*\((Resources|Priority)\)\n.* R .*node-\[", queue):
            break
        time.sleep(0.5)
    assert_shown(shown_by(1, "JOBID PARTITION"), queue)
    jobs = re.findall(r"Submitted batch job (\d+)", printed)
    for job, end in zip(jobs, ("VERDICT: all well", "Finished: "), strict=True):
        log = clone / f"{LAUNCHERS['torchrun']}_{job}.out"
        state = f"scontrol show job {job} | grep -o 'JobState=[A-Z]*'"
        ends = f"while {state} | grep -qE 'PENDING|RUNNING|COMPLETING'; do sleep 1; done; {state}"
        assert bash(ends, clone, prefix, **variables) == "JobState=COMPLETED\n", log.read_text()
        shown = shown_by(1, end)
        if not record.RECORDING:
            # The small data have one line of steps.
            shown = re.sub(r"^(epoch=1 step=.*\n|\.\.\.\n)+", "...\n", shown, flags=re.M)
        # After its end torchrun may complain that the other node has ended first.
        assert_shown(shown, re.match(rf"(.*\n)*?{end}.*\n", log.read_text())[0])


@pytest.mark.slurm
def test_chapter_of_slurm(clone):
    """On the cluster of two nodes that one of its blocks starts. The two jobs of README and of the
    chapter end with the logs that it shows."""
    variables = {"CLUSTER": f"readme-{os.getpid()}"}
    prefix = (NAMESPACES, "exec")
    others = steps(CHAPTERS[1])
    [start] = [step for step in others if step[1] == "make cluster\n"]
    others.remove(start)
    try:
        assert "is up" in try_block(*start, clone, **variables)
        for step in others:
            printed = try_block(*step, clone, prefix, **variables)
            if "aux/check_ranks.py\nsbatch" in step[1]:
                follow_two_jobs(printed, clone, prefix, variables)
        bash("make cluster-down", clone, **variables)
        assert not Path(f"/run/slurm-cluster-{variables['CLUSTER']}").exists()
    finally:
        run(NAMESPACES, "down", env=environment(**variables))


@pytest.mark.matrix
def test_chapters_of_launchers(clone, cluster):
    """Every job of theirs ends well, but for the one that has too few tasks."""

    def scenario(chapter: int | str, folder: Path):
        printed = "".join(
            try_chapter(chapter, folder, prefix=(NAMESPACES, "exec"), **cluster.environment)
        )
        ids = [int(job) for job in re.findall(r"Submitted batch job (\d+)", printed)]
        ended = [cluster.wait(job, timeout=240) for job in ids]
        logs = [job.log for job in ended if job.state == "COMPLETED"]
        refused = [job for job in ended if "Unable to create step" in job.log]
        assert len(refused) == (chapter == "launchers"), ended
        assert len(logs) == len(ended) - len(refused), ended

    at_once(scenario, [(chapter, clone) for chapter in (8, "launchers")])


@pytest.mark.matrix
def test_chapters_of_language_models(clone):
    """The second takes the text of the first. Without internet, as here, that is the one that
    Python brings along."""
    shown = "".join(try_chapter(10, clone) + try_chapter(11, clone))
    found = re.findall(r"^step=100/100 val_loss=(\S+)$", shown, re.M)
    losses = [float(loss) for loss in found]
    # FSDP, then tensor parallel
    assert len(losses) == 2 and losses[0] < 3.2
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert len(shown.partition("\nSample from checkpoints/tp/step_100:\n")[2]) > 200


@pytest.mark.matrix
def test_chapter_of_the_proof(clone):
    """One process, two ranks and four: the columns are the same training, and not only of the
    same shape."""
    with record.stop_early(clone, 20):
        shown = try_chapter(3, clone)[0]
    lines = [re.findall(r" loss=(\S+)", line) for line in shown.splitlines()]
    rows = [[float(loss) for loss in line] for line in lines]
    assert len(rows) == 5 and rows[-1][0] < rows[0][0]
    assert all(row == pytest.approx([row[0]] * 3, abs=1e-4) for row in rows), shown


@pytest.mark.matrix
def test_chapter_of_surviving(clone, cluster):
    """A job that is stopped, requeued and resumed."""
    shown = try_chapter(7, clone, prefix=(NAMESPACES, "exec"), **cluster.environment)
    [stopped] = re.findall(r"^Stopped after step (\d+), saved$", shown[0], re.M)
    assert re.findall(r"^Resumed after step (\d+)$", shown[0], re.M) == [stopped]


def test_files_of_a_copy(clone):
    """`cp` of the files that a project of one's own takes along: those that the table above it
    names for torchrun, and a script."""
    bash(block("../my-project"), clone)
    project = clone.parent / "my-project"
    files = [path for path in project.rglob("*.*") if not path.is_symlink()]
    scripts = [f"distributed/{name}.py" for name in ("train_ddp", "heartbeat", "mnist")]
    names = {str(path.relative_to(project)) for path in files}
    assert names == {*THREE_FILES["torchrun"], *scripts}
    assert (project / ".venv/bin/python").exists()


# --- what pages show below blocks of sh: the commands in the order in which one types them ---


@pytest.mark.matrix
def test_lab_many_gpus(clone):
    """Chapter 2, with two steps in an epoch if it is not recorded."""
    draw_images(clone / "data/images", *([] if record.RECORDING else (128, 20)))
    fresh = bash("./torchrun.sh examples/many_gpus.py", clone, NPROC_PER_NODE=2)
    assert_shown(shown_by(2, r"\[Rank: 1 \| \w+ \| cpu"), fresh)


@pytest.mark.matrix
def test_lab_one_script_twice(clone):
    """Chapter 2's lab: each line is there twice, with the same loss."""
    draw_images(clone / "lab/data/images", 128, 20)
    fresh = bash("cd lab; ../torchrun.sh ../examples/one_gpu.py", clone, NPROC_PER_NODE=2)
    # A line's break may come after the other process's line.
    lines = sorted(re.findall(r"epoch=\d loss=\S+ accuracy=\S+(?= )", fresh))
    assert len(lines) == 6 and lines[::2] == lines[1::2], fresh


@pytest.mark.matrix
def test_lab_endless_loop(clone, cluster):
    """Chapter 6: what the log says after a minute. tasks.py passes the rank and the node that it
    names, and no other node."""
    hang = ("python3", "docs/labs/tasks.py", "hang")
    # SBATCH_EXPORT as at some sites
    job = cluster.exec(*hang, env={"SBATCH_EXPORT": "NONE"}, cwd=clone).stdout.split()[-1]
    cluster.jobs.append(int(job))
    log = clone / f"{LAUNCHERS['torchrun']}_{job}.out"
    said = re.compile(r"\[Rank \d on .*no step for .*First to look(.|\n)*endless_loop\.py:\d+\)\n")
    try:
        wait_for(lambda: log.exists() and said.search(log.read_text()), 180)
        shown = said.search(log.read_text())[0]
        rank, node = re.search(r"First to look at: rank (\d) on (\S+) ", shown).groups()
        assert cluster.exec(*hang, job, rank, node, cwd=clone).stdout == "PASSED\n"
        wrong = cluster.exec(*hang, job, rank, f"{node}0", cwd=clone)
        assert wrong.stdout.startswith("FAILED: ")
    finally:
        cluster.exec("scancel", job)
    fresh = shown.replace(str(clone), HOME)
    assert_shown(shown_by(6, r"\[Rank.*no step for"), fresh)


@pytest.mark.matrix
def test_a_node_that_stands_still(clone, cluster):
    """Chapter 6: the processes of the second node are stopped, and so are its heartbeats."""
    command = (LAUNCHERS["torchrun"], "distributed/train_ddp.py", "--epochs", 500)
    job = cluster.submit("--output=still.out", *command, cwd=clone)
    look = ("python3", "aux/watch_job.py", job)
    row = r"^ +\d  node-\d +\d+ "  # of a rank that has taken steps
    try:
        wait_for(
            lambda: len(re.findall(row, cluster.exec(*look, cwd=clone).stdout, re.M)) == 4, 240
        )
        cluster.exec("pkill", "-STOP", "--full", "train_ddp", node="node-2")
        wait_for(lambda: "silent" in cluster.exec(*look, cwd=clone).stdout, 120)
        fresh = cluster.exec(*look, cwd=clone).stdout
    finally:
        cluster.exec("scancel", job)
    assert_shown(shown_by(6, "rank  host +step"), fresh.replace(str(clone), HOME))


@pytest.mark.matrix
def test_lab_kill_a_rank(clone, cluster):
    """Fault tolerance: the last rank of the second node, after five lines of steps."""

    def on_the_cluster(command: str) -> str:
        return bash(command, clone, (NAMESPACES, "exec"), **cluster.environment)

    train = "distributed/train_preemptible.py --epochs 500 --log-every 20 --save-every 20"
    submit = "sbatch --parsable --nodes=3 --output=lab.out launch_slurm_with_spare.sh"
    job = on_the_cluster(f"{submit} {train}").strip()
    log = clone / "lab.out"
    try:
        wait_for(
            lambda: log.exists() and re.search(r"(?s)^Start 1 .* loss=", log.read_text(), re.M), 240
        )
        node = re.search(r"^Start 1 on \S+,(\S+)$", log.read_text(), re.M)[1]
        there = f"srun --jobid={job} --overlap --nodelist={node} --nodes=1 --ntasks=1"
        rank = on_the_cluster(f"{there} pgrep --full train_preemptible").split()[-1]
        wait_for(lambda: log.read_text().count(" loss=") >= 5, 240)
        on_the_cluster(f"{there} kill -9 {rank}")
        wait_for(lambda: re.search(r"(?s)^Resumed after.* loss=", log.read_text(), re.M), 240)
    finally:
        on_the_cluster(f"scancel {job}")
    fresh = bash("grep -E '^(Start|Resumed|srun: error|epoch)' lab.out", clone)
    # The page's epoch has not ended, while those of the small data take four steps.
    fresh = re.sub(r"^epoch=\d+ test_loss.*\n", "", fresh, flags=re.M)
    # Those of the end, which came after the look.
    assert_shown(
        shown_by("fault_tolerance", "Start 1 on"),
        re.match(r"(?s).*^Resumed.*?\nepoch.*?\n", fresh, re.M)[0],
    )


@pytest.mark.matrix
def test_lab_the_shell_in_between(clone, cluster):
    """Fault tolerance: nobody saves, then both ranks do."""
    page = CHAPTERS["fault_tolerance"].read_text()
    [lab] = re.findall(r"^```sh\n(cat docs/labs/signal.*?)^```$", page, re.M | re.S)
    # sbatch --wait ends as the first job does.
    fresh = bash(f"set +e\n{lab}", clone, (NAMESPACES, "exec"), **cluster.environment)
    assert_shown(shown_by("fault_tolerance", "rank 1: SIGTERM") + "...\n", fresh)
    [first, second] = fresh.split("Submitted batch job")[1:]
    assert "saved" not in first and second.count("saved after step") == 2


@pytest.mark.matrix
def test_lab_counted_all_reduces(clone):
    """Chapter 11's sum, of every collective of 100 steps on two ranks."""
    page = CHAPTERS[11].read_text()
    [lab] = re.findall(r"^```sh\n(sed '/\^def all_reduce.*?)^```$", page, re.M | re.S)
    assert bash(lab, clone, NPROC_PER_NODE=2) == shown_by(11, "2000 32768")


@pytest.mark.matrix
def test_lab_silent_mistakes(clone):
    """Chapter 9."""
    padding = "./torchrun.sh docs/labs/padding_broken.py"
    commands = f"./torchrun.sh docs/labs/set_epoch_broken.py\n{padding}\n"
    fresh = bash(f"{commands}NPROC_PER_NODE=4 {padding}", clone, NPROC_PER_NODE=2)
    assert_shown(shown_by(9, "epoch 1 begins with"), fresh)


# --- what pages compute from measured numbers, and the loop that measures ---

YOUR_SCRIPT, FASTER, SECOND_NODE, FINE_TUNING = (
    (REPOSITORY / f"docs/{name}.md").read_text()
    for name in ("appendix_your_script", "04_faster", "05_a_second_node", "fine_tuning")
)
WITHOUT_FIT, TENSOR_PARALLEL = (
    (REPOSITORY / f"docs/{name}.md").read_text()
    for name in ("10_when_the_model_does_not_fit", "11_tensor_parallel")
)


def test_a_job_for_each_size(tmp_path):
    """The loop of chapter 5, with a stand-in for sbatch: each GPU has its eight CPUs."""
    [loop] = re.findall(r"^```sh\n(for size in .*?)^```$", SECOND_NODE, re.M | re.S)
    tools = stand_ins(tmp_path / "tools", {"sbatch": 'echo "$@"'})
    done = run("bash", "-c", loop, env=environment(PATH=f"{tools}:/usr/bin:/bin"))
    command = "--no-requeue --job-name={0}x{1} --nodes={0} --gpus-per-node={1} --cpus-per-task={2}"
    command += " launch_slurm_with_torchrun.sh ../mine/my_script.py"
    sizes = ((1, 1, 8), (1, 8, 64), (2, 8, 64))
    assert done.stdout.splitlines() == [command.format(*size) for size in sizes]


def test_one_table_of_the_project():
    """Hours and cost follow from the images per second. The figure and the next chapter repeat
    them, and the bars are as long as their numbers."""
    row = r"^\| `?([\w.]+[^|`]*)`? \| ([\d,]+) \| \d+ % \| [\d.]+ \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, FASTER, re.M)
    names, shown, hours, costs = zip(*rows, strict=True)
    rates = [int(rate.replace(",", "")) for rate in shown]
    computed = [90 * 1.28e6 / rate / 3600 for rate in rates]
    assert len(rows) == 7
    assert [float(value) for value in hours] == [round(value, 1) for value in computed]
    assert [int(value) for value in costs] == [round(3 * value) for value in computed]

    figure = (REPOSITORY / "docs/figures/speed.svg").read_text()
    bar = r'>([^<]+)</text>\n<rect .* width="([\d.]+)" height="20"/>\n<text .*>([\d,]+)</text>'
    found, widths, numbers = zip(*re.findall(bar, figure), strict=True)
    assert (found, numbers) == (names, shown)
    scale = float(widths[-1]) / rates[-1]
    assert [float(width) for width in widths] == pytest.approx([scale * x for x in rates], abs=0.1)
    spoken = re.search('aria-label="(.*)"', figure)[1]
    assert re.findall(r"\b([\d,]*\d{3})[,.]", spoken) == [*shown]

    ours = re.findall(r"^\| one H200, .* \| ([\d,]+) \| ([\d.]+) \|.*\| us \|$", SECOND_NODE, re.M)
    assert ours == [(shown[0], hours[0]), (shown[-1], hours[-1])]

    # A default start has TF32 for its convolutions, and no workers. What a step waits for the
    # loader is the first row's step less the second's, or that part of it in which the GPU is idle.
    first, second, third = (128 / rate for rate in rates[:3])
    default = [128 / (waits + third) for waits in (0.64 * first, first - second)]
    prose = " ".join(FASTER.split())
    low, high = map(int, re.search(r"had some (\d+) to (\d+) images/s, by comp", prose).groups())
    assert [low, high] == [round(rate, -1) for rate in default]
    factor = 2 * rates[-1] / (low + high)
    assert round(factor) == 6 and "about six times as fast as a default start" in prose


def test_what_a_second_node_costs_is_computed():
    """All-reduces of 16 ranks, and how much faster two nodes are than one."""
    rows = re.findall(
        r"^\| (?:eight|one) adapters? of .*? \| (.*GB/s) \| (.*) \|$", SECOND_NODE, re.M
    )
    assert len(rows) == 3
    for busbw, cells in rows:
        buses = [float(value) for value in re.findall(r"[\d.]+", busbw)]
        columns = [re.findall(r"[\d.]+", cell) for cell in cells.split(" | ")]
        for times, factors, weights, step in (
            (*columns[:2], 25.6e6, 128 / 3.110),
            (*columns[2:], 124e6, 32 * 1024 / 538),
        ):
            found = [second_node(weights, step, bus, 16) for bus in buses]
            sent = [its["sent"] for its in found]
            faster = [its["faster"] for its in found]
            assert [float(ms) for ms in times] == pytest.approx(sent, rel=0.15)
            # A cell has one number if both are the same.
            assert {float(factor) for factor in factors} == {round(value, 1) for value in faster}


def test_lines_in_your_script():
    """Chapter 7 and its figure count the lines that many_gpus_preemptible.py adds."""
    scripts = ("examples/many_gpus.py", "examples/many_gpus_preemptible.py")
    added = run("git", "diff", "--no-index", "--numstat", *scripts).stdout.split()[0]
    for page in (CHAPTERS[7], REPOSITORY / "docs/figures/which_save.svg"):
        assert {*re.findall(r"\b(\d+) lines in your script", page.read_text())} == {added}, page


def test_a_loss_over_tokens():
    """The appendix's sum of two ranks' gradients is that of one process, with unequal counts."""
    [written] = re.findall(r"`backward\(\)` on `(.+?)`", YOUR_SCRIPT)
    weight, values = torch.tensor(3.0, requires_grad=True), torch.arange(1.0, 6.0)
    parts, means = (values[:1], values[1:]), []
    for part in parts:
        names = {"summed_loss": (weight * part).square().sum(), "world_size": 2, "count": 5}
        [gradient] = torch.autograd.grad(eval(written, names), weight)
        means.append(gradient / 2)  # as DDP averages
    [whole] = torch.autograd.grad((weight * values).square().mean(), weight)
    assert sum(means) == pytest.approx(whole)


def test_weights_of_lora():
    """Two matrices of rank 16 beside each linear layer of Qwen3-8B."""
    size = SIZES["8b"]
    hidden, heads, key_values, head, mlp = (
        size[name]
        for name in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
        )
    )
    outputs = (heads * head, key_values * head, key_values * head, mlp, mlp)
    sides = sum(hidden + width for width in outputs) + heads * head + hidden + mlp + hidden
    weights = 16 * size["num_hidden_layers"] * sides
    shown = re.search(r"`--lora 16` (\d+)\s+million", FINE_TUNING)[1]
    assert int(shown) == round(weights / 1e6)
    share = re.search(r"8\.2 billion, which is ([\d.]+) %", FINE_TUNING)[1]
    assert float(share) == round(100 * weights / 8.19e9, 1)


def test_flops_of_an_image(capsys):
    """Chapter 4's script counts what its answer says, here without memory for the numbers."""
    [script] = re.findall(r"^cat > lab.py <<'END'\n(.*?flop_counter.*?)^END$", FASTER, re.M | re.S)
    with torch.device("meta"):
        exec(script, {})
    printed = capsys.readouterr().out.strip()
    prose = " ".join(FASTER.split())
    assert f"torch prints `{printed}`" in prose
    flops = float(printed.split()[0])
    assert 0.97 * 3 * 2 * 4.1 < flops < 3 * 2 * 4.1 and "3 x 2 x 4.1 = 24.6 GFLOP" in prose
    most = round(989e3 / flops, -2)
    assert f"at {most:,.0f} images a second, and 3,110 are {311_000 / most:.0f} %" in prose


def test_memory_by_hand():
    """Chapter 10: the command prints what the page shows, and the sum by hand is its sum."""
    [command] = re.findall(r"^python (aux/memory.py --model qwen3-32b .*)$", WITHOUT_FIT, re.M)
    shown = ranks(0, *command.split()).stdout
    assert shown in WITHOUT_FIT
    weights = int(re.search(r"Weights: ([\d,]+)", shown)[1].replace(",", ""))
    names = ("about", "weights", "gradients", "states", "activations", "logits")
    whole, held, gradients, states, activations, logits = (
        float(re.search(rf"\b{name} ([\d.]+)", shown)[1]) for name in names
    )
    shards, prose = 16 * weights / 32, " ".join(WITHOUT_FIT.split())
    assert f"= {shards / 1e9:.1f} GB, or {shards / 2**30:.1f} GiB" in prose
    assert logits == round(4096 * 151_936 * 10 / 2**30, 1)
    compute = held + gradients + states - shards / 2**30
    assert f"({compute:.1f}) and the activations ({activations})" in prose and whole < 0.9 * 40
    kept = ranks(0, *command.replace(" --recompute", "").split()).stdout
    assert f"alone take {re.search(r'activations ([0-9.]+)', kept)[1]}." in prose


def test_numbers_that_tensor_parallelism_sends():
    """Chapter 11's sum by hand, of the model of tensor_parallel_by_hand.py."""
    prose, size = " ".join(TENSOR_PARALLEL.split()), SIZES["cpu"]
    activation, width = 8 * 32 * size["hidden_size"], size["hidden_size"]
    heads, key_values = (size[f"num_{name}_heads"] for name in ("attention", "key_value"))
    attention = 2 * width * size["head_dim"] * (heads + key_values)
    weights = attention + 3 * width * size["intermediate_size"]
    assert f"8 x 32 x 128 = {activation:,} numbers" in prose
    assert f"a block has {weights:,} weights" in prose and 3 * weights > 8 * activation


def test_sums_in_the_prose_of_chapter_5():
    prose = " ".join(SECOND_NODE.split())
    hours = 90 * 1.28e6 / (8 * 0.9 * 3110) / 3600
    assert f"small JPEGs take {hours:.1f} hours, or {8 * hours:.1f} GPU-hours" in prose
    assert f"you wait a sixth less, and use {2 / 1.2:.1f} times as many GPU-hours" in prose
    images = round(16 * 3110, -4)
    assert f"16 GPUs read {images:,} images a second" in prose
    assert f"that is {images * 110e3 / 1e9:.1f} GB/s" in prose


# --- what is generated, and what is promised ---


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_diffs_are_fresh(path):
    """`python dev/write_diffs.py README.md docs/*.md` writes them anew."""
    text = path.read_text()
    # One that begins with a file's name is a patch, which another test applies.
    commands = re.findall(r"^```diff\n(?!---)", text, re.M)
    assert len(DIFF.findall(text)) == len(commands), "a diff without its command above it"
    assert with_diffs(text) == text


ROOMS = "aux|dev|distributed|docs|examples|local|sites|tests"


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    heads = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "path",
    [
        *DOCUMENTS,
        *(REPOSITORY / name for name in ("AGENTS.md", "CHANGELOG.md", ".github/SECURITY.md")),
        REPOSITORY / "dev/tested.md",
    ],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_links_and_paths_lead_somewhere(path):
    text = path.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        if path.name == "CHANGELOG.md":  # names what is gone
            continue
        assert all(target in targets for target in re.findall(r"^make ([a-z-]+)", span)), span
        for name in re.findall(rf"(?<![\w./-])(?:{ROOMS})/[\w/-]+\.\w+", span):
            assert (REPOSITORY / name).exists(), name
