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
#SBATCH --cpus-per-gpu=8
#SBATCH --output=%x_%j.out
"""
FLAGS = "--kill-on-bad-exit=1"
FIRST = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
WAIT = 'srun_pid=$!\nwhile kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done'

# What the finding says; the header and the body of a script with the mistake, the line marked by
# MISTAKE; one without.
CASES = {
    "blank": (
        "begin it with #SBATCH",
        "# SBATCH --time=1:00:00  MISTAKE",
        "# SBATCH lines are read by Slurm",
    ),
    "late": (
        "after the first command",
        "cd /tmp\n#SBATCH --time=1:00:00  MISTAKE",
        "# a comment\n\n#SBATCH --time=1:00\ncd /tmp\ncat <<'EOF' >a.sh\n#SBATCH -n 1\nEOF\n"
        "cat <<\\EOF >b.sh\n#SBATCH -n 1\nEOF\necho "
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
    "job name with a slash": (
        "take the / out",
        "#SBATCH --job-name=a/b\n#SBATCH --output=%x.out  MISTAKE",
        "#SBATCH --job-name=a/b\n#SBATCH --output=%j.out",
    ),
    "GPUs twice": (
        "--gres=gpu beside --gpus-per-node",
        "#SBATCH --gres=gpu:4  MISTAKE",
        "#SBATCH --gres=nvme:100",
    ),
    "standalone": (
        "--standalone on 2 nodes",
        f"srun {FLAGS} torchrun --standalone train.py  # MISTAKE",
        f'srun {FLAGS} torchrun --nnodes="$SLURM_JOB_NUM_NODES" --rdzv-endpoint="$host:$port" '
        "train.py",
    ),
    "nnodes 1, in a variable of an array": (
        "--nnodes=1 on 2 nodes",
        'size="--nnodes=1"  # MISTAKE\nlauncher=(torchrun $size)\n'
        f'srun {FLAGS} \\\n  "${{launcher[@]}}" train.py',
        f'launcher=(torchrun --nnodes=1:2)\nsrun {FLAGS} \\\n  "${{launcher[@]}}" train.py',
    ),
    "no srun": (
        "python without srun, so it starts once, though the header asks for 8 tasks: srun python",
        "python prepare.py\npython -u train.py --epochs 3  # MISTAKE",
        f"python prepare.py\nsrun {FLAGS} python -u train.py --epochs 3",
    ),
    "no srun, but on several nodes": (
        "asks for 2 nodes",
        "#SBATCH --ntasks-per-node=1\nset -e\nsrun hostname\npython train.py  # MISTAKE",
        "#SBATCH --ntasks-per-node=1\npython -m venv .venv\npython -c 'import torch'\nset "
        "-e\nmpirun python train.py",
    ),
    "no srun before torchrun": (
        "so it starts once, though the header asks for 2 nodes: srun --ntasks-per-node=1 torchrun",
        'torchrun --nnodes="$SLURM_NNODES" --rdzv-endpoint="$host:$port" train.py  # MISTAKE',
        '#SBATCH --nodes=1\ntorchrun --nproc-per-node=gpu train.py\nexec "$@"',
    ),
    "rank variable": (
        "SLURM_PROCID expanded in the batch shell",
        f'srun {FLAGS} bash -c "python train.py --rank $SLURM_PROCID"  # MISTAKE',
        f'echo "rank $SLURM_PROCID"  # $SLURM_LOCALID\nsrun {FLAGS} bash -c \'python train.py '
        "--rank $SLURM_PROCID'\n"
        f'srun {FLAGS} bash -c "python train.py --rank \\$SLURM_PROCID"',
    ),
    "rank by the order of tasks": (
        "RANK is SLURM_PROCID, but with a topology plugin",
        f"{FIRST}\nsrun {FLAGS} bash -c 'RANK=$SLURM_PROCID exec python train.py'  # MISTAKE",
        f"{FIRST}\necho 'RANK=$SLURM_PROCID'\n"
        f"srun -N1 {FLAGS} bash -c 'RANK=$SLURM_PROCID exec python a.py'\n"
        f"srun {FLAGS} bash -c 'RANK=$((SLURM_NODEID * 4 + SLURM_LOCALID)) exec python a.py'",
    ),
    "rank by the order of tasks, in a file": (
        "all wait for it: SLURM_NODEID x tasks per node + SLURM_LOCALID",
        f"{FIRST}\nsrun {FLAGS} ./by_task.sh python train.py  # MISTAKE",
        f"export MASTER_ADDR=${{SITE_ADDR}}\nsrun {FLAGS} ./by_task.sh python train.py",
    ),
    "node rank by the order of tasks": (
        "--node_rank is SLURM_PROCID, but with a topology plugin task 0 need not be on the first "
        "node, and all wait for it: SLURM_NODEID",
        f'{FIRST}\nsrun {FLAGS} bash -c "exec torchrun --nnodes=2 --node_rank=\\$SLURM_PROCID '
        '--master_addr=$MASTER_ADDR train.py"  # MISTAKE',
        f"{FIRST}\nsrun {FLAGS} bash -c 'exec torchrun --nnodes=2 --node_rank=$SLURM_NODEID "
        "--master_addr=$MASTER_ADDR train.py'\n"
        f"srun {FLAGS} bash -c 'exec torchrun --node-rank $SLURM_PROCID --rdzv-backend=c10d a.py'",
    ),
    "node rank by the order of tasks, as a variable": (
        "NODE_RANK is SLURM_PROCID, but with a topology plugin task 0 need not be on the first "
        "node, and all wait for it: SLURM_NODEID",
        f"{FIRST}\nsrun {FLAGS} bash -c 'NODE_RANK=$SLURM_PROCID exec python train.py'  # MISTAKE",
        f"{FIRST}\nsrun {FLAGS} bash -c 'NODE_RANK=$SLURM_NODEID exec python train.py'",
    ),
    "rank by the order of tasks, as an option": (
        "--rank is SLURM_PROCID",
        f"{FIRST}\nsrun {FLAGS} bash -c 'exec python train.py --rank \"$SLURM_PROCID\"'  # MISTAKE",
        f"{FIRST}\nsrun {FLAGS} bash -c 'exec python train.py --seed \"$SLURM_PROCID\"'",
    ),
    "machine rank by the order of tasks": (
        "--machine_rank is SLURM_PROCID",
        "head=$(scontrol show hostnames $SLURM_NODELIST | head -n 1)\n"
        f"srun {FLAGS} bash -c 'exec accelerate launch --machine_rank $SLURM_PROCID "
        "--main_process_ip $head train.py'  # MISTAKE",
        f"srun {FLAGS} bash -c 'exec accelerate launch --machine_rank $SLURM_PROCID a.py'",
    ),
    "restarts by torchrun": (
        "--max-restarts=3 on 2 nodes with a static rendezvous, where",
        f'srun {FLAGS} torchrun --nnodes=2 --max-restarts=3 --node-rank="$SLURM_NODEID" '
        '--master-addr="$A" train.py  # MISTAKE',
        f"srun {FLAGS} torchrun --nnodes=2 --max-restarts=0 --master-addr=$A train.py\n"
        f"srun {FLAGS} torchrun --nnodes=2 --max-restarts=3 --rdzv-backend=c10d a.py\n"
        f"srun {FLAGS} -N 1 torchrun --max-restarts=3 --master-addr=$A a.py",
    ),
    "restarts by torchrun, in a variable": (
        "--max-restarts=2 on 2 nodes with a static rendezvous",
        'start="torchrun --max_restarts 2 --rdzv_backend=static --rdzv_endpoint=$A:$P"  # MISTAKE\n'
        f"srun {FLAGS} $start train.py",
        'start="torchrun --max_restarts 2 --rdzv_backend c10d --rdzv_endpoint=$A:$P"\n'
        f"srun {FLAGS} $start train.py",
    ),
    "one GPU per task": (
        "invalid device ordinal",
        f"#SBATCH --gpus-per-task=1  MISTAKE\nsrun {FLAGS} python by_local_rank.py",
        f"#SBATCH --gpus-per-task=1\nsrun {FLAGS} python by_count.py",
    ),
    "devices": (
        "Slurm has chosen",
        "export CUDA_VISIBLE_DEVICES=0,1,2,3  # MISTAKE",
        "echo CUDA_VISIBLE_DEVICES=0\nexport CUDA_VISIBLE_DEVICES=\n# CUDA_VISIBLE_DEVICES=0",
    ),
    "few CPUs for a GPU": (
        "fewer than 2 CPUs for each GPU",
        f"#SBATCH --cpus-per-gpu=1  MISTAKE\nsrun {FLAGS} python train.py",
        f"#SBATCH --cpus-per-gpu=1  # EDIT: your site's number\nsrun {FLAGS} python train.py",
    ),
    "port": (
        "port 29500",
        "export MASTER_PORT=29500  # MISTAKE",
        "MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))",
    ),
    "port, unless it is set": (
        "port 29400",
        "export MASTER_PORT=${MASTER_PORT:-29400}  # MISTAKE",
        "export MASTER_PORT=${MASTER_PORT:-$((61000 + 10#$SLURM_JOB_ID % 4536))}",
    ),
    "port, for torchrun": (
        "port 29500",
        f"srun {FLAGS} torchrun --nnodes=2 --master_port 29500 train.py  # MISTAKE",
        f'srun {FLAGS} torchrun --nnodes=2 --master_port "$MASTER_PORT" train.py',
    ),
    "port, for accelerate": (
        "port 29500",
        f"srun {FLAGS} accelerate launch --main_process_port=29500 train.py  # MISTAKE",
        f"srun {FLAGS} accelerate launch --main_process_port=$MASTER_PORT train.py",
    ),
    "port, of an endpoint": (
        "port 29500",
        f"srun {FLAGS} torchrun --nnodes=2 --rdzv_endpoint=$head:29500 train.py  # MISTAKE",
        f"srun {FLAGS} torchrun --nnodes=2 --rdzv_endpoint=$head:0 train.py",
    ),
    "port, of an endpoint behind a blank": (
        "port 29500",
        f"srun {FLAGS} torchrun --nnodes=2 --rdzv-endpoint ${{hosts[0]}}:29500 train.py  # MISTAKE",
        f"srun {FLAGS} torchrun --nnodes=2 --rdzv-endpoint ${{hosts[0]}}:$port train.py",
    ),
    "address from a file": (
        "from /etc/hosts",
        'MASTER_ADDR=$(grep "$(hostname)" /etc/hosts | cut -f 1)  # MISTAKE',
        "hosts=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\")\nMASTER_ADDR=${hosts%%$'\\n'*}",
    ),
    "address of one of several networks, but not on Frontier": (
        "hostname -i",
        "MASTER_ADDR=$(hostname -i)  # MISTAKE",
        "module load rccl-net-plugin\nMASTER_ADDR=$(hostname -i)",
    ),
    "localhost": (
        "localhost",
        "export MASTER_ADDR=localhost  # MISTAKE\n#SBATCH --nodes=1",
        "#SBATCH --nodes=1\ntorchrun --rdzv-endpoint=localhost:0 train.py",
    ),
    "cpus": (
        "do not hand it on",
        f"#SBATCH --cpus-per-task=8\nsrun {FLAGS} python -c 'import train'  # MISTAKE",
        f'#SBATCH --cpus-per-task=8\nsrun {FLAGS} ${{X:+--cpus-per-task="$X"}} python a.py\nsrun '
        "-K -c 8 python a.py",
    ),
    "cpus, behind a shell": (
        "do not hand it on",
        "#SBATCH --cpus-per-task=8\nsrun -K bash -c 'mkdir -p a && exec python a.py'  # MISTAKE",
        f"#SBATCH --cpus-per-task=8\nsrun --ntasks=2 bash -c \\\n  'mkdir -p $TMP/a && cp "
        f"/b.tar.gz $TMP/a'\nsrun {FLAGS} -c 8 python a.py",
    ),
    "no srun, but one that copies": (
        "python without srun, so it starts once",
        "srun bash -c 'mkdir -p /tmp/a && cp b /tmp/a'\npython train.py  # MISTAKE",
        f"srun bash -c 'mkdir -p /tmp/a && cp b /tmp/a'\nsrun {FLAGS} python train.py",
    ),
    "kill on bad exit": (
        "--kill-on-bad-exit=1",
        'srun python train.py "$@"  # MISTAKE',
        "source site.sh\nsrun $SITE_OPTIONS python train.py\n"
        'fail=-K\nmore="--label $fail"\nsrun $more python train.py\n'
        "srun hostname\nsrun --ntasks=1 python prepare.py",
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
    "pipe behind a timeout": (
        "set -o pipefail",
        "timeout -s INT --kill-after 5 10m torchrun train.py | tee log  # MISTAKE",
        "#SBATCH -N 1\nset -o pipefail\ntimeout -k 5 10m torchrun train.py | tee log",
    ),
    "pipe with another status": (
        "set -o pipefail",
        f"srun {FLAGS} python train.py | tee log  # MISTAKE\nexit $?",
        f'srun {FLAGS} python train.py | tee log\nexit "${{PIPESTATUS[0]}}"',
    ),
    "another exit status, after a block": (
        "the status is rm's, not srun's",
        f"if true; then\n  srun {FLAGS} python train.py  # MISTAKE\nfi\nrm -r /tmp/data",
        f"if true; then\n  srun {FLAGS} python train.py\nfi",
    ),
    "another exit status": (
        "the status is echo's, not srun's",
        f"srun {FLAGS} python train.py  # MISTAKE\necho Done",
        f"set -e\nsrun {FLAGS} python train.py\necho Done",
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
    "trap for the time after": (
        "add & and wait",
        f"trap 'told=1' USR1\nsrun {FLAGS} python train.py  # MISTAKE",
        f"#SBATCH --requeue\ntrap 'told=1' TERM\nsrun {FLAGS} python train.py",
    ),
    "waited for once": (
        "wait ends when the trap has run",
        f"trap 'touch STOP' USR1\nsrun {FLAGS} python train.py &  # MISTAKE\nwait",
        f"trap 'touch STOP' USR1\nsrun {FLAGS} python train.py &\nwait\nwait",
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
    "a sentence that names srun and torchrun": (
        "--kill-on-bad-exit=1",
        'note "srun starts python" hard\nbash -c "cd code && srun python train.py"  # MISTAKE',
        '#SBATCH --signal=USR1@120\necho "srun starts torchrun everywhere, then torchrun the '
        'ranks"',
    ),
    "torchrun and USR1": (
        "USR1 kills torchrun",
        "#SBATCH --signal=USR1@120\n"
        f"srun {FLAGS} torchrun --signals-to-handle=SIGTERM,SIGUSR2 train.py  # MISTAKE",
        "#SBATCH --signal=USR1@120\n"
        f"srun {FLAGS} torchrun --signals-to-handle=SIGTERM,SIGUSR1 train.py",
    ),
    "torchrun and USR1 handed on": (
        "USR1 kills torchrun",
        "#SBATCH --signal=TERM@120\ntrap 'kill -USR1 $pid' USR1\n"
        f"srun {FLAGS} torchrun train.py &  # MISTAKE\npid=$!\nwait",
        f"#SBATCH --signal=B:USR1@120\ntrap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun {FLAGS} "
        "torchrun a.py &\nwait",
    ),
    "a shell in between": (
        "a shell between srun and python",
        f"srun {FLAGS} bash -c 'export RANK=$SLURM_PROCID; python train.py'  # MISTAKE",
        f"srun {FLAGS} bash -c 'export RANK=$SLURM_PROCID; exec python train.py'",
    ),
    "a shell in between, of a single command": (
        "a shell between srun and python",
        f"srun {FLAGS} sh -c 'python train.py'  # MISTAKE",
        f"srun {FLAGS} bash -c 'python train.py'\nsrun {FLAGS} ./hears.sh -c 'python train.py'",
    ),
    "a shell in between, of a redirection": (
        "a shell between srun and python",
        f"srun {FLAGS} bash -euo pipefail -c 'python train.py >$SLURM_PROCID'  # MISTAKE",
        f"srun {FLAGS} bash -euo pipefail -c 'exec python train.py >$SLURM_PROCID'",
    ),
    "a shell in between, in a file": (
        "a shell between srun and torchrun",
        f"srun {FLAGS} ./stays.sh  # MISTAKE",
        f"srun {FLAGS} ./hears.sh python train.py",
    ),
}


FILES = {
    "by_local_rank.py": "torch.cuda.set_device(local_rank)\n",
    "by_count.py": "torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else local)\n",
    "by_task.sh": 'export RANK=$SLURM_PROCID\nexec "$@"\n',
    "hears.sh": 'exec "$@"\n',
    "stays.sh": "source .venv/bin/activate\ntorchrun train.py\n",
}


def lint(folder: Path, body: str, capsys) -> list[str]:
    """The findings on a script of HEADER and `body`, less its path."""
    (folder / "present").mkdir(exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_text(content)
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
    [line] = [i for i, text in enumerate(lines, 1) if "MISTAKE" in text]
    bad = re.sub(r"\s*(# )?MISTAKE", "", bad)
    found = [text for text in lint(tmp_path, bad, capsys) if says in text]
    assert len(found) == 1 and found[0].startswith(f"{line}: "), found
    assert lint(tmp_path, good, capsys) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    {
        "--nodes=2 --gpus-per-node=8": "one CPU for each task",
        "--ntasks=4 --gpus-per-task=1": "one CPU for each task",
        "--nodes=2 --gres=gpu:a100:4 --cpus-per-task=7": "fewer than 2 CPUs",
        "--gpus=4 --cpus-per-task=8": "",
        "--ntasks-per-node=8 --gres=gpu:a100:4,nvme:100": "",
        "--gpus-per-node=a100 --cpus-per-task=2": "",
        "--gpus-per-node=8 --exclusive": "",
        "--gres=nvme:100": "",
    }.items(),
)
def test_cpus_are_counted_for_each_gpu(asked, says, tmp_path, capsys):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {asked}\nsrun -K -c 1 python train.py\n")
    lint_sbatch.main([str(script)])
    found = capsys.readouterr().out
    assert found.startswith(f"{script}:2: {says}") if says else not found


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("--ntasks=8", "asks for 8 tasks: srun python"),
        ("-n 8", "asks for 8 tasks: srun python"),
        ("--nodes=2", "asks for 2 nodes: srun python"),
        ("--ntasks-per-node=4", "asks for 4 tasks: srun python"),
        ("--ntasks=1", ""),
    ],
)
def test_tasks_are_counted(asked, says, tmp_path, capsys):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {asked}\npython train.py\n")
    assert lint_sbatch.main([str(script)]) == bool(says)
    assert says in capsys.readouterr().out


def test_a_rank_variable_has_one_finding(tmp_path, capsys):
    """In double quotes it is 0 in all tasks, so their order does not matter."""
    double = f'{FIRST}\nsrun {FLAGS} bash -c "RANK=$SLURM_PROCID exec python train.py"'
    [found] = lint(tmp_path, double, capsys)
    assert "expanded in the batch shell" in found


def test_restarts_of_a_torchrun_that_is_alone_have_another_finding(tmp_path, capsys):
    [found] = lint(tmp_path, f"srun {FLAGS} torchrun --standalone --max-restarts=3 a.py", capsys)
    assert "--standalone on 2 nodes" in found


def test_a_file_that_srun_starts_is_looked_at_by_itself(tmp_path, capsys):
    """It has no directives, and its own line is the mistake."""
    script = tmp_path / "start.sh"
    script.write_text(f"{FIRST}\nexport RANK=$SLURM_PROCID\nexec python train.py\n")
    lint_sbatch.main([str(script)])
    assert capsys.readouterr().out.startswith(f"{script}:2: RANK is SLURM_PROCID")


def test_the_folder_of_another_machine_is_not_looked_for(tmp_path, capsys):
    absent = "#SBATCH --output=/no_such_file_system/me/%j.out"
    assert lint(tmp_path, absent, capsys) == []
    [found] = lint(tmp_path, f"#SBATCH --output={tmp_path}/absent/%j.out", capsys)
    assert "no folder" in found


def test_what_cannot_be_looked_at_is_not_there(tmp_path, capsys):
    """A name that is too long for a file is one of several reasons."""
    name = 300 * "x"
    assert lint(tmp_path, f"srun -K python {name}.py\nsrun -K bash {name}.sh", capsys) == []
    [found] = lint(tmp_path, f"#SBATCH --output={name}/%j.out", capsys)
    assert "no folder" in found


def test_a_script_that_is_no_job_has_no_findings(tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text("export CUDA_VISIBLE_DEVICES=0\ntorchrun train.py | tee log\n")
    assert lint_sbatch.main([str(script)]) == 0
    script.write_text(script.read_text() + "echo $SLURM_JOB_ID\n")
    assert lint_sbatch.main([str(script)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_annotations_for_github(tmp_path, capsys):
    script = tmp_path / "50%,a:b.sh"
    script.write_text("#SBATCH --output=%j/%x.out\n")
    assert lint_sbatch.main(["--format=github", str(script)]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"::error file={tmp_path}/50%25%2Ca%3Ab.sh,line=1::no folder %25j for")


def test_the_hook_of_pre_commit_runs(tmp_path):
    """Without a Python of its own, so the file has to be executable."""
    hook = (REPOSITORY / ".pre-commit-hooks.yaml").read_text()
    entry, files = re.search(r"entry: (\S+)", hook)[1], re.search(r"files: (\S+)", hook)[1]
    assert re.search(files, "jobs/train.sbatch") and not re.search(files, "train.sh.py")
    (tmp_path / "job.sh").write_text("#SBATCH --output=absent/%j.out\n")
    done = run(REPOSITORY / entry, "job.sh", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("job.sh:1: no folder absent")


def test_ours_are_clean():
    ours = [
        *REPOSITORY.glob("*.sh"),
        *REPOSITORY.glob("aux/*.sh"),
        *REPOSITORY.glob("local/**/*.sh"),
    ]
    done = run(sys.executable, "aux/lint_sbatch.py", *ours)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "empty").write_text("")
    assert lint_sbatch.main([str(tmp_path / "binary"), str(tmp_path / "empty")]) == 0
    assert lint_sbatch.main([str(tmp_path / "absent")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(
        rf"lint_sbatch.py: cannot read '{tmp_path}/absent': [A-Z][a-z ]+\n", shown.err
    )
