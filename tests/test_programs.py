"""docs/other_jobs.md: several programs in one job, and Ray. Its blocks as they stand, then each
program killed, the job stopped, and requeued: nothing is left on any node."""

import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer

import pytest
import torch

import hugging_face
import job_processes
from pages import bash, steps, try_block
from slurm import (
    NAMESPACES,
    REPOSITORY,
    at_once,
    environment,
    free_port,
    run,
    stand_ins,
    wait_for,
)
from transformer import Transformer

PAGE = REPOSITORY / "docs/other_jobs.md"


def block(words: str) -> str:
    [found] = [text for _, text, _ in steps(PAGE) if words in text]
    return found


@pytest.fixture(scope="module")
def vllm(clone, tmp_path_factory) -> dict[str, str]:
    """The environment of a job that finds stand-ins for it and for lm_eval."""
    scripts = {"vllm": "completions", "lm_eval": "evaluates"}
    start = f'exec {sys.executable} {REPOSITORY}/tests/scripts/{{}}.py "$@"'
    commands = {name: start.format(script) for name, script in scripts.items()}
    folder = stand_ins(tmp_path_factory.mktemp("bin"), commands)
    return {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_every_server_listens_where_ready_asks():
    """vLLM's and TRL's own port is 8000, at which ready would wait until its limit."""
    page = PAGE.read_text()
    servers = re.findall(r"(?:start \w+ \d |exec |`trl )vllm.serve[^`\n]*", page)
    assert len(servers) == 5 and all('--port "$PORT"' in server for server in servers), servers
    asked = re.findall(r'^ *ready "http://.+:(\S+?)/health"$', page, re.M)
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


@pytest.mark.matrix
def test_a_server_over_two_nodes(clone, cluster, vllm):
    """Each node has its number, and the first one's address. It is killed on the second, so both
    start again."""
    (clone / "both.sh").write_text(script_of_the_page("both.sh"))
    bash(block("> large.sh"), clone, (NAMESPACES, "exec"), **cluster.environment, **vllm)
    [log] = clone.glob("large.sh_*.out")
    joined = re.findall(r"^Node 1 on (node-\d+) has joined$", log.read_text(), re.M)
    assert len(joined) == 1 and "\nFinished: epoch=1" in log.read_text(), log.read_text()

    script = (clone / "large.sh").read_text().replace("\nkeep", "\nPAUSES=1\nkeep")
    (clone / "large.sh").write_text(
        re.sub(r"(?m)^start TRAINER 1 .*$", "start TRAINER 1 sleep 300", script)
    )
    log = clone / "killed"
    command = ["--nodes=3", f"--output={log}", f"--chdir={clone}", clone / "large.sh"]
    job = cluster.submit(*command, env=vllm, cwd=clone)

    def lives() -> set[int]:
        return {*job_processes.python(job, "completions.py")}

    def kill_the_second():
        node = re.findall(r"^Node 1 on (node-\d+)", log.read_text(), re.M)[-1]
        before, [second] = lives(), job_processes.python(job, "completions.py", node)
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: not before & lives())

    wait_for(lambda: any("sleep\x00300" in command for _, command in job_processes.of(job)))
    kill_the_second()
    wait_for(lambda: log.read_text().count("has joined") == 2)
    kill_the_second()
    wait_for(lambda: "SERVER has ended: TRAINER has" in log.read_text())
    cluster.exec("scancel", job)
    assert cluster.wait(job).state == "CANCELLED"
    wait_for(lambda: not cluster.left_over(job), 40)


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


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> Path:
    """A folder with the weights of a run of two steps."""
    folder = tmp_path_factory.mktemp("by_hand")
    for name in ("distributed", "examples", "torchrun.sh"):
        (folder / name).symlink_to(REPOSITORY / name)
    told = []

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self):
            # It has loaded the first weights when the trainer has saved its last step.
            wait_for(lambda: [*folder.glob("checkpoints/*/step_2")])
            told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("localhost", 0), Slow) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            done = train_by_hand(folder, server.server_port)
        finally:
            server.shutdown()
    assert done.returncode == 0 and told == ["step_0", "step_2"], (told, done)
    return folder


