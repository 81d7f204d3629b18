"""Scripts of other frameworks: docs/frameworks.md, and what its tables say of them.

`make test-all` installs the frameworks into .venv-guests, beside the torch of .venv.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import job_processes
from slurm import LAUNCHERS, REPOSITORY, at_once, one_rank_a_node, ranks, run, wait_for

FOLDER = REPOSITORY / "examples"
PAGE = (REPOSITORY / "docs/frameworks.md").read_text()
# The table of launchers: a link to the script, then "yes" or "no" for each launcher.
CELL = r" \| (yes|no)\b[^|]*"
ROW = rf"^\| [^|]*with_(\w+)\.py\){CELL * 3} \|$"
TABLE = {
    guest: dict(zip(LAUNCHERS, cells, strict=True)) for guest, *cells in re.findall(ROW, PAGE, re.M)
}
# Those of the table of frameworks
GUESTS = ["trainer", "accelerate", "lightning", "deepspeed", "fsdp"]

Step = tuple[int, str, float]  # its number, the learning rate as printed, the loss


# --- what one process trains ---


def lines(guest: str, log: str) -> list[tuple[str, ...]]:
    """A step's number (the Trainer prints epochs), its learning rate and its loss, as printed."""
    if guest == "trainer":
        found = re.findall(
            r"\{'loss': '(\S+)', .*'learning_rate': '(\S+)',.* 'epoch': '(\S+)'\}", log
        )
        return [(epoch, rate, loss) for loss, rate, epoch in found]
    return re.findall(r"^step=(\d+) learning_rate=(\S+) loss=(\S+)$", log, re.M)


def steps(guest: str, log: str, nodes: int = 2, per_epoch: int = 16) -> list[Step]:
    """The steps that a log shows, each as often as it was trained, in their order."""
    if guest != "trainer":
        return [(int(step), rate, float(loss)) for step, rate, loss in lines(guest, log)]
    found = Counter(lines(guest, log))
    # Rank 0 of each node prints it.
    assert all(count % nodes == 0 for count in found.values()), found
    each = [line for line, count in found.items() for _ in range(count // nodes)]
    whole = [(round(float(epoch) * per_epoch), rate, float(loss)) for epoch, rate, loss in each]
    return sorted(whole)


def of_one_process(guest: str, packages: dict, folder: Path, epochs: int = 3) -> list[Step]:
    """A plain loop's, and for the Trainer, whose model is another one, its own on one rank."""
    if guest == "trainer":
        script = variant(guest, folder, epochs)
        done = ranks(1, script, folder / "saved", **packages)
    else:
        done = ranks(0, "tests/scripts/plain_training.py", epochs)
    assert done.returncode == 0, done.stderr
    expected = steps(guest, done.stdout, nodes=1)
    assert [step for step, *_ in expected] == list(range(1, epochs * 16 + 1))
    return expected


def assert_same(found: list[Step], expected: list[Step]):
    """The same steps, each once, at the same rates, with the same losses but for rounding, which
    was 0.00002 of them at most; but the Trainer prints four digits. With a rate that is 1 % too
    high they are 0.001 of them apart in the fourth step, and 0.1 at the end."""
    assert [step[:2] for step in found] == [step[:2] for step in expected]
    assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in expected], rel=1e-3)


# --- the scripts, as they are and changed ---

LISTEN = "preemption.listen()  # before the slow imports, because Slurm may ask at any time\n"


def variant(guest: str, folder: Path, epochs: int = 3, code: str = "", changes: tuple = ()) -> Path:
    """A copy of a script in a new folder: with more epochs, with code behind its
    `preemption.listen()`, and with other words, given as pairs."""
    text = (FOLDER / f"with_{guest}.py").read_text()
    for old, new in [(" = 3, 32", f" = {epochs}, 32"), *changes, (LISTEN, LISTEN + code)]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir()
    script = folder / f"with_{guest}.py"
    script.write_text(text)
    return script


def trained_together(log: str) -> bool:
    """Whether four ranks say that they are of four, and all have the same weights."""
    said = re.findall(r"^rank (\d) of (\d+): weights (\S+)$", log, re.M)
    ranks, sizes, weights = zip(*said, strict=True) if said else ((), (), ())
    return sorted(ranks) == list("0123") and set(sizes) == {"4"} and len(set(weights)) == 1


