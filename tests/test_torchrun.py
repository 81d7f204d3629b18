"""torchrun.sh: what torchrun is asked for, in a job and by hand, and whose an option is."""

import sys

import pytest

from slurm import environment, run, stand_ins


def test_what_torchrun_is_asked_for(tmp_path):
    """SIGTERM is ignored until torchrun handles it, because a job that it ends is lost."""
    says = '"$*" "$$" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"'
    stand_ins(tmp_path, {"python3": f"kill -TERM $$; printf '%s\\n' {says}"})
    given = {"NNODES": 2, "NPROC_PER_NODE": 4, "MASTER_ADDR": "n1", "MASTER_PORT": 61007}
    given |= {"SLURM_NODEID": 1, "SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": 2}
    path = f"{tmp_path}:{environment()['PATH']}"
    shell = ["bash", "-c", 'echo $$; exec ./torchrun.sh "$@"', "bash", "train.py", "--epochs", 3]
    done = run(*shell, env=environment(PATH=path, **given))
    before, said, after, patience = done.stdout.splitlines()
    expected = "-m torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node=4 "
    expected += "--master-addr=n1 --master-port=61007 --rdzv-id=7.2 --rdzv-conf=timeout=302 "
    assert said == f"{expected}-- train.py --epochs 3"
    assert before == after, "torchrun.sh becomes torchrun, so that Slurm's signals reach it"
    assert int(patience) >= 300, "ranks may save for longer than torchrun's own 30 s"


@pytest.mark.parametrize(
    ("cuda", "xpu", "given", "ranks"), [(8, 0, "", 8), (0, 3, "", 3), (0, 0, "", 2), (8, 0, 4, 4)]
)
def test_torchrun_by_hand(cuda, xpu, given, ranks, tmp_path):
    """One rank for each device that torch sees, and any free port: two runs do not meet. A rank has
    one thread, or as many as you say."""
    counts = f"class cuda:\n    device_count = lambda: {cuda}\n"
    counts += f"class xpu:\n    device_count = lambda: {xpu}\n"
    (tmp_path / "torch.py").write_text(counts)
    python = f'if [[ $1 == -c ]]; then exec {sys.executable} "$@"; fi; echo "$*"'
    stand_ins(tmp_path, {"python3": f"{python}; echo $OMP_NUM_THREADS threads"})
    path = f"{tmp_path}:{environment()['PATH']}"
    env = environment(PATH=path, PYTHONPATH=tmp_path, NPROC_PER_NODE=given)
    asked = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} -- x.py\n"
    for threads in ("", "3"):
        done = run("./torchrun.sh", "x.py", env=env | {"OMP_NUM_THREADS": threads})
        assert done.stdout == f"{asked}{threads or 1} threads\n", done.stderr


def test_what_torchrun_would_take_for_its_own(tmp_path):
    """Options before the script are sbatch's or torchrun's, and the ranks would not find a file of
    that name."""
    stand_ins(tmp_path, {"python3": "echo started"})
    env = environment(PATH=f"{tmp_path}:{environment()['PATH']}", NNODES=1)
    done = run("./torchrun.sh", "--nodes=4", "train.py", env=env)
    said = "torchrun.sh: --nodes=4 is no script: sbatch's options stand before the launcher, and "
    said += "torchrun's in torchrun.sh\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


# A command, and how it would be without torchrun's `--`
WORDS = [
    ("-m a.b -- --n 5", "-m a.b --n 5"),
    ("-m -- a.b -- --n", "-m a.b -- --n"),
    ("x.py -- -- --n", "x.py -- --n"),
    ("-- x.py a --", "x.py a --"),
    ("x.py a -- --n", "x.py a -- --n"),
    ("-m a.b a -- -m", "-m a.b a -- -m"),
]


@pytest.mark.parametrize(("words", "kept"), WORDS)
def test_torchrun_s_dashes(words, kept, tmp_path):
    """Are no argument of the script, under srun as little as under torchrun."""
    stand_ins(tmp_path, {"python": 'echo "$*"', "python3": 'echo "$*"'})
    given = {"NNODES": 1, "NPROC_PER_NODE": 2, "SLURM_NODEID": 0, "SLURM_LOCALID": 0}
    given |= {"MASTER_ADDR": "n1", "MASTER_PORT": 1, "SLURM_JOB_ID": 7}
    env = environment(PATH=f"{tmp_path}:{environment()['PATH']}", **given)
    done = run("./aux/launch/slurm_rank.sh", "python", *words.split(), env=env)
    assert done.stdout == f"{kept}\n", done.stderr
    after = f"-m -- {kept[3:]}" if kept.startswith("-m ") else f"-- {kept}"
    for nnodes in (1, ""):  # in a job, and by hand
        done = run("./torchrun.sh", *words.split(), env=env | {"NNODES": str(nnodes)})
        before, _, rest = done.stdout.partition(f" {after}\n")
        assert before.split()[-1].startswith(("--rdzv", "--nproc")) and not rest, done
