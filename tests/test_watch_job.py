"""aux/watch_job.py: which rank to look at, whether a script has heartbeats or none."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import heartbeat
import ledger
import watch_job
from slurm import (
    LAUNCHERS,
    REPOSITORY,
    cells,
    environment,
    free_port,
    heartbeat_of,
    kill,
    run,
    stand_ins,
    wait_for,
    write_heartbeat,
)

WATCH = watch_job.__file__


def test_watch_job_shows_the_latest_start(tmp_path):
    """By time, not by name. And a rank that writes rarely is not silent."""
    for start, age in (("ranks-10", 1), ("ranks-2", 5), ("ranks-9", 30)):
        folder = tmp_path / "log/local" / start
        write_heartbeat(folder, 0, host=start, step=7)
        # Of 4,096 ranks each writes every 136 s.
        write_heartbeat(folder, 1, host=start, step=7, time=time.time() - 100, interval=136)
        os.utime(folder, 2 * (time.time() - age,))
    done = run(sys.executable, WATCH, "local", cwd=tmp_path)
    assert re.search(r"^   0  ranks-10 +7 ", done.stdout, re.M) and done.returncode == 0, done
    assert "All 2 ranks are alive" in done.stdout


def test_watch_job_finds_the_ranks_of_a_bare_srun(monkeypatch):
    """No batch shell, no loader worker, and nothing that watch_job.py has started."""
    job = os.getpid()
    batch = environment(SLURM_JOB_ID=job, SLURM_PROCID=0, SLURM_NTASKS=2)
    task = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": 3, "SLURM_STEP_NUM_TASKS": 2}
    tasks = [environment(**task, SLURM_PROCID=i, SLURM_NODEID=1 - i) for i in (0, 1)]
    started = []
    try:
        for env in (batch, *tasks, tasks[0]):
            command = [sys.executable, "-c", "input()"]
            started.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE))
            # A process's start is counted in hundredths of a second.
            time.sleep(0.05)
        found = watch_job.ranks_here(str(job))
        monkeypatch.setenv("SLURM_STEP_ID", "3")
        assert watch_job.ranks_here(str(job)) == []
    finally:
        for process in started:
            process.communicate()
    assert found == [(i, 2, started[1 + i].pid) for i in (0, 1)]


# What scontrol shows of a job that runs for the second time, as far as it is read
RECORD = (
    "JobId={} JobName=a UserId=root(0) JobState=RUNNING Reason=None Restarts=1 StartTime=Unknown"
    " NumNodes=3"
)


def test_watch_job_and_the_last_task_of_an_array(tmp_path):
    """Its id stands for the array, so Slurm also shows other tasks."""
    path = tmp_path / "bin"
    stand_ins(path, {"srun": "echo $* >asked"})
    stand_ins(path, {"scontrol": f"echo '{RECORD.format(8)}'; echo '{RECORD.format(7)}'"})
    env = environment(PATH=f"{path}:/usr/bin:/bin")
    run(sys.executable, WATCH, "7", cwd=tmp_path, env=env)
    assert " --nodes=3 --ntasks=3 " in (tmp_path / "asked").read_text()
    write_heartbeat(tmp_path / "log/7/ranks-0", 0)
    stand_ins(path, {"scontrol": f"echo '{RECORD.format(8)}'"})
    watched = run(sys.executable, WATCH, "7", cwd=tmp_path, env=env)
    assert watched.stdout.startswith("Job 7 is over, because it was killed.\n"), watched
    # Its own end is not the array's.
    done, failed = (RECORD.format(7).replace("RUNNING", state) for state in ("COMPLETED", "FAILED"))
    failed = failed.replace("JobId=7", "JobId=8")
    stand_ins(path, {"scontrol": f"echo '{done}'; echo '{failed}'"})
    watched = run(sys.executable, WATCH, "7", "--json", cwd=tmp_path, env=env)
    assert watched.returncode == 1 and json.loads(watched.stdout)["others"] == {"8": "FAILED"}


def test_the_starts_of_a_script_without_heartbeats(tmp_path):
    """Also while it runs again: three have saved nothing."""
    (tmp_path / "checkpoints/7").mkdir(parents=True)
    (tmp_path / "checkpoints/7/last.pt").touch()
    os.utime(tmp_path / "checkpoints/7/last.pt", (0, 1795960277))
    (tmp_path / "log/7").mkdir(parents=True)
    for start in range(4):
        line = f"began {1795960300 + start} n1 7.out\n"
        (tmp_path / f"log/7/start-{start}").write_text(line)
    record = RECORD.format(7).replace("Restarts=1", "Restarts=3")
    path = stand_ins(tmp_path / "bin", {"scontrol": f"echo '{record}'", "srun": "true"})
    env = environment(PATH=f"{path}:/usr/bin:/bin")
    watched = run(sys.executable, WATCH, "7", cwd=tmp_path, env=env)
    assert watched.returncode == 1 and watched.stdout.startswith("Start 0, "), watched
    assert watched.stdout.endswith("Next: the last 3 starts have saved nothing: look why.\n")


def test_a_running_job_for_programs(tmp_path):
    """Which ranks the others wait for, and the steps of all starts."""
    for start in (0, 1):
        folder = tmp_path / f"log/7/ranks-{start}"
        for rank in range(3):
            values = {"world_size": 3, "host": f"n{rank}", "time": time.time()}
            values |= {"waits": rank != 1, "seconds_in_step": 100.0, "step": 5 + start}
            write_heartbeat(folder, rank, **values)
        os.utime(folder, (start, start))
    path = stand_ins(tmp_path / "bin", {"scontrol": f"echo '{RECORD.format(7)}'"})
    env = environment(PATH=f"{path}:/usr/bin:/bin")
    watched = run(sys.executable, WATCH, "7", "--json", cwd=tmp_path, env=env)
    found = json.loads(watched.stdout)
    assert watched.returncode == 1 and watched.stdout.count("\n") == 1
    assert found["waited_for"] == [{"rank": 1, "node": "n1"}] and found["silent"] == []
    assert (found["state"], found["ended"], found["step"]) == ("RUNNING", False, 6)
    # Those that have not begun, and then no heartbeat of late: nobody knows.
    (folder / "2").unlink()
    watched = run(sys.executable, WATCH, "7", "--json", "--after=200", cwd=tmp_path, env=env)
    found = json.loads(watched.stdout)
    assert watched.returncode == 1 and found["missing"] == [{"rank": 2, "node": None}]
    alive = {path: path.read_text() for path in folder.iterdir()}
    for rank, path in enumerate(sorted(alive)):
        path.write_text(heartbeat_of(rank, **values | {"time": time.time() - 1000}))
    watched = run(sys.executable, WATCH, "7", "--json", "--after=200", cwd=tmp_path, env=env)
    found = json.loads(watched.stdout)
    assert watched.returncode == 1 and found["silent"] is found["waited_for"] is None
    assert found["unknown"] == ["silent", "waited_for", "missing"]
    alive[folder / "2"] = heartbeat_of(2, **values)
    for path, text in alive.items():
        path.write_text(text)
    watched = run(sys.executable, WATCH, "7", "--after", 200, cwd=tmp_path, env=env)
    assert watched.returncode == 0 and "\nAll 3 ranks are alive, at step 6." in watched.stdout
    assert watched.stdout.endswith("\nIt did 5 steps twice, which cost 0.0 rank-hours.\n"), (
        watched.stdout
    )


STUCK = [
    # NCCL: the others wait for a GPU, outside torch.distributed.
    ([9, 9, 9, 8, 9, 9], [False] * 6, [], "n1"),
    ([9, 9, 9, 8, 9, 9], [False] * 2 + [True] * 4, [], "n1"),
    # gloo: all are at one step, one of them waits for nobody.
    ([9] * 6, [True] * 3 + [False] + [True] * 2, [], "n1"),
    ([9] * 6, [True] * 6, [], None),
    ([9, 8, 9, 9, 9, 9], [False] * 6, [4], "n2"),
    ([9] * 6, [True] * 6, [0, 5], "n0,n2"),
]


@pytest.mark.parametrize(("steps", "waits", "silent", "exclude"), STUCK)
def test_watch_job_excludes_the_node_of_the_rank_that_hangs(
    steps, waits, silent, exclude, tmp_path
):
    """All have stood still for two minutes."""
    for rank in range(6):
        values = {"host": f"n{rank // 2}", "world_size": 6, "step": steps[rank]}
        values |= {"waits": waits[rank], "seconds_in_step": 120.0}
        values |= {"time": time.time() - (100 if rank in silent else 0)}
        write_heartbeat(tmp_path / "log/local/ranks-0", rank, **values)
    done = run(sys.executable, WATCH, "local", cwd=tmp_path)
    assert done.returncode == (exclude is not None), done.stdout + done.stderr
    end = r"All 6 ranks are alive, at step 9\. No step for 12\d s\."
    end = rf".* sbatch --exclude={exclude}" if exclude else end
    assert re.fullmatch(end, done.stdout.splitlines()[-1]), done.stdout
    patient = run(sys.executable, WATCH, "local", "--after=200", cwd=tmp_path).stdout
    assert patient.endswith("s. If one hangs, it is named after 200 s.\n"), patient


@pytest.mark.parametrize("way", cells([("torchrun",), ("spawn",)], ("torchrun",)))
def test_a_script_without_heartbeats(way, cluster, tmp_path):
    """py-spy reads the stack of each rank, on its node."""
    log, script = tmp_path / "log.out", REPOSITORY / "tests/scripts/stuck.py"
    number = cluster.submit(f"--output={log}", LAUNCHERS[way], script)
    wait_for(lambda: log.exists() and log.read_text().count("is in step 10") == 4, 120)
    watch = (sys.executable, "aux/watch_job.py", number)
    assert "\nAll 4 ranks have met.\n" in cluster.exec(*watch).stdout
    # The others may not wait yet.
    wait_for(lambda: "First to look at: rank 2 " in cluster.exec(*watch).stdout, 60)
    watched = cluster.exec(*watch)
    cluster.exec("scancel", number)
    assert watched.returncode == 1, watched
    row = r"^   (\d)  (\S+) +\d+  <module> \(\S+stuck\.py:\d+\)$"
    hosts = dict(re.findall(row, watched.stdout, re.M))
    assert sorted(hosts) == ["0", "1", "2", "3"] and hosts["0"] != hosts["2"] == hosts["3"]
    line = 1 + script.read_text().splitlines().index("        time.sleep(0.1)")
    said = (
        rf"^First to look at: rank 2 on {hosts['2']}, in\n(    .*\n)*    <module> \(\S+:{line}\)$"
    )
    assert re.search(said, watched.stdout, re.M), watched.stdout


WAYS = cells([("torchrun",), ("srun",), ("spawn",)], ("torchrun",), ("srun",))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_never_meet(way, cluster, tmp_path):
    """nanochat's are such on CPUs, and their job is COMPLETED. Under torchrun its agents are
    connected to MASTER_PORT."""
    command = [f"--output={tmp_path}/log-%j", LAUNCHERS[way], "tests/scripts/alone.py"]
    jobs = {cluster.submit(*command): False, cluster.submit(*command, env={"MEET": 1}): True}
    for number, meet in jobs.items():
        log = tmp_path / f"log-{number}"
        wait_for(lambda log=log: log.exists() and log.read_text().count("world size: 4") == 4, 180)
        watched = cluster.exec(sys.executable, "aux/watch_job.py", number)
        cluster.exec("scancel", number)
        assert re.search(r"^   3  node-\d+ +\d+  <module> \(.*alone.py", watched.stdout, re.M), (
            watched
        )
        said = "\nNo process group: none of 4 ranks is connected to MASTER_PORT, where ranks\n"
        assert (said in watched.stdout) == (not meet), watched
        assert ("\nAll 4 ranks have met.\n" in watched.stdout) == meet, watched
        assert watched.returncode == 1 or meet, watched


# A rank whose child is in the process group, and one that has another connection.
CONNECTS = """import os, socket, sys
rank, port, other = map(int, sys.argv[1:])
if rank > 0 or os.fork() == 0:
    connection = socket.create_connection(("127.0.0.1", other if rank else port))
