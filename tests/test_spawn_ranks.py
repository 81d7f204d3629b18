"""spawn_ranks.py as srun starts it: its ranks begin and end as those of torchrun do."""

import re
import sys

from slurm import REPOSITORY, environment, free_port, run

SPAWNER = REPOSITORY / "aux/launch/spawn_ranks.py"


def job() -> dict[str, str]:
    """The environment of the one node of a job, as env.sh and srun make it."""
    place = {"NNODES": 1, "SLURM_NODEID": 0, "NPROC_PER_NODE": 2, "SLURM_JOB_ID": 7}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return environment(**place, OMP_NUM_THREADS=2, PYTHONUNBUFFERED=1)


def in_a_job(script: object, *arguments: object):
    return run(sys.executable, SPAWNER, script, *arguments, env=job())


ENDS = """
import atexit, os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

def say(*words):
    os.write(1, (" ".join(map(str, ("RANK", os.environ["RANK"], *words))) + "\\n").encode())

atexit.register(say, "atexit")
dist.init_process_group("gloo")
loader = DataLoader(torch.arange(100), batch_size=10, num_workers=2)
say("loaded", sum(int(batch.sum()) for batch in loader))
dist.destroy_process_group()
"""


def test_a_spawned_rank_is_as_under_python(tmp_path):
    """It has loader workers, and ends with its atexit functions."""
    (tmp_path / "script.py").write_text(ENDS)
    done = in_a_job(tmp_path / "script.py")
    assert done.returncode == 0 and not done.stderr, done.stderr
    for rank in (0, 1):
        said = re.findall(rf"^RANK {rank} (loaded 4950|atexit)$", done.stdout, re.M)
        assert said == ["loaded 4950", "atexit"], done.stdout


MODULE = """
import multiprocessing, os, sys
from theirs.other import double

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said = pool.map(double, [2])
    os.write(1, f"RANK {os.environ['RANK']} {said} {sys.argv[1:]}\\n".encode())
"""


def test_a_module(tmp_path):
    """As under python -m, in the current folder. A `--` beside its name is torchrun's."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/train.py").write_text(MODULE)
    (tmp_path / "theirs/other.py").write_text("def double(x):\n    return 2 * x\n")
    command = [sys.executable, SPAWNER, "-m", "theirs.train", "--", "--n", "--"]
    done = run(*command, cwd=tmp_path, env=job())
    said = sorted(done.stdout.splitlines())
    assert said == [f"RANK {rank} [4] ['--n', '--']" for rank in (0, 1)], done
    for words, status in ((["--", "theirs/gone.py"], 1), (["-m"], 1)):
        done = run(sys.executable, SPAWNER, *words, cwd=tmp_path, env=job())
        assert done.returncode == status and not done.stdout, done


COUNTS = """
import os, signal, time
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
open(f"ready-{os.environ['RANK']}", "w").close()
while len([name for name in os.listdir() if name.startswith("ready-")]) < 2:
    time.sleep(0.1)
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGTERM)
while not asked:
    time.sleep(0.1)
time.sleep(3)
os.write(1, f"RANK {os.environ['RANK']} was asked {len(asked)} times\\n".encode())
"""


def test_a_signal_is_passed_on_once(tmp_path):
    """A handler that saves must not be entered again while it does."""
    (tmp_path / "script.py").write_text(COUNTS)
    done = run(sys.executable, SPAWNER, "script.py", cwd=tmp_path, env=job())
    said = sorted(re.findall(r"^RANK (.*)$", done.stdout, re.M))
    assert said == ["0 was asked 1 times", "1 was asked 1 times"], done


def test_its_status_is_that_of_the_first_rank_to_fail(tmp_path):
    """Also of a signal. One line names the rank and the host, and its peers are ended."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1' and sys.argv[1] == 'exit':\n"
        "    sys.exit(3)\n"
        "if os.environ['RANK'] == '1' and sys.argv[1] == 'raise':\n"
        "    raise ValueError(7)\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "time.sleep(100)\n"
    )
    done = in_a_job(script, "raise")
    assert done.returncode == 1 and "ValueError: 7" in done.stderr, done.stderr
    for how, status, said in (("exit", 3, "exit code 3"), (9, 137, "signal SIGKILL")):
        done = in_a_job(script, how)
        assert done.returncode == status, done.stderr
        line = rf"^spawn_ranks.py: rank 1 on \S+: process 1 terminated with {said}$"
        assert len(re.findall(line, done.stderr, re.M)) == 1, done.stderr