def train_by_hand(folder: Path, port: int) -> subprocess.CompletedProcess:
    """The line of the script's docstring, with one rank and two steps."""
    script = REPOSITORY / "examples/train_and_publish.py"
    [line] = re.findall(r"^    (\./torchrun\.sh .*)$", script.read_text(), re.M)
    assert ":8000" in line and "--steps 100" in line
    line = line.replace("8000", str(port)).replace("100", "2")
    env = environment(NPROC_PER_NODE=1)
    env.pop("RUN", None)
    return run(*line.split(), cwd=folder, env=env)


def test_a_trainer_keeps_another_run_s_weights(by_hand):
    done = train_by_hand(by_hand, free_port())
    said = "weights belongs to another run: choose a new folder\n"
    assert done.returncode == 1 and said in done.stderr, done
    assert {path.name for path in by_hand.glob("weights/step_*")} == {"step_0", "step_2"}


@pytest.fixture
def newest(by_hand, monkeypatch):
    """The names of examples/serve_newest.py, which serves these weights, in a job's second task."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    # It changes these three.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(hugging_face, "mapped", hugging_face.mapped)
    monkeypatch.setattr(sys, "path", [*sys.path])

    monkeypatch.setattr(sys, "argv", ["serve_newest.py", f"{by_hand}/weights", "--port=0"])
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda server: None)
    names = runpy.run_path(f"{REPOSITORY}/examples/serve_newest.py")["load"].__globals__
    with names["server"] as server:
        threading.Thread(target=BaseServer.serve_forever, args=[server]).start()
        yield names
        server.shutdown()


def post(port: int, path: str, body: str, **headers: str) -> tuple[int, str]:
    """The status, and what the server says."""
    request = urllib.request.Request(f"http://localhost:{port}{path}", body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_a_server_refuses(newest, capfd):
    """The client gets the reason at once. If it has gone, the log has no traceback."""
    port, began = newest["server"].server_port, time.monotonic()
    status, said = post(port, "/reload", "step_7")
    assert status == 500 and "weights/step_7 is no Qwen3 or Llama to start from" in said
    assert time.monotonic() - began < 5
    asks, body = "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 20})
    assert post(port, asks, body.replace(PROMPT, "")) == (500, "the prompt is empty")
    for length in ("-1", "1000001"):
        said = post(port, asks, body, **{"Content-Length": length})
        assert said == (500, "a body may have 1 MB")
    assert post(port, asks, body, **{"Content-Length": "x"})[0] == 500

    gone, handlers, complete = False, [], newest["complete"]

    def slow(*asked) -> dict:
        wait_for(lambda: gone)
        handlers.append(threading.current_thread())
        return complete(*asked)

    newest["complete"] = slow
    with socket.create_connection(("localhost", port)) as client:
        # Its end is a reset, so an answer cannot be written.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(
            f"POST {asks} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
    gone = True
    wait_for(lambda: handlers)
    handlers[0].join(30)
    assert json.loads(post(port, asks, body)[1])["model"] == "step_2"
    assert "Traceback" not in capfd.readouterr().err


def test_an_old_reload_does_not_win(newest):
    """Two that wait while the server loads. The earlier one may get its turn last."""
    port = newest["server"].server_port
    with ThreadPoolExecutor(2) as pool:
        with newest["loading"]:
            old = pool.submit(post, port, "/reload", "step_0")
            wait_for(lambda: newest["newest"] == "step_0")
            new = pool.submit(post, port, "/reload", "step_2")
            wait_for(lambda: newest["newest"] == "step_2")
        assert old.result() == (500, "step_2 was asked for meanwhile")
        assert new.result() == (200, "") and newest["serving"][0] == "step_2"


PROMPT = "import "


def answer_of(server: str, cluster) -> dict:
    """What a server of examples/serve_newest.py answers, or nothing if it does not."""
    asked = ["--data", json.dumps({"prompt": PROMPT, "max_tokens": 30})]
    asked += ["--silent", "--max-time", 5, f"http://{server}/v1/completions"]
    done = cluster.exec("curl", *asked)
    return json.loads(done.stdout) if done.returncode == 0 else {"model": "none"}


def answer_from(folder: Path) -> str:
    """What these weights have to answer."""
    model = Transformer(hugging_face.read_config(folder))
    model.init_weights(torch.device("cpu"), 0, hugging_face.open_weights(folder, model))
    prompt = torch.tensor([list(PROMPT.encode())])
    written = model.generate(prompt, 30, 256, temperature=0)[0, len(PROMPT) :]
    return bytes(written.tolist()).decode(errors="replace")


TRAIN = "./torchrun.sh examples/train_and_publish.py"


def serves(log: Path) -> list[str]:
    """Which server serves which step, in the log's order."""
    return re.findall(r"^(node-\d+:\d+ serves step_\d+)$", log.read_text(), re.M)