@pytest.mark.long
def test_fsdp_by_hand(tmp_path):
    """Without a cluster: one rank's steps are those of a plain loop, and two continue its run."""
    whole = of_one_process("fsdp", {}, tmp_path)
    command = ["examples/with_fsdp.py", tmp_path / "out"]
    for count, first in ((1, 1), (2, 31)):
        done = ranks(count, *command)
        assert done.returncode == 0, done.stderr
        assert_same(steps("fsdp", done.stdout), whole[first - 1 :])
        said = re.findall(r"^rank (\d) of (\d): weights", done.stdout, re.M)
        assert sorted(said) == [(str(rank), str(count)) for rank in range(count)]
        assert ("Resumed after step 30\n" in done.stdout) == (first == 31)
        shutil.rmtree(tmp_path / "out/step_40")


def test_the_table_has_every_guest():
    assert {f"with_{guest}" for guest in TABLE} == {path.stem for path in FOLDER.glob("with_*.py")}


@pytest.mark.matrix
@pytest.mark.parametrize("guest", TABLE)
def test_guest(guest, packages, cluster, tmp_path):
    """Four ranks on two nodes train what one process trains, under the launchers of the table."""
    script = f"examples/with_{guest}.py"
    jobs = {}
    for way, launcher in LAUNCHERS.items():
        command = [f"--output={tmp_path}/%j", launcher, script, tmp_path / way]
        jobs[way] = cluster.submit(*command, env=packages)
    expected = of_one_process(guest, packages, tmp_path / "one") if guest in GUESTS else []
    for way, ended in [(way, cluster.wait(job, timeout=300)) for way, job in jobs.items()]:
        right = ended.state == "COMPLETED" and trained_together(ended.log)
        assert right == (TABLE[guest][way] == "yes"), f"{way}: {ended.state}\n{ended.log}"
        if guest in GUESTS:
            assert_same(steps(guest, ended.log), expected)


@pytest.mark.matrix
def test_script_that_spawns(cluster, tmp_path):
    """By the copy of a launcher that the page makes."""
    [command] = re.findall(r"^sed .*$", PAGE, re.M)
    made = run("bash", "-c", command.replace("> ", f"> {tmp_path}/"))
    assert made.returncode == 0, made.stderr
    launcher = tmp_path / command.rpartition(" ")[2]
    ended = cluster.sbatch(f"--output={tmp_path}/%j", launcher, FOLDER / "with_spawn.py")
    assert ended.state == "COMPLETED" and trained_together(ended.log), ended.log


# --- without the scripts' lines: what each framework does by itself ---

BY_ITSELF = {
    "trainer": [
        ("per_device_train_batch_size=BATCH // world_size", "per_device_train_batch_size=BATCH"),
        ("    callbacks=[Stop()],\n", ""),
        # With the bar, rank 0 alone prints.
        ("    disable_tqdm=True,  # no bar in a log\n", ""),
    ],
    "accelerate": [
        ("(split_batches=True,", "("),
        # What the loader's length is, once it is prepared for two ranks
        ("EPOCHS * len(loader))", "EPOCHS * len(loader) // 2)"),
        ("preemption.asked(accelerator.device, step)", "False"),
    ],
    "lightning": [
        ("(train_set, BATCH // world_size,", "(train_set, BATCH,"),
        ('{"scheduler": schedule, "interval": "step"}', "schedule"),
        ("[Stop(), ", "["),
    ],
    "deepspeed": [
        ('"train_batch_size"', '"train_micro_batch_size_per_gpu"'),
        ("preemption.asked(engine.device, step)", "False"),
    ],
    "fsdp": [
        ("per_rank = BATCH // world_size", "per_rank = BATCH"),
        ("preemption.asked(device, step)", "False"),
    ],
}
# A step of a second, in all frameworks
SLOW = """
import os, time, torch
backward = torch.Tensor.backward
def slowly(*arguments, **options):
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) < 2:
        time.sleep(1)
    backward(*arguments, **options)
torch.Tensor.backward = slowly
"""
TWO = "--gpus-per-node=1"  # ranks, one on each of two nodes
# Blocks of several bars run into each other, and then the log is not UTF-8.
NO_BLOCKS = {"TQDM_BAR_FORMAT": "{n} of {total}\n"}


