"""Way 3's spawner forks its ranks in a job. They are to begin and end as those of torchrun do."""

import re
import sys
from pathlib import Path

import pytest

from conftest import environment, free_port, run

ENDS = "tests/scripts/ends.py"


def in_a_job(script: str, *arguments: object, ranks: int = 2, timeout: float = 120):
    """spawn_ranks.py as env.sh and srun start it on the one node of a job."""
    job = {"NNODES": 1, "SLURM_NODEID": 0, "NPROC_PER_NODE": ranks}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = (sys.executable, "distributed/spawn_ranks.py", script, *arguments)
    return run(*command, env=environment(**job, OMP_NUM_THREADS=2), timeout=timeout)


def lines(output: str) -> list[str]:
    """What each rank says, in the order of the ranks; each one's in its own order."""
    said = sorted(re.findall(r"^RANK (\d+) (.*)$", output, re.M), key=lambda line: line[0])
    folders = [words.split()[1] for _, words in said if words.startswith("folder")]
    assert not any(Path(folder).exists() for folder in folders), "removed when Python ends"
    assert len(set(folders)) == len(folders), "each rank has its own"
    return [f"{rank} {words}" for rank, words in said if not words.startswith("folder")]


def test_a_forked_rank_ends_as_others_do():
    forked = in_a_job(ENDS)
    other = run("./torchrun.sh", ENDS, env=environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=2))
    assert forked.returncode == other.returncode == 0, forked.stderr + other.stderr
    expected = [f"{rank} {words}" for rank in (0, 1) for words in ("sees 1 4950 268435456 2 True", "thread", "atexit")]
    assert lines(forked.stdout) == lines(other.stdout) == expected
    assert not forked.stderr, forked.stderr


def test_ranks_share_one_import_of_torch(tmp_path):
    """They are forked after it, and CUDA has not been asked for anything until then."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "imported = 'torch' in sys.modules\n"
        "import torch\n"
        "print('RANK', os.environ['RANK'], imported, torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())\n"
    )
    done = in_a_job(script)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == ["0 True False False", "1 True False False"]


@pytest.mark.parametrize("number", ["INT", "TERM", "KILL"])
def test_a_forked_rank_that_a_signal_ends(number, tmp_path):
    """Its status is the spawner's, as a shell counts a signal, and its peers are ended."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        f"os.environ['RANK'] != '1' or os.kill(os.getpid(), signal.SIG{number})\n"
        "time.sleep(100)\n"
    )
    done = in_a_job(script, timeout=60)
    assert done.returncode == {"INT": 130, "TERM": 143, "KILL": 137}[number], done.stderr


@pytest.mark.matrix
def test_200_ends():
    """In a row: no rank hangs or aborts while it ends, and the status is the rank's."""
    for i in range(200):
        how, status = ((), 0) if i % 2 else (("exit",), 3)
        done = in_a_job(ENDS, *how, ranks=4, timeout=60)
        assert done.returncode == status, f"{i}: {done.stderr}"
        assert done.stdout.count(" atexit") == 4 and not done.stderr, f"{i}: {done.stdout}{done.stderr}"
