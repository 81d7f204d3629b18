"""docs/other_jobs.md: several programs in one job, and Ray. Its blocks as they stand, then each
program killed, the job stopped, and requeued: nothing is left on any node."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

import job_processes
from pages import bash, steps, try_block
from slurm import NAMESPACES, REPOSITORY, at_once, environment, run, stand_ins, wait_for

PAGE = REPOSITORY / "docs/other_jobs.md"


def block(words: str) -> str:
    [found] = [text for _, text, _ in steps(PAGE) if words in text]
    return found


@pytest.fixture(scope="module")
def vllm(clone, tmp_path_factory) -> dict[str, str]:
    """The environment of a job that finds a stand-in for it."""
    server = f'exec {sys.executable} {REPOSITORY}/tests/scripts/completions.py "$@"'
    folder = stand_ins(tmp_path_factory.mktemp("bin"), {"vllm": server})
    return {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_every_server_listens_where_ready_asks():
    """vLLM's and TRL's own port is 8000, at which ready would wait until its limit."""
    page = PAGE.read_text()
    servers = re.findall(r"(?:start \w+ \d vllm serve|`trl vllm-serve)[^`\n]*", page)
    assert len(servers) == 3 and all('--port "$PORT"' in server for server in servers), servers
    asked = re.findall(r'^ *ready "http://\S+:(\S+?)/health"$', page, re.M)
    assert set(asked) == {"$PORT"}


@pytest.mark.matrix
def test_a_trainer_and_its_server(clone, cluster, vllm):
    bash(block("> both.sh"), clone, (NAMESPACES, "exec"), **cluster.environment, **vllm)
    [log] = clone.glob("both.sh_*.out")
    assert log.read_text().count("\nFinished: epoch=1") == 1, log.read_text()


@pytest.mark.matrix
def test_servers_and_a_list(clone, cluster, vllm):
    (clone / "both.sh").write_text(script_of_the_page("both.sh"))
    counted = bash(block("> ask.py"), clone, (NAMESPACES, "exec"), **cluster.environment, **vllm)
    prompts = (clone / "prompts.txt").read_text().splitlines()
    assert int(counted.splitlines()[-1]) == len(prompts)
    text = "".join(path.read_text() for path in sorted(clone.glob("served/*.jsonl")))
    assert [json.loads(line) for line in text.splitlines()] == [line[::-1] for line in prompts]


def script_of_the_page(name: str) -> str:
    [script] = re.findall(rf"^cat > {name} <<'END'\n(.*?)^END$", block(f"> {name}"), re.M | re.S)
    return script


ENDS = {
    # what is done: state, restarts, words of the log
    "nothing": ("COMPLETED", 0, "Start 0 with a server on node-"),
    "server killed": ("FAILED", 0, "SERVER has ended: TRAINER has 5 seconds to save and end"),
    "trainer killed": ("FAILED", 0, "task 0: Killed"),
    "server broken": ("FAILED", 0, "SERVER has ended before http://node-"),
    "server silent": (
        "FAILED",
        0,
        r"SERVER on (node-\d+) has not answered http://\1:\d+/health in 4 ",
    ),
    "TERM": ("COMPLETED", 1, "Saved\n"),
    "requeue": ("COMPLETED", 1, "Start 1 with a server on node-"),
    "scancel": ("CANCELLED", 0, "Start 0"),
    "one node": ("FAILED", 0, "TRAINER needs 0 nodes"),
}
KILLS = {"server killed": "completions.py", "trainer killed": "trainer.py"}
ASKS = {"TERM": "scancel --signal=TERM", "requeue": "scontrol requeue", "scancel": "scancel"}
VARIABLES = {"server broken": {"BROKEN": "1"}, "nothing": {"QUICK": "1"}}
VARIABLES["server silent"] = {"SILENT": "1"}


@pytest.mark.matrix
def test_ends(clone, cluster, vllm, tmp_path):
    """Whatever ends, all end, with the right state, and hold no node."""
    script = script_of_the_page("both.sh")
    trains = "./torchrun.sh distributed/train_ddp.py --epochs 1"
    assert trains in script and "aux/launch/programs.sh" in script
    script = script.replace(
        "aux/launch/programs.sh", "aux/launch/programs.sh\nLAST_WORDS=5 READY_LIMIT=$LIMIT"
    )
    (clone / "ends.sh").write_text(script.replace(trains, "python tests/scripts/trainer.py"))

    def scenario(fault: str, state: str, restarts: int, words: str):
        log = tmp_path / fault.replace(" ", "-")
        options = [f"--output={log}", f"--chdir={clone}"]
        options += ["--nodes=1"] if fault == "one node" else []
        env = vllm | VARIABLES.get(fault, {}) | {"LIMIT": "4" if "silent" in fault else "120"}
        job = cluster.submit(*options, clone / "ends.sh", env=env, cwd=clone)
        if fault not in ("server broken", "server silent", "one node"):
            wait_for(lambda: log.exists() and "Start 0" in log.read_text())
        if fault in KILLS:
            wait_for(lambda: [*job_processes.python(job, KILLS[fault])])
            os.kill(next(job_processes.python(job, KILLS[fault])), signal.SIGKILL)
        if fault in ASKS:
            cluster.exec(*ASKS[fault].split(), job)
        if restarts:
            wait_for(lambda: cluster.show(job)["Restarts"] == "1")
            wait_for(lambda: cluster.show(job)["JobState"] == "PENDING")
            assert not cluster.left_over(job)
            cluster.exec("scontrol", "update", f"JobId={job}", "StartTime=now")
        ended = cluster.wait(job)
        assert ended.state == state and re.search(words, ended.log), f"{fault}: {ended}"
        assert cluster.show(job)["Restarts"] == str(restarts), ended
        wait_for(lambda: not cluster.left_over(job), 40)

    at_once(scenario, [(fault, *end) for fault, end in ENDS.items()])


def programs(folder: Path, srun: str, lines: str):
    """Of a job of two nodes."""
    stand_ins(folder, {"scontrol": "printf 'n1\\nn2\\n'", "srun": srun})
    env = environment(PATH=f"{folder}:{os.environ['PATH']}", MASTER_ADDR="n1", CPUS_PER_NODE=1)
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", "no_proxy": "", "NO_PROXY": "localhost", "RUN": "7"}
    return run("bash", "-c", f"set -eu; source aux/launch/programs.sh; {lines}", env=env)


def test_the_status_is_the_last_program_s(tmp_path):
    """Whose requests to the nodes need no proxy."""
    lines = "start TRAINER 2 train; finish"
    done = programs(tmp_path, "echo $no_proxy; exit 3", lines)
    assert (done.returncode, done.stdout) == (3, "localhost,n1,n2\n"), done.stderr
    # env.sh notes it.
    done = programs(tmp_path, "exit 143", f'note_end() {{ echo "$1"; }}; {lines}')
    assert (done.returncode, done.stdout) == (143, "143\n"), done.stderr


@pytest.mark.parametrize(("asks", "seconds"), [("ready URL 2", 2), ("READY_LIMIT=1; ready URL", 1)])
def test_a_server_that_never_answers(asks, seconds, tmp_path):
    """The second one, on the second node. It would hold all nodes until the time limit."""
    stand_ins(tmp_path, {"curl": "exit 7"})
    lines = "start ONE 1 serve; start TWO 1 serve; " + asks.replace("URL", "http://n2:8000/health")
    done = programs(tmp_path, "exec sleep 60", f"{lines}; echo not reached")
    assert done.returncode == 1 and done.stdout == ""
    said = f"TWO on n2 has not answered http://n2:8000/health in {seconds} seconds\n"
    assert done.stderr == said


def test_each_program_has_its_own_run(cluster, tmp_path):
    """A folder of checkpoints, and heartbeats: watch_job.py does not mix their ranks."""
    log = tmp_path / "log"
    size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--cpus-per-task=2"]
    job = cluster.submit(*size, f"--output={log}", "tests/scripts/two_programs.sh")
    folders = [REPOSITORY / f"log/{job}/{name}/ranks-0" for name in ("GENERATOR", "TRAINER")]
    wait_for(lambda: all(len([*folder.glob("[01]")]) == 2 for folder in folders), 120)
    watch = [sys.executable, "aux/watch_job.py", job]
    wait_for(lambda: cluster.exec(*watch).stdout.count(" ranks are alive, at step ") == 2)
    watched = cluster.exec(*watch).stdout
    cluster.exec("scancel", job)
    lines = re.findall(r"^\d+/.*:$|^All .* are alive, at step \d+", watched, re.M)
    names, ends = lines[::2], lines[1::2]
    assert names == [f"{job}/GENERATOR:", f"{job}/TRAINER:"], watched
    assert ends == [f"All 2 ranks are alive, at step {step}" for step in (7, 9)], watched
    runs = re.findall(r"^RUN (.*)$", log.read_text(), re.M)
    assert sorted(runs) == [f"{job}_GENERATOR"] * 2 + [f"{job}_TRAINER"] * 2


def test_a_client_that_cannot_ask_fails(tmp_path):
    """Here the folder has answers to another list."""
    (tmp_path / "ask.py").write_text(script_of_the_page("ask.py"))
    (tmp_path / "distributed").symlink_to(REPOSITORY / "distributed")
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    (tmp_path / "served").mkdir()
    (tmp_path / "served/.list").write_text('{"length": 9, "size": 4}')
    env = environment(SERVERS="n1", PORT=1)
    done = run(sys.executable, "ask.py", cwd=tmp_path, env=env)
    assert done.returncode == 1 and "n1: served has answers to another list" in done.stderr, done


def test_an_evaluation(clone, cluster):
    """A package, by `-m`. Rank 0 has the answers of all four."""
    [(language, commands, shown)] = [step for step in steps(PAGE) if "-m evaluation" in step[1]]
    try_block(language, commands, shown, clone, (NAMESPACES, "exec"), **cluster.environment)


@pytest.fixture(scope="module")
def ray(packages) -> dict[str, str]:
    """The environment of a job that finds the real one, in a folder of its own."""
    programs = Path(packages["PYTHONPATH"]).parents[2] / "bin"
    return packages | {"PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.mark.matrix
def test_ray(clone, cluster, ray):
    """On CPUs: what Slurm has granted, on two nodes. Its temporary folder is gone."""
    [step] = [step for step in steps(PAGE) if "> ray.sh" in step[1]]
    printed = try_block(*step, clone, (NAMESPACES, "exec"), **cluster.environment, **ray)
    found = re.findall(r"^(?:node-(\d+), )?(.*GPU.*)$", printed, re.M)
    first, *tasks = found
    assert first == ("", "32 CPUs, 4 GPUs"), printed
    assert [gpu for _, gpu in tasks] == ["GPU ['0']", "GPU ['1']"] * 2, printed
    assert len({node for node, _ in tasks}) == 2, printed
    [job] = re.findall(r"Submitted batch job (\d+)", printed)
    assert not Path(f"/tmp/ray-{job}").exists()
    assert not cluster.left_over(int(job))


@pytest.mark.matrix
def test_the_end_of_ray(clone, cluster, ray, tmp_path):
    """The command is killed, or all get SIGTERM. No process is left on any node."""
    waits = script_of_the_page("where.py").replace("sleep(2)", "sleep(600)")
    (clone / "waits.py").write_text(waits)
    script = script_of_the_page("ray.sh").replace("where.py", "waits.py")
    (clone / "waits.sh").write_text(script)

    def scenario(fault: str):
        log = tmp_path / fault
        options = [f"--output={log}", f"--chdir={clone}"]
        job = cluster.submit(*options, clone / "waits.sh", env=ray, cwd=clone)
        wait_for(lambda: log.exists() and "4 GPUs" in log.read_text(), 120)
        if fault == "killed":
            os.kill(next(job_processes.python(job, "waits.py")), signal.SIGKILL)
        else:
            cluster.exec("scancel", "--signal=TERM", job)
        ended = cluster.wait(job, timeout=120)
        assert ended.state == "FAILED", ended
        wait_for(lambda: not cluster.left_over(job), 40)

    at_once(scenario, [("killed",), ("TERM",)])