@pytest.mark.matrix
def test_servers_follow_a_trainer(clone, cluster, vllm):
    (clone / "both.sh").write_text(script_of_the_page("both.sh"))
    bash(block("> follow.sh"), clone, (NAMESPACES, "exec"), **cluster.environment, **vllm)
    [log] = clone.glob("follow.sh_*.out")
    assert "\nFinished: step=200" in log.read_text() and len(serves(log)) > 2, log.read_text()
    assert len([line for line in serves(log) if line.endswith(" step_200")]) == 2, log.read_text()


def follow(clone: Path, cluster, vllm: dict, log: Path, settings: str, **changed: str) -> int:
    """Submits that job with one rank, these settings, and another first server, or a trainer of
    other words. Returns the job."""
    [lines] = re.findall(
        r"^cat >> follow.sh <<'END'\n(.*?)^END$", block("> follow.sh"), re.M | re.S
    )
    begin = script_of_the_page("both.sh").partition("\nstart ")[0]
    for old, new in (("python", changed.get("server")), (TRAIN, changed.get("trainer"))):
        assert old in lines
        lines = lines.replace(old, new or old, 1)
    (clone / "follows.sh").write_text(f"{begin}\n{settings}\n{lines}")
    size = ["--nodes=3", "--gpus-per-node=1", f"--output={log}", f"--chdir={clone}"]
    return cluster.submit(*size, clone / "follows.sh", env=vllm, cwd=clone)


@pytest.mark.matrix
def test_a_server_is_killed_and_another_hangs(clone, cluster, vllm, tmp_path):
    """The first while the trainer writes weights. It comes back, and serves the last ones. The
    trainer finishes all its steps, and waits for neither before the end."""
    log, script = tmp_path / "log", clone / "examples/train_and_publish.py"
    assert "\nTIMEOUT = 60 " in script.read_text()
    script.write_text(script.read_text().replace("\nTIMEOUT = 60 ", "\nTIMEOUT = 20 "))
    # It keeps its node until the servers have been asked.
    trainer = f"""bash -ec '{TRAIN} --steps 120 --publish-every 2 "$@"; touch {log}.trained
        until [[ -e {log}.asked ]]; do sleep 0.2; done' bash"""
    job = follow(clone, cluster, vllm, log, "PAUSES=1", trainer=trainer)
    weights = clone / f"weights/{job}"
    wait_for(
        lambda: log.exists() and len({*serves(log)}) > 1 and "\nstep=20/" in log.read_text(), 120
    )
    names = re.search(r"ranks on (\S+),", log.read_text())[1]
    first, second, _ = cluster.exec("scontrol", "show", "hostnames", names).stdout.split()
    [dies] = job_processes.python(job, "serve_newest.py", first)
    [hangs] = job_processes.python(job, "serve_newest.py", second)
    wait_for(lambda: [*weights.glob(".step_*.part")])
    os.kill(dies, signal.SIGKILL)
    os.kill(hangs, signal.SIGSTOP)

    wait_for(Path(f"{log}.trained").exists, 180)
    assert "\nFinished: step=120" in log.read_text(), log.read_text()
    server = f"{first}:{8000 + job % 1000}"
    wait_for(lambda: answer_of(server, cluster)["model"] == "step_120")
    text = answer_of(server, cluster)["choices"][0]["text"]
    assert text == answer_from(weights / "step_120")
    os.kill(hangs, signal.SIGCONT)
    Path(f"{log}.asked").touch()
    ended = cluster.wait(job)
    said = "SERVER1 has ended with status 137, and starts again in 1 seconds\n"
    assert ended.state == "COMPLETED" and ended.log.count(" has ended ") == 1, ended
    assert said in ended.log and dies not in job_processes.python(job, "serve_newest.py"), ended
    wait_for(lambda: not cluster.left_over(job), 40)