input()
"""


def test_a_rank_that_has_not_met(monkeypatch, capsys):
    """Seen without py-spy."""
    monkeypatch.setattr(watch_job.shutil, "which", lambda program: "absent/py-spy")
    started, job = [], str(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("", 0)) as other:
        ports = [str(server.getsockname()[1]) for server in (store, other)]
        try:
            for rank in (0, 1):
                env = environment(RANK=rank, WORLD_SIZE=2, MASTER_PORT=ports[0], SLURM_JOB_ID=job)
                command = [sys.executable, "-c", CONNECTS, str(rank), *ports]
                started.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE))
            with store.accept()[0], other.accept()[0]:
                node = watch_job.look_into_this_node(job)
        finally:
            for process in started:
                process.communicate()
    assert [rank["met"] for rank in node["ranks"]] == [True, False]
    assert watch_job.show(job, [node]) == 1
    said = capsys.readouterr()
    assert said.out == f"Not in the process group: rank 1 on {heartbeat.HOST}\n"
    assert said.err.endswith(f"there is no py-spy on {heartbeat.HOST}: pip install py-spy\n")


def test_a_loader_worker_that_hangs(capsys):
    """The rank stands in dataloader.py, and the line is its worker's."""
    job, port = str(os.getpid()), free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    command = [sys.executable, REPOSITORY / "tests/scripts/stuck_worker.py"]
    started = [
        subprocess.Popen(command, env=environment(**place, RANK=rank, SLURM_JOB_ID=job))
        for rank in (0, 1)
    ]
    try:

        def is_named() -> bool:
            node = watch_job.look_into_this_node(job)
            watch_job.show(job, [node])
            said.append(capsys.readouterr().out)
            return "First to look at: rank 1 " in said[-1] and "loader workers" in said[-1]

        said = []
        wait_for(is_named, 60)
        [shown] = re.findall(r"py-spy dump --subprocesses --pid=\d+$", said[-1], re.M)
        assert f"    srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist=" in said[-1]
        dumped = run(Path(sys.executable).with_name("py-spy"), *shown.split()[1:]).stdout
    finally:
        kill(f"SLURM_JOB_ID={job}")
        for process in started:
            process.wait()
    assert re.search(r"__getitem__ \(.*stuck_worker\.py:\d+\)", dumped), dumped
    # Its line of the script is another one than the others'.
    assert "Most of the others" not in said[-1]


