"""aux/lint_sbatch.py: each mistake is found on its line, what is nearly it and right is not, and
ours are clean."""

import re
import sys
from pathlib import Path

import pytest

import lint_sbatch
from conftest import REPOSITORY, run

HEADER = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=%x_%j.out
"""
FLAGS = "--kill-on-bad-exit=1"
WAIT = 'srun_pid=$!\nwhile kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done'

# What the finding says; the header and the body of a script with the mistake, the line marked by
# MISTAKE; one without.
CASES = {
    "blank": (
        "take out the blanks",
        "# SBATCH --time=1:00:00  MISTAKE",
        "# SBATCH lines are read by Slurm",
    ),
    "indented": (
        "take out the blanks",
        "  #SBATCH --time=1:00:00  MISTAKE",
        "  # about SBATCH --time",
    ),
    "late": (
        "after the first command",
        "cd /tmp\n#SBATCH --time=1:00:00  MISTAKE",
        "# a comment\n\n#SBATCH --time=1:00\ncd /tmp\ncat <<'EOF' >a.sh\n#SBATCH -n 1\nEOF\necho "
        "'\n#SBATCH -n 2'",
    ),
    "variable in a directive": (
        "does not expand",
        "#SBATCH --job-name=$USER  MISTAKE",
        "#SBATCH --job-name=%u  # $USER",
    ),
    "log folder": (
        "no folder absent",
        "#SBATCH --output=absent/%j.out  MISTAKE",
        "#SBATCH --output=present/%j.out",
    ),
    "error folder": (
        "no folder absent",
        "#SBATCH -e absent/%j.out  MISTAKE",
        "#SBATCH -e /dev/null",
    ),
    "log folder named by the job": (
        "only name%j",
        "#SBATCH --output=%j/out  MISTAKE",
        "#SBATCH --output=present/%j",
    ),
    "job name with a slash": (
        "take the / out",
        "#SBATCH --job-name=a/b\n#SBATCH --output=%x.out  MISTAKE",
        "#SBATCH --job-name=a/b\n#SBATCH --output=%j.out",
    ),
    "standalone": (
        "--standalone on 2 nodes",
        f"srun {FLAGS} torchrun --standalone train.py  # MISTAKE",
        f'srun {FLAGS} torchrun --nnodes="$SLURM_JOB_NUM_NODES" --rdzv-endpoint="$host:$port" '
        "train.py",
    ),
    "nnodes 1, in an array": (
        "--nnodes=1 on 2 nodes",
        f'launcher=(torchrun --nnodes=1)  # MISTAKE\nsrun {FLAGS} \\\n  "${{launcher[@]}}" '
        "train.py",
        f'launcher=(torchrun --nnodes=1:2)\nsrun {FLAGS} \\\n  "${{launcher[@]}}" train.py',
    ),
    "nnodes 1 on one node": (
        "--nnodes 1 on 2 nodes",
        f"srun {FLAGS} torchrun --nnodes 1 train.py  # MISTAKE",
        f"srun --nodes=1 --ntasks=1 {FLAGS} torchrun --nnodes 1 train.py",
    ),
    "no srun": (
        "python without srun, and so one process, though the header asks for 8 tasks: srun python",
        "python prepare.py\npython -u train.py --epochs 3  # MISTAKE",
        f"python prepare.py\nsrun {FLAGS} python -u train.py --epochs 3",
    ),
    "no srun, and --ntasks": (
        "asks for 4 tasks: srun python3",
        "#SBATCH --nodes=1\n#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=4\npython3 train.py  # "
        "MISTAKE",
        "#SBATCH --nodes=1\n#SBATCH --ntasks=1\npython3 train.py",
    ),
    "no srun, and -n": (
        "asks for 3 tasks",
        "#SBATCH -n 3\nsource .venv/bin/activate\nif true; then\n  X=1 python train.py  # "
        "MISTAKE\nfi",
        "#SBATCH -n 3\npython a.py & python b.py & python c.py & wait",
    ),
    "no srun, but on several nodes": (
        "asks for 2 nodes",
        "#SBATCH --ntasks-per-node=1\nset -e\nsrun hostname\npython train.py  # MISTAKE",
        "#SBATCH --ntasks-per-node=1\npython -m venv .venv\npython -c 'import torch'\nset "
        "-e\nmpirun python train.py",
    ),
    "no srun, in a container": (
        "apptainer without srun",
        "apptainer exec --nv torch.sif python train.py  # MISTAKE",
        f"srun {FLAGS} apptainer exec --nv torch.sif python train.py",
    ),
    "no srun before torchrun": (
        "torchrun without srun, and so on one of 2 nodes: srun --ntasks-per-node=1 torchrun",
        'torchrun --nnodes="$SLURM_NNODES" --rdzv-endpoint="$host:$port" train.py  # MISTAKE',
        "#SBATCH --nodes=1\ntorchrun --nproc-per-node=gpu train.py",
    ),
    "no srun before python -m": (
        "python without srun, and so on one of 2 nodes",
        "python -m torch.distributed.run train.py  # MISTAKE",
        "#SBATCH --nodes=1\npython -m torch.distributed.run train.py",
    ),
    "standalone without srun": (
        "--standalone on 2 nodes",
        "torchrun --standalone train.py  # MISTAKE",
        "#SBATCH --nodes=1\ntorchrun --standalone train.py",
    ),
    "srun behind a variable": (
        "python without srun",
        "launcher='nice'\npython train.py  # MISTAKE",
        f"launcher='srun {FLAGS}'\n$launcher python train.py",
    ),
    "rank variable": (
        "SLURM_PROCID expanded in the batch shell",
        f'srun {FLAGS} bash -c "python train.py --rank $SLURM_PROCID"  # MISTAKE',
        f'echo "rank $SLURM_PROCID"  # $SLURM_LOCALID\nsrun {FLAGS} bash -c \'python train.py '
        "--rank $SLURM_PROCID'\n"
        f'srun {FLAGS} bash -c "python train.py --rank \\$SLURM_PROCID"',
    ),
    "node rank": (
        "SLURM_NODEID",
        "node_rank=${SLURM_NODEID}  # MISTAKE",
        "node_rank='${SLURM_NODEID}'",
    ),
    "one GPU per task": (
        "invalid device ordinal",
        f"#SBATCH --gpus-per-task=1  MISTAKE\nsrun {FLAGS} python by_local_rank.py",
        f"#SBATCH --gpus-per-task=1\nsrun {FLAGS} python by_count.py",
    ),
    "one GPU per task, on the srun line": (
        "--gpus-per-node",
        f"srun {FLAGS} --gpus-per-task=1 python by_local_rank.py  # MISTAKE",
        f"srun {FLAGS} --gpus-per-task=4 python by_local_rank.py",
    ),
    "devices": (
        "Slurm has chosen",
        "export CUDA_VISIBLE_DEVICES=0,1,2,3  # MISTAKE",
        "echo CUDA_VISIBLE_DEVICES=0\nexport CUDA_VISIBLE_DEVICES=\n# CUDA_VISIBLE_DEVICES=0",
    ),
    "port": (
        "port 29500",
        "export MASTER_PORT=29500  # MISTAKE",
        "MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))",
    ),
    "port by default": (
        "port 29500",
        "MASTER_PORT=${MASTER_PORT:-29500}  # MISTAKE",
        "MASTER_PORT=${MASTER_PORT:-$port}",
    ),
    "port of the rendezvous": (
        "port 29400",
        f'srun {FLAGS} torchrun --rdzv-endpoint="$host:29400" train.py  # MISTAKE',
        f'srun {FLAGS} torchrun --rdzv-endpoint="$host:$port" train.py',
    ),
    "address from a file": (
        "from /etc/hosts",
        'MASTER_ADDR=$(grep "$(hostname)" /etc/hosts | cut -f 1)  # MISTAKE',
        "hosts=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\")\nMASTER_ADDR=${hosts%%$'\\n'*}",
    ),
    "address from hostname": (
        "hostname --ip-address",
        f"ip=$(hostname --ip-address)\nsrun {FLAGS} torchrun --rdzv-endpoint=$ip:$port train.py  # "
        "MISTAKE",
        f"ip=$(hostname)\nsrun {FLAGS} torchrun --rdzv-endpoint=$ip:$port train.py",
    ),
    "localhost": (
        "localhost",
        "export MASTER_ADDR=localhost  # MISTAKE",
        "#SBATCH --nodes=1\nMASTER_ADDR=localhost",
    ),
    "cpus": (
        "do not hand it on",
        f"#SBATCH --cpus-per-task=8\nsrun {FLAGS} python -c 'import train'  # MISTAKE",
        f'#SBATCH --cpus-per-task=8\nsrun {FLAGS} ${{X:+--cpus-per-task="$X"}} python a.py\nsrun '
        "-K -c 8 python a.py",
    ),
    "cpus by a variable": (
        "do not hand it on",
        f"#SBATCH -c 8\nsrun {FLAGS} ./train.sh  # MISTAKE",
        f"#SBATCH -c 8\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun {FLAGS} ./train.sh",
    ),
    "kill on bad exit": (
        "--kill-on-bad-exit=1",
        'srun \\\n  python train.py "$@"  # MISTAKE-1',
        "options='-K --label'\nsrun $options python train.py\nsrun hostname\nsrun --ntasks=1 "
        "python prepare.py",
    ),
    "kill on bad exit behind a function": (
        "--kill-on-bad-exit=1",
        'run_and_requeue srun --wait=60 python "$@"  # MISTAKE',
        f'run_and_requeue srun {FLAGS} python "$@"\necho "type srun python train.py"',
    ),
    "pipe": (
        "set -o pipefail",
        f"set -eu\nsrun {FLAGS} python train.py 2>&1 | tee log  # MISTAKE",
        f"set -euo pipefail\nsrun {FLAGS} python train.py 2>&1 | tee log",
    ),
    "pipe of another command": (
        "set -o pipefail",
        "torchrun train.py | tee log  # MISTAKE",
        "#SBATCH -N 1\nnvidia-smi | tee log\ntorchrun train.py >log 2>&1 || exit 1\necho 'torchrun "
        "train.py | tee log'",
    ),
    "another exit status": (
        "the status is echo's, not srun's",
        f"srun {FLAGS} python train.py  # MISTAKE\necho Done",
        f"set -e\nsrun {FLAGS} python train.py\necho Done",
    ),
    "exit 0": (
        "the status is exit's, not torchrun's",
        "torchrun train.py; exit 0  # MISTAKE",
        f"if true; then\n  srun {FLAGS} python train.py\nfi\nexit",
    ),
    "or true": (
        "|| true takes the place",
        f"set -e\nsrun {FLAGS} python train.py || true  # MISTAKE\necho Done",
        f"srun {FLAGS} python train.py || {{ echo Failed; exit 1; }}",
    ),
    "head": (
        "SIGPIPE",
        "set -o pipefail\nMASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)  "
        "# MISTAKE",
        "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
    ),
    "trap": (
        "add & and wait",
        f"trap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun {FLAGS} python train.py  # MISTAKE",
        f"trap 'kill -USR1 $srun_pid' USR1\nsrun {FLAGS} python train.py &\n{WAIT}",
    ),
    "trap that does something": (
        "add & and wait",
        f"trap 'touch STOP' USR1 TERM\nsrun {FLAGS} python train.py  # MISTAKE",
        f"#SBATCH --signal=USR1@120\ntrap : USR1 TERM\nsrun {FLAGS} python train.py",
    ),
    "trap and torchrun": (
        "torchrun in the foreground",
        "trap save SIGTERM\ntorchrun train.py  # MISTAKE",
        "#SBATCH --nodes=1\ntrap cleanup EXIT\ntrap '' TERM\ntorchrun train.py",
    ),
    "waited for once": (
        "wait ends when the trap has run",
        f"trap 'touch STOP' USR1\nsrun {FLAGS} python train.py &  # MISTAKE\nwait",
        f"trap 'touch STOP' USR1\nsrun {FLAGS} python train.py &\n{WAIT}",
    ),
    "no wait": (
        "add wait",
        f"srun {FLAGS} python train.py &  # MISTAKE",
        f"srun {FLAGS} python train.py &\nwait $!",
    ),
    "signal to the ranks": (
        "--signal=B:USR1",
        f"#SBATCH --signal=USR1@120  MISTAKE\ntrap requeue USR1\nsrun {FLAGS} python train.py "
        "&\nwait",
        f"#SBATCH --signal=B:USR1@120\ntrap requeue USR1\nsrun {FLAGS} python train.py &\nwait",
    ),
    "torchrun and USR1": (
        "kills torchrun",
        f"#SBATCH --signal=USR1@120\nsrun {FLAGS} torchrun train.py  # MISTAKE",
        f"#SBATCH --signal=TERM@120\nsrun {FLAGS} torchrun a.py\nsrun {FLAGS} bash -c 'exec "
        "torchrun b.py'",
    ),
    "a sentence that names srun and torchrun": (
        "--kill-on-bad-exit=1",
        'note "srun starts python" hard\nbash -c "cd code && srun python train.py"  # MISTAKE',
        '#SBATCH --signal=USR1@120\necho "srun starts torchrun everywhere, then torchrun the '
        'ranks"',
    ),
    "torchrun and USR1, behind a script": (
        "kills torchrun",
        f"#SBATCH --signal=USR1@120\nsrun {FLAGS} ./hears.sh torchrun train.py  # MISTAKE",
        f"#SBATCH --signal=USR1@120\nsrun {FLAGS} ./ignores.sh torchrun train.py",
    ),
    "torchrun and USR1 handed on": (
        "kills torchrun",
        f"trap 'kill -USR1 $pid' USR1\nsrun {FLAGS} torchrun train.py &  # MISTAKE\npid=$!\nwait",
        f"#SBATCH --signal=B:USR1@120\ntrap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun {FLAGS} "
        "torchrun a.py &\nwait",
    ),
    "a shell in between": (
        "a shell between srun and python",
        f"srun {FLAGS} bash -c 'export RANK=$SLURM_PROCID; python train.py'  # MISTAKE",
        f"srun {FLAGS} bash -c 'export RANK=$SLURM_PROCID; exec python train.py'",
    ),
    "a shell in between, in a file": (
        "a shell between srun and torchrun",
        f"srun {FLAGS} ./stays.sh  # MISTAKE",
        f"srun {FLAGS} ./hears.sh python train.py",
    ),
    "nodes typed twice": (
        "--nnodes 2 repeats",
        f"srun {FLAGS} torchrun --nnodes 2 --rdzv-endpoint=$host:$port train.py  # MISTAKE",
        f"srun {FLAGS} torchrun --nnodes $SLURM_NNODES --rdzv-endpoint=$host:$port train.py",
    ),
    "nodes typed twice for srun": (
        "srun -N 2 repeats",
        f"srun -N 2 {FLAGS} python train.py  # MISTAKE",
        f"srun {FLAGS} python train.py -N 2x",
    ),
    "GPUs typed twice": (
        "GPUS_PER_NODE=4",
        "GPUS_PER_NODE=4  # MISTAKE",
        "GPUS_PER_NODE=$SLURM_GPUS_ON_NODE",
    ),
    "world size typed twice": (
        "WORLD_SIZE=8",
        "WORLD_SIZE=8  # MISTAKE",
        "WORLD_SIZE=${WORLD_SIZE:-8}",
    ),
}


def lint(folder: Path, body: str, capsys) -> list[str]:
    """The findings on a script of HEADER and `body`, less its path."""
    (folder / "present").mkdir(exist_ok=True)
    (folder / "by_local_rank.py").write_text("torch.cuda.set_device(local_rank)\n")
    (folder / "by_count.py").write_text(
        "torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else local)\n"
    )
    (folder / "hears.sh").write_text('exec "$@"\n')
    (folder / "stays.sh").write_text("source .venv/bin/activate\ntorchrun train.py\n")
    (folder / "ignores.sh").write_text("trap '' USR1\nexec \"$@\"\n")
    script = folder / "job.sh"
    script.write_text(HEADER + body + "\n")
    status = lint_sbatch.main([str(script)])
    found = [line.removeprefix(f"{script}:") for line in capsys.readouterr().out.splitlines()]
    assert status == bool(found)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_and_its_neighbour_is_not(name, tmp_path, capsys):
    says, bad, good = CASES[name]
    lines = (HEADER + bad).splitlines()
    (line,) = [i for i, text in enumerate(lines, 1) if "MISTAKE" in text]
    line -= int((re.search(r"MISTAKE-(\d)", bad) or [0, 0])[1])
    bad = re.sub(r"\s*(# )?MISTAKE(-\d)?", "", bad)
    found = [text for text in lint(tmp_path, bad, capsys) if says in text]
    assert len(found) == 1 and found[0].startswith(f"{line}: ") and found[0].count(": ") >= 2, found
    assert lint(tmp_path, good, capsys) == []


def test_ours_are_clean():
    ours = [
        *REPOSITORY.glob("*.sh"),
        *REPOSITORY.glob("aux/*.sh"),
        *REPOSITORY.glob("local/cluster/*.sh"),
    ]
    assert len(ours) >= 7
    done = run(sys.executable, "aux/lint_sbatch.py", *ours)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ours_are_not_clean_once_edited_wrongly(tmp_path):
    """The torchrun launcher with mistakes that its readers make; every one is found on its line."""
    text = (REPOSITORY / "launch_slurm_with_torchrun.sh").read_text()
    text = text.replace("#SBATCH --time", "# SBATCH --time").replace("%x_%j.out", "logs/%x_%j.out")
    text = text.replace("--kill-on-bad-exit=1 ", "").replace(
        "./torchrun.sh", "torchrun --nnodes=1 --nproc-per-node=2"
    )
    text = text.replace(
        "source ./env.sh", "source ./env.sh\nexport MASTER_PORT=29500 CUDA_VISIBLE_DEVICES=0,1"
    )
    script = tmp_path / "edited.sh"
    script.write_text(text)
    done = run(sys.executable, "aux/lint_sbatch.py", script)
    assert done.returncode == 1 and done.stderr == ""
    said = [
        re.fullmatch(rf"{re.escape(str(script))}:(\d+): (.+)", line)
        for line in done.stdout.splitlines()
    ]
    lines = text.splitlines()
    # Perhaps srun is below.
    found = {match[2].split(":")[0]: "\n".join(lines[int(match[1]) - 1 :][:2]) for match in said}
    for sentence, line in (
        ("take out|a comment and no directive", "# SBATCH --time"),
        ("no folder logs", "#SBATCH --output=logs"),
        ("port 29500", "export MASTER_PORT"),
        ("CUDA_VISIBLE_DEVICES hard-coded", "export MASTER_PORT"),
        ("--nnodes=1 on 2 nodes", "srun "),
        ("srun lets the others wait", "srun "),
        ("--nproc-per-node=2 repeats the header", "srun "),
    ):
        assert [line in text for said, text in found.items() if re.match(sentence, said)] == [
            True
        ], done.stdout
    assert len(said) == 7, done.stdout


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "empty").write_text("")
    done = run(
        sys.executable, "aux/lint_sbatch.py", tmp_path / "binary", tmp_path / "empty", "torchrun.sh"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for path in (tmp_path, tmp_path / "absent"):
        done = run(sys.executable, "aux/lint_sbatch.py", path, "torchrun.sh")
        assert done.returncode == 2 and done.stdout == ""
        assert re.fullmatch(rf"lint_sbatch.py: cannot read '{path}': [A-Z][a-z ]+\n", done.stderr)
    assert run(sys.executable, "aux/lint_sbatch.py").returncode == 2