@pytest.mark.matrix
def test_servers_are_stopped_with_their_trainer(clone, cluster, vllm, tmp_path):
    """By a signal, after which the trainer saves and the job is requeued. When it is killed, the
    job fails within seconds."""
    log = tmp_path / "log"
    trainer = f"{TRAIN} --steps 5000"
    job = follow(clone, cluster, vllm, log, "PAUSES=1", trainer=trainer)
    wait_for(lambda: log.exists() and serves(log) and "\nstep=20/" in log.read_text(), 120)
    cluster.exec("scancel", "--signal=TERM", job)
    wait_for(lambda: cluster.show(job)["Restarts"] == "1")
    wait_for(lambda: not cluster.left_over(job), 40)
    cluster.start_again(job)

    def again() -> str:
        return log.read_text().partition("\nResumed after step ")[2]

    wait_for(lambda: re.search(r"^node-.* serves step_", again(), re.M), 120)
    os.kill(next(job_processes.python(job, "train_and_publish.py")), signal.SIGKILL)
    began = time.monotonic()
    ended = cluster.wait(job)
    assert ended.state == "FAILED" and time.monotonic() - began < 20, ended
    wait_for(lambda: not cluster.left_over(job), 40)


@pytest.mark.matrix
def test_a_server_that_dies_four_times(clone, cluster, vllm, tmp_path):
    log = tmp_path / "log"
    job = follow(clone, cluster, vllm, log, 'PAUSES="0 0 0" LAST_WORDS=3', server="false")
    ended = cluster.wait(job)
    said = re.findall(r"^SERVER1 has ended.*$", ended.log, re.M)
    again = "SERVER1 has ended with status 1, and starts again in 0 seconds"
    last = "SERVER1 has ended with status 1, the last of 4 times"
    ends = "SERVER1 has ended: TRAINER has 3 seconds to save and end"
    assert said == [again] * 3 + [last, ends] and ended.state == "FAILED", ended
    wait_for(lambda: not cluster.left_over(job), 40)


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


@pytest.mark.parametrize(
    ("before", "lines", "said"),
    [
        (
            "",
            "start ONE 1 s; start TWO 2 s",
            "TWO needs 2 nodes, and 1 of the job's are left",
        ),
        ("", "start ONE 0 s", "ONE needs 0 nodes, and 2 of the job's are left"),
        (
            "MASTER_ADDR=10.0.0.1",
            "",
            "MASTER_ADDR=10.0.0.1 does not have the name of the first node, n1, in it",
        ),
        ("", "PATH=; ready http://n1:1 1", f"no curl on {socket.gethostname()}"),
        ("trap requeue_if_failed EXIT", "", "programs.sh and requeue_failed.sh do not go together"),
    ],
)
def test_programs_that_cannot_start(before, lines, said, tmp_path):
    die = 'die() { echo "$*" >&2; exit 1; }; requeue_if_failed() { exit; }'
    stand_ins(tmp_path, {"scontrol": "printf 'n1\\nn2\\n'", "srun": "true"})
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", MASTER_ADDR="n1", CPUS_PER_NODE=1)
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", "RUN": "7"}
    commands = f"set -eu\n{die}\n{before}\nsource aux/launch/programs.sh\n{lines}"
    done = run("bash", "-c", commands, env=env)
    assert (done.returncode, done.stderr) == (1, f"{said}\n")