def test_under_a_framework_all_are_in_one_line(capsys):
    """So what the others are in is shown as well. A Dataset without workers is no such case."""
    line = "train (script.py:7)"
    ranks_there = []
    for rank, call in enumerate(("save", "save", "all_gather", "evaluate", "save")):
        its = {"rank": rank, "host": f"n{rank}", "frame": line, "pid": 7}
        ranks_there.append(its | {"stack": ["main (cli.py:1)", line, f"{call} (library.py:9)"]})
    stack = f"    main (cli.py:1)\n    {line}\n    {{}} (library.py:9)\n"
    most = f"Most of the others are in\n{stack.format('save')}"
    for heading in ("", "Rank 2 is in"):
        watch_job.print_more("7", ranks_there[2:3], ranks_there, heading)
        its = f"{heading}\n{stack.format('all_gather')}" if heading else ""
        assert capsys.readouterr().out == its + most
    own = ["next (/v/torch/utils/data/dataloader.py:1)", "__getitem__ (script.py:9)"]
    ranks_there[2] |= {"stack": [line, *own], "frame": own[1]}
    watch_job.print_more("7", ranks_there[2:3], ranks_there, "Rank 2 is in")
    assert capsys.readouterr().out == ""


def test_two_programs_in_a_job(tmp_path):
    """Each has ranks of its own."""
    for program, step in (("GENERATOR", 7), ("TRAINER", 9)):
        for rank in (0, 1):
            folder = tmp_path / f"log/7/{program}/ranks-0"
            write_heartbeat(folder, rank, host=program, step=step, time=time.time())
    path = stand_ins(tmp_path / "bin", {"scontrol": "false", "sacct": "false"})
    env = environment(PATH=f"{path}:/usr/bin:/bin")

    def tells(program: Path, what: str):
        return run(sys.executable, program, what, cwd=tmp_path, env=env)

    both = tells(WATCH, "7")
    assert re.findall(r"^(\S+):$|at step (\d+)", both.stdout, re.M) == [
        ("7/GENERATOR", ""),
        ("", "7"),
        ("7/TRAINER", ""),
        ("", "9"),
    ]
    assert both.returncode == 0
    (tmp_path / "log/7/GENERATOR/ranks-0/1").unlink()
    both = tells(WATCH, "7")
    assert both.returncode == 1 and "at step 9" in both.stdout
    assert both.stderr == "1 of 2 ranks have sent none, first rank 1.\n"
    one = tells(WATCH, "7/TRAINER")
    assert one.returncode == 0 and "GENERATOR" not in one.stdout and "at step 9" in one.stdout
    counted = tells(ledger.__file__, "7/TRAINER")
    assert json.loads(counted.stdout.splitlines()[-1])["slowest"]["host"] == "TRAINER"
    said = "ledger.py: no heartbeats in log/7, but of its programs GENERATOR, TRAINER\n"
    assert tells(ledger.__file__, "7").stderr == said


