"""first_error.py: in logs of real jobs, why the job ended, and which rank was the first."""

import re
import sys
from pathlib import Path

import pytest

import first_error
from slurm import REPOSITORY, run, stand_ins

LOGS = re.findall(
    r"^== (\w+) .*\n((?:(?!==).*\n)*)", (REPOSITORY / "tests/ends.txt").read_text(), re.M
)
LOGS = dict(LOGS)
ERROR = "ValueError: bad sample 17"
MEMORY = "slurmstepd-node-2: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your"
MEMORY += " processes may have been killed by the cgroup out-of-memory handler."
# The cause, the first rank's number, node, status and signal, and the error's line
ENDS = {
    "completed": ("unknown", None, None),
    "error_torchrun": ("error", (1, "node-2", 1, None), ERROR),
    "error_spawn": ("error", (1, "node-2", 1, None), ERROR),
    "exit_torchrun": ("exit", (1, "node-2", 3, None), None),
    "sentence": ("exit", (1, "node-4", 1, None), "data/train is not there"),
    "kill_torchrun": ("killed", (1, "node-2", None, 9), None),
    "segv_srun": ("killed", (1, "node-4", None, 11), "Fatal Python error: Segmentation fault"),
    "memory_torchrun": ("memory", (1, "node-2", None, 9), MEMORY),
    "limit_torchrun": ("time_limit", None, None),
    "cancelled": ("cancelled", None, None),
    "cancelled_26": ("cancelled", None, None),
    "node_lost": ("node", (None, "node-2", None, None), None),
    "preempted": ("terminated", None, None),
    "requeued": ("stopped", None, None),
}


def end_of(log: str) -> tuple:
    found = first_error.end_of(first_error.parts_of(log)[-1])
    first = found["first"] and tuple(found["first"].values())
    return found["cause"], first, found["error"]


@pytest.mark.parametrize("name", LOGS)
def test_why_a_job_ended(name):
    assert end_of(LOGS[name]) == ENDS[name]


def test_only_the_last_start_counts():
    """After a requeue, and after a start that the spare launcher made within the job."""
    log = LOGS["memory_torchrun"] + LOGS["sentence"]
    assert end_of(log) == ENDS["sentence"]
    begin = "Start {} on node-1,node-4\n"
    again = LOGS["error_torchrun"].replace("\n", "\n" + begin.format(1), 1) + begin.format(2)
    spare = again + LOGS["kill_torchrun"].partition("\n")[2].replace("node-2", "node-4")
    assert end_of(spare) == ("killed", (1, "node-4", None, 9), None)
    assert [part["start"] for part in first_error.parts_of(spare, 2)] == [20000, 20001]
    assert [part["start"] for part in first_error.parts_of(log, 2)] == [1, 2]


def test_a_server_that_was_started_again_ended_nothing():
    """By programs.sh's `keep`."""
    begin, rest = LOGS["sentence"].split("\n", 1)
    killed = "srun: error: node-1: task 0: Killed\n"
    again = "SERVER has ended with status 137, and starts again in 5 seconds\n"
    assert end_of(f"{begin}\n{killed}{again}{rest}") == ENDS["sentence"]
    assert end_of(f"{begin}\n{killed}{rest}")[0] == "killed"
    # The trainer's error may stand before, if it failed because the server did.
    error = f"[rank0]: {ERROR}\n"
    ended = "srun: error: node-3: task 0: Exited with exit code 1\n"
    assert end_of(f"{begin}\n{error}{again}{ended}")[2] == ERROR


def test_what_torch_says_of_a_lost_peer_is_no_cause():
    """All ranks that wait for one that has ended say so, and say it first."""
    begin = "t: 2 ranks on node-[1-2], rank 0 at node-1:6. Each node: ranks 1, GPUs 1 of 1, CPUs 9"
    lost = (
        '[rank1]:[W1129 02:11:05.1] Failed to check the "should dump" flag on TCPStore, (maybe TCP'
        " server has shut down too early), with error: Broken pipe\n"
        "Exception raised from recvBytes at /pytorch/torch/csrc/Utils.hpp:678 (most recent)\n"
        "[rank1]: torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was"
        " likely closed. Did the remote server shutdown or crash?\n"
    )
    killed = "srun: error: node-1: task 0: Killed\n"
    assert end_of(f"{begin}\n{lost}{killed}") == ("killed", (0, "node-1", None, 9), None)
    error = f"[rank0]: {ERROR}\n"
    assert end_of(f"{begin}\n{lost}{error}")[2] == ERROR
    for words in ("sendBytes failed with error: Broken pipe", "Exception raised from sendBytes"):
        raised = f'[rank1]:   File "a.py", line 7\n[rank1]: torch.distributed.NetError: {words}\n'
        assert end_of(f"{begin}\n{raised}{killed}") == ("killed", (0, "node-1", None, 9), None)