@pytest.mark.parametrize(("asks", "seconds"), [("ready URL 2", 2), ("READY_LIMIT=1; ready URL", 1)])
def test_a_server_that_never_answers(asks, seconds, tmp_path):
    """The second one, on the second node. It would hold all nodes until the time limit."""
    stand_ins(tmp_path, {"curl": "exit 7"})
    lines = "start ONE 1 serve; start TWO 1 serve; " + asks.replace("URL", "http://n2:8000/health")
    done = programs(tmp_path, "exec sleep 60", f"{lines}; echo not reached")
    assert done.returncode == 1 and done.stdout == ""
    said = f"TWO on n2 has not answered http://n2:8000/health in {seconds} seconds:"
    # Here it is a pipe, in a job the file of --output.
    assert re.fullmatch(rf"{said} see its lines in pipe:\[\d+\]\n", done.stderr), done.stderr


KEPT = """
echo "$HEARTBEAT_PROGRAM on ${MASTER_ADDR}, ${RUN}" >> started
case $HEARTBEAT_PROGRAM in SERVER) exit 3 ;; OTHER) exec sleep 61 ;; esac
exec sleep 60
"""


def test_a_program_that_is_kept(tmp_path):
    """Starts again after each pause, on its own node and with its own RUN, and then no more. The
    other one, which is kept as well, ends with the job."""
    started = tmp_path / "started"
    lines = 'PAUSES="0 0.1 0.2"; LAST_WORDS=1; hosts+=(n3); '
    lines += "keep OTHER 1 serve; keep SERVER 1 serve; start TRAINER 1 train; finish"
    done = programs(tmp_path, KEPT.replace("started", str(started)), lines)
    assert done.returncode == 1, done.stderr
    servers = ["SERVER on n2, 7_SERVER"] * 4
    found = sorted(started.read_text().splitlines())
    assert found == ["OTHER on n1, 7_OTHER", *servers, "TRAINER on n3, 7_TRAINER"]
    ends = "SERVER has ended with status 3"
    said = [f"{ends}, and starts again in {pause} seconds" for pause in (0, 0.1, 0.2)]
    said += [
        f"{ends}, the last of 4 times",
        "SERVER has ended: TRAINER has 1 seconds to save and end",
    ]
    assert done.stderr.splitlines() == said


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


@pytest.mark.matrix
def test_an_evaluation_that_asks_a_server(clone, cluster, vllm):
    """One over two nodes, in the place of its trainer."""
    (clone / "both.sh").write_text(script_of_the_page("both.sh"))
    [large] = re.findall(r"^sed [^\n]* > large.sh\n.*?^END\n", block("> large.sh"), re.M | re.S)
    run("bash", "-ec", large, cwd=clone)
    (clone / "serve.sh").write_text(script_of_the_page("serve.sh"))
    bash(block("> ask_eval.sh"), clone, (NAMESPACES, "exec"), **cluster.environment, **vllm)
    [result] = clone.glob("results/Qwen__Qwen3-0.6B/results_*.json")
    assert "hellaswag" in json.loads(result.read_text())["results"]


@pytest.mark.matrix
def test_many_models_and_tasks(clone, cluster, vllm):
    """Each pair once, by two jobs that share them."""
    printed = bash(block("> table.py"), clone, (NAMESPACES, "exec"), **cluster.environment, **vllm)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    pairs = [(row["model"], row["name"]) for row in rows]
    assert pairs == [(f"qwen-{size}b", task) for size in ("0.6", "1.7") for task in TASKS], printed


TASKS = ["hellaswag", "arc_easy"]


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