def test_what_nccl_reports(monkeypatch):
    """Its own words, from the address at which NCCL's RAS threads listen."""
    asked = []

    def answer():
        connection, _ = server.accept()
        with connection:
            asked.append(connection.recv(100))
            connection.sendall(b"NCCL version 2.28.9\nErrors\n======\nrank 3 is behind\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")
        assert watch_job.nccl_status().endswith("======\nrank 3 is behind")
    assert asked == [b"verbose status\n"]
    assert watch_job.nccl_status() is None, "NCCL is not there"


@pytest.mark.parametrize("hangs", [False, True])
def test_nodes_that_answer_in_part(hangs, tmp_path, monkeypatch):
    """Their lines mix, and that of n2 is cut off, because srun ends, or is ended, before the node
    has said all. The others count."""
    answer = json.dumps({"host": "n1"})
    (tmp_path / "said").write_text(
        f"seen n1 {answer[:5]}\nseen n2 {answer[:7]}\na node's greeting\nseen n1 {answer[5:]}\n"
    )
    shown = f"echo '{RECORD.format(7)}'"
    stand_ins(tmp_path, {"scontrol": shown, "srun": f"cat {tmp_path}/said"})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run_whole = subprocess.run

    def run_until(command, **options):
        done = run_whole(command, **options)
        if hangs and command[0] == "srun":
            raise subprocess.TimeoutExpired(command, options["timeout"], done.stdout)
        return done

    monkeypatch.setattr(subprocess, "run", run_until)
    assert watch_job.ask_the_nodes("7") == [json.loads(answer)]