def test_the_node_of_a_rank(monkeypatch, tmp_path):
    """By its number, if nothing says how it ended: each node has two."""
    path = stand_ins(tmp_path, {"scontrol": '[[ "$3" == "node-[5-6]" ]] && echo node-5 node-6'})
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    header = "t: 4 ranks on node-[5-6], rank 0 at node-5:6. Each node: ranks 2, GPUs 2 of 2, CPUs 9"
    found = end_of(f"{header}\n[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to\n")
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to"
    assert found == ("gpu_memory", (2, "node-6", 1, None), error)
    # Under torchrun a task is no rank: this one ended two.
    agent = "E1 torch/distributed/elastic/api.py:9] failed\nsrun: error: node-6: task 1: Killed\n"
    assert end_of(f"{header}\n{agent}") == ("killed", (None, "node-6", None, 9), None)
    assert end_of(f"{header}\nEnded, because of rank 2 on node-6: no step for 9 s\n")[0] == "hang"


def test_sigterm_under_torchrun():
    """As before a preemption. Without Slurm's words, its own error is no cause."""
    lines = LOGS["limit_torchrun"].splitlines()
    log = "".join(f"{line}\n" for line in lines if "TIME LIMIT" not in line)
    told = "W1 torch/distributed/elastic/a.py:7] Received 15 death signal, shutting down workers\n"
    assert end_of(log + told)[0] == "terminated"


# Lines that hide the error, or the whole of a start
HARMLESS = (
    "epoch 1 validation error: 0.253\nconfig.yaml not found, using defaults\nStart 0 on cuda:0\n"
)


def test_lines_that_are_no_error():
    """A metric, a default, and what only looks like a start of the spare launcher."""
    header, _, rest = LOGS["error_torchrun"].partition("\n")
    assert end_of(f"{header}\n{HARMLESS}{rest}") == ENDS["error_torchrun"]
    header, _, rest = LOGS["sentence"].partition("\n")
    log = f"{header}\n{HARMLESS}{rest}"
    assert end_of(log) == ENDS["sentence"]
    [part] = first_error.parts_of(log)
    assert part["start"] == 0 and first_error.end_of(part)["guessed"]


# As torchrun 2.13 reports it: the root cause stands last, and the ranks that torchrun itself has
# ended have the same second.
SHARED = """W1129 20:43:40.1 7 torch/distributed/a.py:1] Sending process 8 closing signal SIGTERM
E1129 20:43:40.2 7 torch/distributed/a.py:2] failed (exitcode: {0}) local_rank: 1 (pid: 9) of binary
Failures:
[1]:
  time      : 2026-11-29_20:43:40
  host      : node-1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 8)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 8
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_20:43:40
  host      : node-1
  rank      : 1 (local_rank: 1)
  exitcode  : {0} (pid: 9)
"""


def test_two_ranks_of_a_node_under_torchrun():
    """The one that failed is named, and not the one that torchrun ended because of that."""
    assert end_of(SHARED.format(3)) == ("exit", (1, "node-1", 3, None), None)
    assert end_of(SHARED.format(-6)) == ("killed", (1, "node-1", None, 6), None)


# As Slurm 22.05 reports a rank that ended, and one that then ignored SIGTERM for 30 seconds
DEAF = """{}no more data
srun: error: node-2: task 1: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-node-1: error: *** STEP 7.0 ON node-1 CANCELLED AT 2026-11-29T21:36:12 ***
srun: error: node-1: task 0: Killed
srun: Force Terminated StepId=7.0
"""


