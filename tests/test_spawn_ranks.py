"""spawn_ranks.py as srun starts it: its ranks begin and end as those of torchrun do."""

import re
import sys

from slurm import REPOSITORY, environment, free_port, run

SCRIPTS = REPOSITORY / "tests/scripts"
SPAWNER = REPOSITORY / "aux/launch/spawn_ranks.py"


def job() -> dict[str, str]:
    """The environment of the one node of a job, as env.sh and srun make it."""
    place = {"NNODES": 1, "SLURM_NODEID": 0, "NPROC_PER_NODE": 2, "SLURM_JOB_ID": 7}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return environment(**place, OMP_NUM_THREADS=2, PYTHONUNBUFFERED=1)


def in_a_job(script: object, *arguments: object):
    return run(sys.executable, SPAWNER, script, *arguments, env=job())


def test_a_spawned_rank_is_as_under_python():
    """It has loader workers, and ends with its atexit functions."""
    done = in_a_job(SCRIPTS / "ends_of_a_rank.py")
    assert done.returncode == 0 and not done.stderr, done.stderr
    for rank in (0, 1):
        said = re.findall(rf"^RANK {rank} (loaded 4950|atexit)$", done.stdout, re.M)
        assert said == ["loaded 4950", "atexit"], done.stdout


def test_a_module():
    """As under python -m, in the current folder. A `--` beside its name is torchrun's."""
    command = [sys.executable, SPAWNER, "-m", "theirs.train", "--", "--n", "--"]
    done = run(*command, cwd=SCRIPTS, env=job())
    said = sorted(done.stdout.splitlines())
    assert said == [f"RANK {rank} [4] ['--n', '--']" for rank in (0, 1)], done
    for words, status in ((["--", "theirs/gone.py"], 1), (["-m"], 1)):
        done = run(sys.executable, SPAWNER, *words, cwd=SCRIPTS, env=job())
        assert done.returncode == status and not done.stdout, done


# There sem_getvalue() is not implemented.
AS_ON_MACOS = """from multiprocessing.synchronize import Semaphore

def get_value(self):
    raise NotImplementedError

Semaphore.get_value = get_value
"""


def test_a_signal_is_passed_on_once(tmp_path):
    """A handler that saves must not be entered again while it does. Also on macOS."""
    (tmp_path / "sitecustomize.py").write_text(AS_ON_MACOS)
    env = job() | {"PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, SPAWNER, SCRIPTS / "signals_counted.py", cwd=tmp_path, env=env)
    said = sorted(re.findall(r"^RANK (.*)$", done.stdout, re.M))
    assert said == ["0 was asked 1 times", "1 was asked 1 times"], done


def test_its_status_is_that_of_the_first_rank_to_fail():
    """Also of a signal. One line names the rank and the host, and its peers are ended."""
    script = SCRIPTS / "fails.py"
    done = in_a_job(script, "raise")
    assert done.returncode == 1 and "ValueError: 7" in done.stderr, done.stderr
    for how, status, said in (("exit", 3, "exit code 3"), (9, 137, "signal SIGKILL")):
        done = in_a_job(script, how)
        assert done.returncode == status, done.stderr
        line = rf"^spawn_ranks.py: rank 1 on \S+: process 1 terminated with {said}$"
        assert len(re.findall(line, done.stderr, re.M)) == 1, done.stderr