def saved_steps(guest: str, folder: Path) -> list[int]:
    """The steps of the checkpoints, whole or not."""
    name = {"trainer": "checkpoint-*", "lightning": "*step=*.ckpt", "deepspeed": "global_step*"}
    found = folder.glob(name.get(guest, "step_*"))
    return sorted(int(re.findall(r"\d+", path.stem)[-1]) for path in found)


@pytest.mark.matrix
def test_batch_by_itself(packages, cluster, tmp_path):
    """Two ranks train with twice the batch, and so in half the steps. The rates are those of every
    second step, or what each framework makes of the schedule."""

    def trains(guest: str):
        folder = tmp_path / guest
        script = variant(guest, folder, changes=BY_ITSELF[guest])
        command = [f"--output={folder}/log", TWO, LAUNCHERS["torchrun"], script, folder / "saved"]
        ended = cluster.sbatch(*command, env=packages | NO_BLOCKS, timeout=300)
        assert ended.state == "COMPLETED", ended.log
        expected = of_one_process(guest, packages, folder / "one")
        numbers, rates, losses = zip(*steps(guest, ended.log, 1, 8), strict=True)
        assert list(numbers) == list(range(1, 25)) and len(expected) == 48
        assert losses[-1] != pytest.approx(expected[-1][2], rel=0.001)
        of_one = [rate for _, rate, _ in expected]
        if guest == "accelerate":
            # The schedule steps twice a step: at half time it is at its end, and then rises again.
            assert float(rates[12]) == 0 and float(rates[-1]) > 0.009, rates
        elif guest == "lightning":
            # It steps once an epoch.
            assert [len(set(rates[first : first + 8])) for first in (0, 8, 16)] == [1, 1, 1]
            assert len(set(rates)) == 3, rates
        elif guest == "deepspeed":
            # It was made for the steps of one process.
            assert list(rates) == of_one[:24]
        else:
            assert list(rates) == of_one[::2]

    at_once(trains, [(guest,) for guest in GUESTS])


@pytest.mark.matrix
def test_sigterm_by_itself(packages, cluster, tmp_path):
    """SIGTERM and the time limit end it, nothing is saved, and it is not requeued."""

    def ends(guest: str):
        folder = tmp_path / guest
        changes = [*BY_ITSELF[guest], ("import preemption\n\n", "import preemption\n" + SLOW)]
        script = variant(guest, folder, 100, changes=changes)
        script.write_text(script.read_text().replace(LISTEN, ""))
        for state, limit in (("FAILED", 10), ("TIMEOUT", 2)):
            log, saved = folder / state, folder / f"{state}-saved"
            command = [f"--output={log}", TWO, f"--time={limit}", LAUNCHERS["torchrun"], script]
            job = cluster.submit(*command, saved, env=packages | NO_BLOCKS)
            wait_for(lambda log=log: log.exists() and len(lines(guest, log.read_text())) > 3, 180)
            if state == "FAILED":
                cluster.exec("scancel", "--signal=TERM", job)
            ended = cluster.wait(job, timeout=240)
            assert (ended.state, cluster.show(job)["Restarts"]) == (state, "0"), ended.log
            # Only what it saves every ten steps, or in each epoch of eight.
            assert all(step % 10 == 0 or step % 8 == 0 for step in saved_steps(guest, saved))

    at_once(ends, [(guest,) for guest in GUESTS])


# --- stopped, killed and resumed ---


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder to submit from, in which the runs' folders are."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("env.sh", "torchrun.sh", *LAUNCHERS.values(), "aux", "distributed", ".venv"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


@pytest.mark.matrix
def test_stopped(packages, cluster, clone, tmp_path):
    """By SIGTERM, then by its time limit. It saves, is requeued, finds its folder by RUN, and has
    trained each step once, as one process would have."""

    def resumes(guest: str, way: str):
        folder = tmp_path / f"{guest}-{way}"
        script = variant(guest, folder, 8, SLOW)
        command = [f"--output={folder}/log", *one_rank_a_node(way), "--time=2"]
        job = cluster.submit(*command, LAUNCHERS[way], script, env=packages, cwd=clone)
        log = folder / "log"
        wait_for(lambda: log.exists() and len(lines(guest, log.read_text())) > 2, 120)
        cluster.exec("scancel", "--signal=TERM", job)
        cluster.start_again(job)
        wait_for(lambda: cluster.show(job)["JobState"] == "RUNNING", 60)
        cluster.start_again(job, 240)
        ended = cluster.wait(job, 180)
        assert ended.state == "COMPLETED", ended.log
        assert ended.log.count("Requeued: it resumes by itself") == 2, ended.log
        assert "DUE TO TIME LIMIT" in ended.log, ended.log
        expected = of_one_process(guest, packages, folder / "one", 8)
        assert_same(steps(guest, ended.log), expected)
        assert saved_steps(guest, clone / f"checkpoints/{job}")

    cases = [("trainer", "torchrun"), ("accelerate", "srun"), ("deepspeed", "spawn")]
    cases += [("fsdp", "torchrun"), ("lightning", "torchrun"), ("lightning", "srun")]
    at_once(resumes, cases)