def test_ranks_that_ignore_sigterm():
    """Are killed because another one has ended, by srun or torchrun, and are not to blame. But if
    ranks say that they have lost one, it is the one that was killed."""
    assert end_of(DEAF.format("")) == ("exit", (1, "node-2", 3, None), "no more data")
    lost = "[rank1]: RuntimeError: Connection closed by peer\n"
    assert end_of(DEAF.format(lost))[:2] == ("killed", (0, "node-1", None, 9))
    ended = SHARED.format(3).replace("-15 (pid: 8)", "-9 (pid: 8)")
    assert end_of(ended)[1] == (0, "node-1", None, 9)
    # On other nodes torchrun gets SIGTERM.
    told = "W1 torch/distributed/a.py:7] Received 15 death signal, shutting down workers\n"
    for name in ("15", "Signals.SIGTERM"):  # the second one with Python 3.10
        forced = f"Unable to shutdown process 8 via {name}, forcefully exiting via 9\n"
        log = f"W1 torch/distributed/a.py:4] {forced}{ended}{told}"
        assert end_of(log)[:2] == ("exit", (1, "node-1", 3, None))


BAD = "BadSample: sample 17 is bad"
TRACEBACK = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py", line 7, in <module>\n'
    f"[rank0]:   loss:\n[rank1]:     raise BadSample\n[rank0]: 0.3\n[rank1]: {BAD}\n"
)
WORDY = "UserWarning: it was Terminated, please raise an issue"
WATCHDOG = "[rank0]:[E1129 1 P.cpp:6] [Rank 0] Watchdog caught collective operation timeout: Work\n"
GROUP = """[rank1]:   + Exception Group Traceback (most recent call last):
[rank1]:   |   File "a.py", line 16, in <module>
[rank1]:   | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
[rank1]:   +-+---------------- 1 ----------------
[rank1]:     | ValueError: bad sample 17
"""
WORKER = """[rank1]:   File "a.py", line 47, in <module>
[rank1]: ValueError: Caught ValueError in DataLoader worker process 0.
[rank1]: Original Traceback (most recent call last):
[rank1]: ValueError: bad sample 17
"""
RETRY = "wandb: Network error (ConnectionError), entering retry loop.\n"
CAUGHT = "ImportError: no fast path, so the slow one\n"
ERRORS = {
    "of any name": (TRACEBACK, "error", BAD),
    "in a group": (GROUP, "error", ERROR),
    "in a loader worker": (WORKER, "error", ERROR),
    "after one that was caught": (f"{CAUGHT}[rank1]: {ERROR}\n", "error", ERROR),
    "after a retry": (f"{RETRY}[rank1]: {ERROR}\n", "error", ERROR),
    "for which NCCL waited": (f"[rank1]: {ERROR}\n{WATCHDOG}", "error", ERROR),
    "that ends by SIGABRT": (
        f"[rank1]: {ERROR}\nsrun: error: n1: task 1: Aborted\n",
        "error",
        ERROR,
    ),
    "with any words": (TRACEBACK.replace(BAD, WORDY), "error", WORDY),
    "of NCCL's": (WATCHDOG, "hang", WATCHDOG[8:].strip()),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error(name):
    log, cause, error = ERRORS[name]
    found = first_error.end_of(first_error.parts_of(log)[-1])
    assert (found["cause"], found["error"]) == (cause, error) and not found["guessed"]
    assert found["first"]["rank"] == int(name != "of NCCL's")


def test_a_hang_after_an_error_that_was_no_end():
    """NCCL goes on after its warning, and the script has caught its exception."""
    warns = "n1:1:2 [0] NCCL WARN NET/IB : no cable\n"
    stands = "Ended, because of rank 2 on node-6: no step for 9 s\n"
    for log in (warns + WATCHDOG, CAUGHT + WATCHDOG, CAUGHT + stands):
        assert end_of(log)[0] == "hang", log


def test_an_error_of_a_million_letters():
    cause, _, error = end_of(f"[rank1]: ValueError: {'x' * 1_000_000}\n")
    assert cause == "error" and error.startswith("ValueError: xx") and len(error) == 500


def test_a_progress_bar():
    """tqdm leaves its line open, so an error stands behind the last of its bars."""
    bars = "".join(
        f"  {n}%|#     | {n}/100 [00:0{n}<00:02, 3.1it/s, loss=2.{n}]\n" for n in range(3)
    )
    ended = "srun: error: node-1: task 0: Exited with exit code 1\n"
    for error in ("data/train is not there", "terminate called without an active exception"):
        assert end_of(f"{bars[:-1]}{error}\n{ended}")[2] == error
    assert end_of(f"{bars}{ended}")[2] is None


def test_labels_and_colours():
    """Of torchrun --tee, srun --label, DeepSpeed's pdsh and Ray."""
    for label in ("[default1]:", "03: ", "node-1: ", "(RayTrainWorker pid=7, ip=10.0.0.1) "):
        lines = f"\x1b[31m{TRACEBACK}\x1b[0m".splitlines()
        log = "".join(f"{label}{line}\n" for line in lines)
        assert end_of(log) == ("error", (1, None, 1, None), BAD), label


# A cause of rank 3 on n2, by root, in words
WORDS = {
    "error": "rank 3 on n2 had an error",
    "exit": "rank 3 on n2 ended with status 4",
    "killed": "rank 3 on n2 was killed by SIGKILL",
    "memory": "rank 3 on n2 had no memory left",
    "gpu_memory": "rank 3 on n2 had no GPU memory left",
    "hang": "its ranks waited for one that took no step",
    "time_limit": "its time was up",
    "cancelled": "root cancelled it",
    "preempted": "another job took its nodes",
    "node": "it lost n2",
    "terminated": "Slurm or somebody told its ranks to stop",
    "stopped": "it was stopped, and put back into the queue",
    "wait_time": "one task had ended, and srun then ended the others",
    "not_started": "Slurm could not start it",
    "unknown": "its log does not say why",
}


def test_each_cause_in_words():
    first = first_error.end(3, "n2", 4, 9)
    assert {
        cause: first_error.why(cause, first, "root")[0] for cause in first_error.CAUSES
    } == WORDS
    nobody = {cause: first_error.why(cause, None) for cause in ("cancelled", "node", "memory")}
    assert nobody["cancelled"][0] == "somebody cancelled it"
    assert nobody["node"] == ("it lost a node", "submit it again")
    assert nobody["memory"][0] == "it had no memory left"
    assert first_error.why("node", first)[1] == "submit it again, with --exclude=n2"


def test_what_to_do_is_on_the_pages():
    """Also for a rank whose traceback srun 22.05 has lost, so that only its status is known."""
    does = [do for _, do in first_error.CAUSES.values()]
    named = [found for do in does for found in re.findall(r"(docs/\w+\.md)(?:, ([\w ]+))?", do)]
    assert any(words for _, words in named)
    for page, words in named:
        if words:
            assert words in (REPOSITORY / page).read_text(), (page, words)
    lost = "7.sh: 2 ranks on n1, rank 0 at n1:1. Each node: ranks 2, GPUs 0\n"
    lost += "srun: error: n1: task 1: Exited with exit code 1\n"
    found = first_error.end_of(first_error.parts_of(lost)[-1])
    assert found["cause"] == "exit" and found["first"]["rank"] == 1
    assert "No error at all" in first_error.why("exit", found["first"])[1]


WAITED = """srun: First task exited 5s ago
srun: StepId=32367546.0 task 0: running
srun: StepId=32367546.0 task 1: exited
srun: launch/slurm: _step_signal: Terminating StepId=32367546.0
slurmstepd-node-1: error: *** STEP 32367546.0 ON node-1 CANCELLED AT 2026-11-29T20:52:10 ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: node-1: task 0: Killed
"""


def test_srun_waits_no_longer():
    """By a site's WaitTime, unless the task that had ended before has failed."""
    assert end_of(WAITED) == ("wait_time", None, None)
    failed = WAITED.replace("1: exited", "1: exited abnormally")
    failed = f"ValueError: late\nsrun: error: node-1: task 1: Exited with exit code 1\n{failed}"
    assert end_of(failed)[0] != "wait_time"


def test_a_signal_without_a_name():
    what, _ = first_error.why("killed", first_error.end(1, "n2", None, 35))
    assert what == "rank 1 on n2 was killed by signal 35"


def test_the_page_looks_for_the_same():
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    for words in (first_error.ERROR, first_error.NO_ERROR):
        assert words.replace("(?:", "(").replace(r"\S", "[^ ]") in page


def test_the_command(tmp_path):
    """Of a log, and of what is none."""
    (tmp_path / "log").write_text(LOGS["segv_srun"] + "\x1b[2J")
    said = run(sys.executable, first_error.__file__, tmp_path / "log")
    assert said.stdout.splitlines() == [
        "The last start ended, because rank 1 on node-4 was killed by SIGSEGV.",
        "    Fatal Python error: Segmentation fault",
        "Next: see docs/troubleshooting.md, Find the first error.",
    ]
    for path in (tmp_path, tmp_path / "none"):
        none = run(sys.executable, first_error.__file__, path)
        assert none.returncode == 1 and none.stderr.strip() == first_error.__doc__.strip()
    assert Path(first_error.__file__).parent == REPOSITORY / "aux"