def test_a_py_spy_that_hangs(commands_hang, monkeypatch):
    """Is given up, so that the other ranks of its node are shown."""
    monkeypatch.setattr(watch_job, "ranks_here", lambda job: [(1, 4, 0), (2, 4, 0)])
    node = watch_job.look_into_this_node("7")
    assert [rank["rank"] for rank in node["ranks"]] == [1, 2]
    said = rf"py-spy cannot read rank 2 on {heartbeat.HOST}: .* timed out after 20 seconds"
    assert re.fullmatch(said, node["fault"]), node


def test_a_job_that_does_not_run(tmp_path):
    done = run(sys.executable, WATCH, 7, cwd=tmp_path)
    said = "Nobody knows whether job 7 has ended. Slurm does not answer, and there is no log/7 in"
    assert done.returncode == 1 and done.stdout.splitlines()[0] == f"{said} {tmp_path}."


@pytest.mark.parametrize("option", ["--wait", "--json"])
def test_what_is_for_jobs_only(option, tmp_path):
    done = run(sys.executable, WATCH, "local", option, cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stderr.endswith("watch_job.py: error: --wait and --json are for jobs\n"), done


def test_without_py_spy(tmp_path):
    """A node says what to install."""
    env = environment(RANK=0, WORLD_SIZE=1, SLURM_JOB_ID=os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE):
        python = tmp_path / "python"
        python.symlink_to(sys.executable)
        (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
        path = {"env": environment(PATH="/usr/bin:/bin")}
        done = run(python, WATCH, os.getpid(), "--this-node", **path)
    assert re.search(r'"there is no py-spy on \S+: pip install py-spy"', done.stdout), done


# MB that a rank has in step `step` of a run that saves every 100 steps, and how it grows
RUNS = {
    "steady": (lambda step, saves: 5000 + step % 7, None),
    "at its start": (lambda step, saves: min(5000, step), None),
    "once": (lambda step, saves: 5000 + 2000 * (step > 7000), None),
    "a copy for each save": (lambda step, saves: 5000 + 4000 * (0 < step % 100 < 10), None),
    "by each save": (lambda step, saves: 5000 + 30 * saves, (30, "each save or evaluation")),
    "by each save, with a copy": (
        lambda step, saves: 5000 + 30 * saves + 4000 * (0 < step % 100 < 10),
        (30, "each save or evaluation"),
    ),
    "by each step": (lambda step, saves: 1000 + step / 2, (500, "in 1000 steps")),
}


@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("seconds", [1, 60])
def test_memory_that_grows(way, seconds, monkeypatch):
    """In 10,000 steps of so many seconds, while each save takes five steps' time."""
    had, expected = RUNS[way]
    memory = heartbeat.Memory()
    for step in range(1, 10_001):
        saves, now = (step - 1) // 100, step * seconds
        monkeypatch.setattr(heartbeat, "step", step)
        has = int(had(step, saves))
        monkeypatch.setattr(heartbeat, "main_memory", lambda has=has: has)
        memory.look(now, paused=False)
        if step % 100 == 0:
            memory.look(now + seconds / 3, paused=True)
            memory.look(now + seconds / 2, paused=True)
    assert len(memory.marks) <= 16
    found = watch_job.growth(memory.marks, 3)
    if expected is None:
        assert found is None, memory.marks
    else:
        assert found == (pytest.approx(expected[0], rel=0.1), expected[1]), memory.marks
    assert watch_job.growth(memory.marks, 4) is None, "the GPU's"
    assert all(watch_job.growth(memory.marks[:few], 3) is None for few in range(7))


def test_watch_job_says_who_holds_memory(tmp_path):
    """Rank 1's grows most. All ranks of n0 use its first GPU, and those of n1 share one."""
    for rank in range(6):
        host, leak = ("n0", [2, 3000][rank == 1]) if rank < 4 else ("n1", 0)
        marks = [[n, 1, 10 * n, 9000 + n * leak, n, 9000 + (n + 1) * leak, n] for n in range(12)]
        gpus = [9] if host == "n1" else [9 if n in (0, rank) else None for n in range(4)]
        values = {"world_size": 6, "host": host, "memory": marks, "gpus": gpus}
        write_heartbeat(tmp_path / "log/local/ranks-0", rank, **values)
    done = run(sys.executable, WATCH, "local", cwd=tmp_path)
    assert done.returncode == 0, done
    *_, grows, holds, alive = done.stdout.splitlines()
    assert grows == "main memory of rank 1 on n0 grows by 3.0 GB each save or evaluation"
    assert holds.startswith("4 processes hold memory on GPU 0 of n0: "), done.stdout
    assert alive == "All 6 ranks are alive, at step 5."
    assert "n1" not in grows + holds