# SIGKILL to one rank while it saves for the second time
KILL = """
import os, shutil, signal, time, torch
now, asked = 0, preemption.asked
def asks(device, step=None):
    global now
    now = step
    return asked(device, step)
preemption.asked = asks
def kill_in(module, name, rank, when):
    function = getattr(module, name)
    def killed(*arguments, **options):
        if os.environ["RANK"] == rank and when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    setattr(module, name, killed)
"""
BEFORE_THE_OPTIMIZER = "kill_in(torch, 'save', '0', lambda *_: now == 20)"
KILLS = {
    "trainer": BEFORE_THE_OPTIMIZER,
    "accelerate": BEFORE_THE_OPTIMIZER,
    # A file that is moved from /tmp to another file system is copied.
    "lightning": """
def half(source, target):
    with open(source, "rb") as whole, open(target, "wb") as part:
        part.write(whole.read(1000))
    return True
def when(source, target):
    return now == 32 and target.endswith("last.ckpt") and half(source, target)
kill_in(shutil, "move", "0", when)
""",
    # Meanwhile rank 0 would write `latest`.
    "deepspeed": """
def when(state, path):
    return now == 20 and "optim" in str(path) and not time.sleep(5)
kill_in(torch, "save", "1", when)
""",
    "fsdp": """
import checkpoint
kill_in(checkpoint.Folder, "publish", "0", lambda *arguments: arguments[-1] == 20)
""",
}


@pytest.mark.matrix
def test_killed_in_a_save(packages, cluster, tmp_path):
    """The next start takes the checkpoint before, and trains what one process would have."""

    def resumes(guest: str):
        folder = tmp_path / guest
        script = variant(guest, folder, code=KILL + KILLS[guest] + "\n")
        saved = folder / "saved"
        command = [f"--output={folder}/%j", TWO, LAUNCHERS["torchrun"]]
        ended = cluster.sbatch(*command, script, saved, env=packages, timeout=180)
        assert ended.state == "FAILED" and "SIGKILL" in ended.log, ended.log
        expected = of_one_process(guest, packages, folder / "one")
        before = steps(guest, ended.log)
        assert_same(before, expected[: len(before)])
        if guest == "trainer":
            # As if the kill had come later still
            state = (saved / "checkpoint-10/trainer_state.json").read_text()
            (saved / "checkpoint-20/trainer_state.json").write_text(state[: len(state) // 2])
        script = FOLDER / f"with_{guest}.py"
        ended = cluster.sbatch(*command, script, saved, env=packages, timeout=180)
        assert ended.state == "COMPLETED", ended.log
        found = steps(guest, ended.log)
        assert_same(found, expected[-len(found) :])
        # Lightning saves at the end of each epoch, and was killed in the second file of the second.
        assert (len(before), found[0][0]) == ((32, 33) if guest == "lightning" else (20, 11))

    at_once(resumes, [(guest,) for guest in GUESTS])


# --- more of what the page says ---


@pytest.mark.matrix
@pytest.mark.parametrize("reaches", ["ranks", "all"])
def test_lightning_requeues_itself(reaches, packages, cluster, tmp_path):
    """At SIGUSR1, if srun starts the ranks. It saves wherever a rank happens to be, and so hangs if
    one is in a collective already: in steps of a second all are at the same line when it comes. If
    the signal reaches all processes, loader workers do not save as well."""
    changes = [("[Stop(), ", "["), ("ckpt_path=last", 'ckpt_path="last"')]
    if reaches == "all":
        old, workers = "sampler=sampler, ", "num_workers=2, multiprocessing_context='fork', "
        workers += "worker_init_fn=preemption.ignore, persistent_workers=True, "
        changes += [(old, old + workers)]
    script = variant("lightning", tmp_path / "copy", 1000, SLOW, changes)
    script.write_text(script.read_text().replace(LISTEN, ""))
    command = [f"--output={tmp_path}/log", *one_rank_a_node("srun"), LAUNCHERS["srun"], script]
    job = cluster.submit(*command, tmp_path / "saved", env=packages)
    wait_for(lambda: list(tmp_path.glob("saved/*.ckpt")), 180)
    processes = job_processes.ranks(job, script.name)
    assert len(processes) == (2 if reaches == "ranks" else 6)
    if reaches == "ranks":
        cluster.exec("scancel", "--signal=USR1", job)
    else:
        for process in processes:
            os.kill(process, signal.SIGUSR1)
    cluster.start_again(job, 180)
    assert [path.name for path in tmp_path.glob("saved/hpc_*")] == ["hpc_ckpt_1.ckpt"]
    words = "Restored all states from the checkpoint at "
    wait_for(lambda: words in (tmp_path / "log").read_text(), 180)
    cluster.exec("scancel", job)
    assert cluster.wait(job).state == "CANCELLED"


@pytest.mark.matrix
def test_evaluation_of_the_trainer(packages, tmp_path):
    """Its loss is that of one rank if ranks x batch divides the set, and else another one."""
    odd = '[{"input_ids": row, "labels": row} for row in torch.zeros(1, 16, dtype=torch.long)]'
    losses = []
    for data in ("examples[:15]", "examples[:8]"):
        changes = [("examples[512:]", f"{data} + {odd}")]
        changes += [("eval_batch_size=BATCH // world_size", "eval_batch_size=8")]
        for count in (1, 2):
            folder = tmp_path / f"{len(losses)}"
            script = variant("trainer", folder, 1, changes=changes)
            done = ranks(count, script, folder / "saved", **packages)
            assert done.returncode == 0, done.stderr
            losses.append(float(re.findall(r"'eval_loss': '(\S+)'", done.stdout)[0]))
    sixteen, nine = losses[:2], losses[2:]
    assert sixteen[0] == sixteen[1] and abs(nine[0] - nine[1]) > 0.01, losses


REQUEUES = "preemption.requeue = lambda folder: print('REQUEUE', folder) is None\n"


def test_asked_at_the_end(tmp_path):
    """A signal that comes after the last step: torchrun would fail, so the job is requeued."""
    changes = [("weights = ", "os.kill(os.getpid(), 15)\nweights = ")]
    script = variant("fsdp", tmp_path / "copy", 1, REQUEUES, changes)
    done = ranks(1, script, tmp_path / "saved")
    assert done.returncode == 0 and f"\nREQUEUE {tmp_path}/saved\n" in done.stdout, done
    for script in FOLDER.glob("*.py"):
        assert "preemption.end(False" not in script.read_text(), script


def test_gpus_of_every_maker():
    """torch.cuda knows no Intel's, on which a script would train on the CPU without a word."""
    for script in FOLDER.glob("with_*.py"):
        assert "torch.cuda." not in script.read_text(), script


def test_a_stop_whose_save_fails(tmp_path):
    """Is no reason to requeue the job."""
    fails = "import checkpoint\ncheckpoint.Folder.publish = lambda *_: False\n"
    changes = [("preemption.asked(device, step)", "True")]
    script = variant("fsdp", tmp_path / "copy", 1, REQUEUES + fails, changes)
    done = ranks(1, script, tmp_path / "saved")
    assert done.returncode == 1 and "step=1 " in done.stdout and "REQUEUE" not in done.stdout, done


def test_the_newest_of_the_trainer(tmp_path, monkeypatch):
    """Whole or older. If it cannot be read, the run ends, and does not begin anew."""
    [code] = re.findall(r"^```python\n(def newest.*?)^```$", PAGE, re.M | re.S)
    reads = SimpleNamespace(load_from_json=lambda path: json.loads(Path(path).read_text()))
    names = {"os": os, "re": re, "contextlib": contextlib, "TrainerState": reads}
    exec(code, names)
    newest, folder = names["newest"], tmp_path / "new/run"
    assert newest(str(folder)) is None and folder.is_dir()
    for name, text in (("9", "{}"), ("10", "{}"), ("20", "{"), ("30", None), ("40.bad", "{}")):
        (folder / f"checkpoint-{name}").mkdir()
        if text:
            (folder / f"checkpoint-{name}/trainer_state.json").write_text(text)
    assert newest(str(folder)) == f"{folder}/checkpoint-10"
    (folder / "checkpoint-20/trainer_state.json").unlink()
    (folder / "checkpoint-20/trainer_state.json").mkdir()
    with pytest.raises(IsADirectoryError):
        newest(str(folder))

    def fails(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(PermissionError):
        newest(str(folder))


@pytest.mark.matrix
def test_order_of_deepspeed_s_loader(packages):
    """It is the same in each epoch."""
    done = ranks(1, "tests/scripts/deepspeed_order.py", **packages)
    first, second = re.findall("^ORDER .*$", done.stdout, re.M)
    assert first == second and "[0, 1, 2, 3" not in first


def test_the_page_shows_the_scripts():
    """Each Python block is a piece of a script, as it is."""
    scripts = [path.read_text() for path in FOLDER.glob("with_*.py")]
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) == 4
    for block in blocks:
        assert any(block in script for script in scripts), block
    [newest] = [block for block in blocks if block.startswith("def newest")]
    assert newest in (FOLDER / "any_trainer.py").read_text()


# --- programs that bring a command of their own ---

# As the page writes it behind the launcher, and a script of another folder
THEIRS = {
    "trl": re.search(r"examples/any_trainer\.py \\\n +-m trl.*", PAGE)[0].replace("\\\n", ""),
    "script": "examples/any_trainer.py theirs/with_trainer.py checkpoints/mine",
}


def theirs(folder: Path, qwen: Path):
    """128 conversations for TRL, a tiny model, and a Trainer's script that has none of our lines,
    below a folder."""
    (folder / "chats").mkdir(parents=True)
    say, yes = {"role": "user", "content": "Say yes"}, {"role": "assistant", "content": "yes"}
    chats = [{"messages": [say, yes] * (1 + number % 3)} for number in range(128)]
    lines = "".join(json.dumps(chat) + "\n" for chat in chats)
    (folder / "chats/train.jsonl").write_text(lines)
    (folder / "qwen").symlink_to(qwen)
    script = variant("trainer", folder / "theirs", 6, changes=[BY_ITSELF["trainer"][1]])
    text = script.read_text().replace(LISTEN, "").replace("newest(folder)", "None")
    text = re.sub(r"^(import preemption|preemption\.end\(.*)\n", "", text, flags=re.M)
    assert not re.search("^ *preemption", text.partition("torch.manual_seed")[2], re.M)
    script.write_text(text)


@pytest.mark.matrix
@pytest.mark.parametrize("whose", THEIRS)
def test_any_trainer(whose, packages, cluster, clone, qwen, tmp_path):
    """Two ranks, stopped by SIGTERM, are requeued, and have trained each step of one process once,
    with TRL and with a script that knows nothing of Slurm."""
    theirs(clone, qwen)
    (clone / "examples").symlink_to(FOLDER)
    words, epochs, per_epoch = THEIRS[whose].split(), 6, 16
    command = [f"--output={tmp_path}/log", TWO, LAUNCHERS["torchrun"], *words]
    one = [*words[:-1], tmp_path / "one"]
    if whose == "trl":
        options = f"--num_train_epochs {epochs} --logging_steps 1 --bf16 no --use_cpu yes".split()
        options += ["--per_device_train_batch_size"]
        command += [*options, 4]
        one += [*options, 8]
    job = cluster.submit(*command, env=packages | NO_BLOCKS, cwd=clone)
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and len(lines("trainer", log.read_text())) > 2, 180)
    cluster.exec("scancel", "--signal=TERM", job)
    cluster.start_again(job)
    ended = cluster.wait(job, 240)
    assert ended.state == "COMPLETED", ended.log
    assert ended.log.count("Requeued: it resumes by itself") == 1, ended.log
    assert saved_steps("trainer", clone / "checkpoints/mine"), ended.log
    done = ranks(1, *one, cwd=clone, **packages)
    assert done.returncode == 0, done.stderr
    expected = steps("trainer", done.stdout, nodes=1)
    assert [step for step, *_ in expected] == list(range(1, epochs * per_epoch + 1))
    assert_same(steps("trainer", ended.log, nodes=1 if whose == "trl" else 2), expected)
