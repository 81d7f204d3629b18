"""aux/lint_sbatch.py: each mistake is found on its line, what is nearly it and right is not, and
ours are clean."""

import re
import sys
import time

import pytest

import lint_sbatch
from slurm import REPOSITORY, run, stand_ins

HEADER = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --output=%x_%j.out
"""

# Lines below HEADER that are mistakes by themselves. Behind #! is what the finding says.
MISTAKES = r"""
# SBATCH --time=1:00:00  #! begin it with #SBATCH
#SBTACH --nodes=2  #! begin it with #SBATCH
#BATCH -n 4  #! begin it with #SBATCH
#SBATCH --time=2:00  #! --time=2:00 is 2 minutes: 2:00:00 for hours, or else --time=2
#SBATCH --job-name=$USER  #! does not expand
#SBATCH --error=gone/%j.err  #! no folder gone
#SBATCH --requeue  #! overwrites the log, with its last error: --open-mode=append
#SBATCH --gres=gpu:4  #! --gres=gpu beside --gpus-per-node
#SBATCH --gpus-per-task=1  #! invalid device ordinal
cd /tmp
#SBATCH --time=1:00:00  #! after the first command
export CUDA_VISIBLE_DEVICES=0,1,2,3  #! Slurm has chosen
export MASTER_PORT=29500  #! port 29500
export MASTER_PORT=${MASTER_PORT:-29400}  #! port 29400
MASTER_ADDR=$(grep "$(hostname)" /etc/hosts | cut -f 1)  #! from /etc/hosts
MASTER_ADDR=$(hostname -i)  #! hostname -i
MASTER_ADDR=localhost  #! localhost
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
python prepare.py
srun python by_local_rank.py "$@"  #! --kill-on-bad-exit=1
run_and_requeue srun --wait=60 python "$@"  #! --kill-on-bad-exit=1
note "srun starts python" hard
bash -c "cd code && srun python train.py"  #! --kill-on-bad-exit=1
srun -K torchrun --standalone train.py  #! --standalone on 2 nodes
size="--nnodes=1"  #! --nnodes=1 on 2 nodes
launcher=(torchrun $size)
srun -K \
  "${launcher[@]}" train.py
srun -K torchrun --nnodes=2 --master_port 29500 train.py  #! port 29500
srun -K accelerate launch --main_process_port=29500 train.py  #! port 29500
srun -K torchrun --nnodes=2 --rdzv_endpoint=$head:29500 train.py  #! port 29500
srun -K torchrun --nnodes=2 --rdzv-endpoint ${hosts[0]}:29500 train.py  #! port 29500
srun -K torchrun --nnodes=2 --max-restarts=3 --master-addr=$A a.py  #! --max-restarts=3 on 2 nodes
more="torchrun --max_restarts 2 --rdzv_backend=static --rdzv_endpoint=$A:$P"  #! -restarts=2 on 2
srun -K $more train.py
srun -K bash -c "python train.py --rank $SLURM_PROCID"  #! SLURM_PROCID expanded in the batch shell
srun -K bash -c 'RANK=$SLURM_PROCID exec python a.py'  #! RANK is SLURM_PROCID, but with a topology
srun -K bash -c 'exec python a.py --rank "$SLURM_PROCID"'  #! --rank is SLURM_PROCID
srun -K ./by_task.sh python a.py  #! for it: SLURM_NODEID x tasks per node + SLURM_LOCALID
srun -K bash -c "exec torchrun --nnodes=2 --node_rank=\$SLURM_PROCID a.py"  #! --node_rank is SLURM
srun -K bash -c 'NODE_RANK=$SLURM_PROCID exec python a.py'  #! all wait for it: SLURM_NODEID
srun -K bash -c 'exec accelerate launch --machine_rank $SLURM_PROCID a.py'  #! --machine_rank is SL
srun -K bash -c 'export RANK=$SLURM_PROCID; python a.py'  #! a shell between srun and python
srun -K sh -c 'python train.py'  #! a shell between srun and python
srun -K bash -euo pipefail -c 'python train.py >$SLURM_PROCID'  #! a shell between srun and python
srun -K ./stays.sh  #! a shell between srun and torchrun
srun -K python train.py 2>&1 | tee log  #! set -o pipefail
timeout -s INT --kill-after 5 10m torchrun train.py | tee log  #! set -o pipefail
srun -K python train.py | tee log  #! set -o pipefail
exit
set -o pipefail
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)  #! SIGPIPE
"""
# Lines that are nearly those, and right.
NEIGHBOURS = r"""
# SBATCH lines are read by Slurm
##SBATCH --nodes=2
#BSUB -n 2
#SCRATCH - is full
#SBATCH --job-name=%u  # $USER
#SBATCH --error=present/%j.err
#SBATCH --gres=nvme:100

#SBATCH --time=30:00
set -euo pipefail
cat <<'EOF' >a.sh
#SBATCH -n 1
EOF
cat <<\EOF >b.sh
#SBATCH -n 1
EOF
echo '
#SBATCH -n 2'
export CUDA_VISIBLE_DEVICES=
echo CUDA_VISIBLE_DEVICES=0  # CUDA_VISIBLE_DEVICES=0
MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
export MASTER_PORT=${MASTER_PORT:-$((61000 + 10#$SLURM_JOB_ID % 4536))}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
python -m venv .venv
python -c 'import torch'
srun bash -c 'mkdir -p /tmp/a && cp b /tmp/a'
srun hostname
srun --ntasks=1 python prepare.py
source site.sh
srun $SITE_OPTIONS python train.py
fail=-K
more="--label $fail"
srun $more python train.py
run_and_requeue srun --kill-on-bad-exit=1 python "$@"
echo "type srun python train.py | tee log"
echo "srun starts torchrun everywhere, then torchrun the ranks"
srun -K torchrun --nnodes="$SLURM_JOB_NUM_NODES" --rdzv-endpoint="$host:$port" train.py
launcher=(torchrun --nnodes=1:2)
srun -K \
  "${launcher[@]}" train.py
srun -K torchrun --nnodes=2 --master_port "$MASTER_PORT" train.py
srun -K accelerate launch --main_process_port=$MASTER_PORT train.py
srun -K torchrun --nnodes=2 --rdzv_endpoint=$head:0 train.py
srun -K torchrun --nnodes=2 --rdzv-endpoint ${hosts[0]}:$port train.py
srun -K torchrun --nnodes=2 --max-restarts=0 --master-addr=$A train.py
srun -K torchrun --nnodes=2 --max-restarts=3 --rdzv-backend=c10d a.py
srun -K -N 1 torchrun --max-restarts=3 --master-addr=$A a.py
start="torchrun --max_restarts 2 --rdzv_backend c10d --rdzv_endpoint=$A:$P"
srun -K $start train.py
echo "rank $SLURM_PROCID, RANK=$SLURM_PROCID"  # $SLURM_LOCALID
srun -K bash -c 'python train.py --seed $SLURM_PROCID'
srun -K bash -c "python train.py --seed \$SLURM_PROCID"
srun -N1 -K bash -c 'RANK=$SLURM_PROCID exec python a.py'
srun -K bash -c 'RANK=$((SLURM_NODEID * 4 + SLURM_LOCALID)) exec python a.py'
srun -K bash -c 'exec torchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$A a.py'
srun -K bash -c 'exec torchrun --node-rank $SLURM_PROCID --rdzv-backend=c10d a.py'
srun -K bash -c 'NODE_RANK=$SLURM_NODEID exec python train.py'
srun -K bash -c 'export SEED=$SLURM_PROCID; exec python train.py'
srun -K bash -euo pipefail -c 'exec python train.py >$SLURM_PROCID'
srun -K ./hears.sh -c 'python train.py'
nvidia-smi | tee log
srun -K python train.py 2>&1 | tee log
timeout -k 5 10m srun -K python train.py | tee log
"""
# What depends on the rest of the script: the name of a case, its mistakes, --, and a neighbour.
CASES = r"""
== the log's folder, by short options
#SBATCH -o absent/%j.out  #! no folder absent
#SBATCH -e gone/%j.err  #! no folder gone
== a job's name with a slash
#SBATCH --job-name=a/b
#SBATCH --output=%x.out  #! take the / out
--
#SBATCH --job-name=a/b
#SBATCH --output=%j.out
== minutes, by a short option
#SBATCH -t 24:00  #! --time=24:00 is 24 minutes: 24:00:00 for hours
--
#SBATCH -t 24:00:00
== no srun
python prepare.py
srun bash -c 'mkdir -p /tmp/a && cp b /tmp/a'
python -u train.py  #! though the header asks for 8 tasks: srun python
--
python prepare.py
srun -K python train.py
== no srun, but on several nodes
#SBATCH --ntasks-per-node=1
set -e
srun hostname
python train.py  #! asks for 2 nodes
--
#SBATCH --ntasks-per-node=1
mpirun python train.py
== no srun on one node
nvidia-smi | tee log
torchrun train.py | tee log  #! set -o pipefail
--
#SBATCH --nodes=1
MASTER_ADDR=localhost
nvidia-smi | tee log
torchrun --rdzv-endpoint=localhost:0 train.py >log 2>&1 || exit 1
exec "$@"
== tasks that meet elsewhere
hosts=$(scontrol show hostnames $SLURM_NODELIST)
srun -K ./by_task.sh python a.py --master_addr ${hosts[0]}  #! RANK is SLURM_PROCID
--
export MASTER_ADDR=${SITE_ADDR}
srun -K ./by_task.sh python train.py
== one GPU per task
--
#SBATCH --gpus-per-task=1
srun -K python by_count.py
== few CPUs for a GPU
#SBATCH --cpus-per-task=1  #! fewer than 2 CPUs for each GPU
srun -K python train.py
--
#SBATCH --cpus-per-task=1  # EDIT: your site's number
srun -K python train.py
== CPUs by GPU
#SBATCH --cpus-per-gpu=8  #! refuse (Requested node configuration is not available): --cpus-per-task
== an address of one of several networks, but not on Frontier
--
module load rccl-net-plugin
MASTER_ADDR=$(hostname -i)
== a pipe's status
--
srun -K python train.py | tee log
exit "${PIPESTATUS[0]}"
== another status
if true; then
  srun -K python train.py  #! the job's status is that of srun in line 10, and a failed job ends
fi
srun rm -r /tmp/data
--
if true; then
  srun -K python train.py
fi
== another status, but for set -e
srun -K python train.py  #! the job's status is that of echo in line 8
echo Done
--
set -e
srun -K python train.py
echo Done
== head without pipefail
--
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
== trap
trap 'scontrol requeue $SLURM_JOB_ID' USR1
srun -K python train.py  #! add & and wait
--
trap 'kill -USR1 $srun_pid' USR1
srun -K python train.py &
srun_pid=$!
while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done
== trap for the time after
trap 'told=1' USR1
srun -K python train.py  #! add & and wait
--
#SBATCH --requeue
#SBATCH --open-mode=append
trap 'told=1' TERM
srun -K python train.py
== waited for once
trap 'touch STOP' USR1
srun -K python train.py &  #! wait ends when the trap has run
wait
--
trap 'touch STOP' USR1
srun -K python train.py &
wait
wait
== no wait
srun -K python train.py &  #! add wait
--
srun -K python train.py &
wait $!
== torchrun and USR1
#SBATCH --signal=USR1@120
srun -K torchrun --signals-to-handle=SIGTERM,SIGUSR2 train.py  #! USR1 kills torchrun
--
#SBATCH --signal=USR1@120
srun -K torchrun --signals-to-handle=SIGTERM,SIGUSR1 train.py
== torchrun and USR1 handed on
#SBATCH --signal=TERM@120
trap 'kill -USR1 $pid' USR1
srun -K torchrun train.py &  #! USR1 kills torchrun
pid=$!
wait
--
#SBATCH --signal=B:USR1@120
trap 'scontrol requeue $SLURM_JOB_ID' USR1
srun -K torchrun a.py &
wait
== a sourced trap
#SBATCH --signal=B:USR1@60  #! USR1 ends this shell, which has no trap for it
source .venv/bin/activate
srun -K python train.py
--
#SBATCH --signal=B:USR1@60
source ./traps.sh
srun -K python train.py
== srun in Slurm 23.02
srun -K python -c 'import train'  #! do not hand it on
srun -K bash -c 'mkdir -p a && exec python a.py'  #! do not hand it on
--
srun -K ${X:+--cpus-per-task="$X"} python a.py
srun -K -c 8 python a.py
srun --ntasks=2 bash -c \
  'mkdir -p $TMP/a && cp /b.tar.gz $TMP/a'
"""
FILES = {
    "by_local_rank.py": "torch.cuda.set_device(local_rank)\n",
    "by_count.py": "torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else local)\n",
    "by_task.sh": 'export RANK=$SLURM_PROCID\nexec "$@"\n',
    "hears.sh": '# Für alle, in Latin-1\nexec "$@"\n',
    "stays.sh": "source .venv/bin/activate\ntorchrun train.py\n",
    "traps.sh": "trap requeue TERM USR1\n",
}
ALL = {"by themselves": (MISTAKES, NEIGHBOURS)}
for case in re.split("^== ", CASES, flags=re.M)[1:]:
    case_name, _, text = case.partition("\n")
    ALL[case_name] = text.partition("--\n")[::2]


@pytest.fixture
def lint(tmp_path, capsys, monkeypatch):
    """The findings on a script, less its path, where Slurm is a current one, or of this version."""
    (tmp_path / "present").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, "latin-1")
    script = tmp_path / "job.sh"

    def findings(text: str, version: tuple[int, int] = (25, 11)) -> list[str]:
        monkeypatch.setattr(lint_sbatch, "slurm_version", lambda: version)
        script.write_text(text + "\n")
        status = lint_sbatch.main([str(script)])
        found = [line.removeprefix(f"{script}:") for line in capsys.readouterr().out.splitlines()]
        assert status == bool(found)
        return found

    return findings


@pytest.mark.parametrize("name", ALL)
def test_a_mistake_is_found_and_its_neighbour_is_not(name, lint):
    version = (23, 2) if "23.02" in name else (25, 11)
    bad, good = ALL[name]
    lines = [line.partition("  #! ")[::2] for line in (HEADER + bad).splitlines()]
    found = lint("\n".join(line for line, _ in lines), version)
    for number, (line, says) in enumerate(lines, 1):
        its = [text for text in found if text.startswith(f"{number}: ") and says in text]
        assert not says or len(its) == 1, (line, says, found)
    assert lint(HEADER + good, version) == []


@pytest.mark.parametrize(
    ("asked", "then", "says"),
    [
        ("USR1@120", "trap requeue USR1", "USR1 reaches the ranks, not this shell's trap"),
        ("SIGUSR1@120", "trap requeue SIGUSR1", "say --signal=B:USR1@..."),
        ("R:USR1", "trap requeue USR1", "USR1 reaches the ranks"),
        ("USR1@120", "", ""),
        ("B:USR1@120", "trap requeue USR1", ""),
        ("B:USR1@120", "trap 'rm -r \"$TMP\"' EXIT", "USR1 ends this shell"),
        ("B:SIGTERM@120", "", "TERM ends this shell"),
        ("B:SIGTERM@120", "trap '' SIGTERM", ""),
        ("B:TERM@300", "trap : TERM; srun -K python a.py", "TERM reaches this shell, which waits"),
        ("B:USR1@300", "trap '' SIGUSR1; srun -K python a.py", "not the ranks: --signal=USR1@..."),
        ("B:TERM@300", "trap : TERM", ""),
        ("TERM@300", "trap : TERM; srun -K python a.py", ""),
        ("RB:USR2", "exec >log; exec 2>&1", "USR2 ends this shell"),
        ("RB:USR2", "exec srun -K python train.py", ""),
    ],
)
def test_whom_a_signal_reaches(asked, then, says, lint):
    found = lint(f"{HEADER}#SBATCH --signal={asked}\n{then}\nsrun -K python train.py & wait; wait")
    assert len(found) == bool(says) and all(says in text for text in found), found


@pytest.mark.parametrize(
    ("asked", "command", "says"),
    [
        ("--nodes=2 --gpus-per-node=8", "srun -K", "2: one CPU for each task"),
        ("--ntasks=4 --gpus-per-task=1", "srun -K", "2: one CPU for each task"),
        ("--nodes=2 --gres=gpu:a100:4 --cpus-per-task=7", "srun -K", "2: fewer than 2 CPUs"),
        ("--gpus=4 --cpus-per-task=8", "srun -K", ""),
        ("--ntasks-per-node=8 --gres=gpu:a100:4,nvme:100", "srun -K", ""),
        ("--gpus-per-node=a100 --cpus-per-task=2", "srun -K", ""),
        ("--gpus-per-node=8 --exclusive", "srun -K", ""),
        ("--gres=nvme:100", "srun -K", ""),
        ("--ntasks=8", "", "asks for 8 tasks: srun python"),
        ("-n 8", "", "asks for 8 tasks: srun python"),
        ("--nodes=2", "", "asks for 2 nodes: srun python"),
        ("--ntasks-per-node=4", "", "asks for 4 tasks: srun python"),
        ("--nodes=2", "torchrun --rdzv-id=1", "2 nodes: srun --ntasks-per-node=1 torchrun"),
        ("--ntasks=1", "", ""),
    ],
)
def test_what_a_header_asks_for_is_counted(asked, command, says, lint):
    found = lint(f"#!/bin/bash\n#SBATCH {asked}\n{command} python train.py")
    assert len(found) == bool(says) and all(says in text for text in found), found


OURS = ["run_script.sh", *sorted(path.name for path in REPOSITORY.glob("launch_*.sh"))]


@pytest.mark.parametrize("launcher", OURS)
def test_a_signal_for_the_shell_of_our_launchers(launcher, lint):
    """Whose trap only gives the ranks time."""
    text = (REPOSITORY / launcher).read_text()
    text, count = re.subn("(?m)^##SBATCH --signal=", "#SBATCH --signal=B:", text)
    assert count == 1
    found = lint(text)
    assert len(found) == 1 and found[0].endswith("--signal=TERM@..."), found


BEFORE = ["!", "{", "if", "then", "elif", "else", "while", "until", "do", "time", "exec", "nohup"]


@pytest.mark.parametrize("before", BEFORE)
def test_what_may_stand_before_a_command(before, lint):
    [found] = lint(f"{HEADER}{before} srun -K python train.py | tee log")
    assert "a pipe hides the exit status" in found


@pytest.mark.parametrize("word", ["x", "ab/c+", "1", "-", '"a\\'])
def test_a_long_word(word, lint):
    """A file in base64 within a script, in a hook that runs at each commit."""
    begun = time.process_time()
    lint(f"{HEADER}srun -K python {word * (20_000 // len(word))}\nsrun -K python a.py &\nwait")
    assert time.process_time() - begun < 5, "seconds, and not minutes"


HOSTS = "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST)\n"
QUOTED = f'{HOSTS}srun -K bash -c "RANK=$SLURM_PROCID exec python a.py"'


@pytest.mark.parametrize(
    ("script", "says"),
    [
        # In double quotes it is 0 in all tasks, so their order does not matter.
        (HEADER + QUOTED, "8: SLURM_PROCID expanded in the batch shell"),
        (f"{HEADER}srun -K torchrun --standalone --max-restarts=3 a.py", "--standalone on 2 nodes"),
        # A file that srun starts has no directives, and its own line is the mistake.
        (f"{HOSTS}export RANK=$SLURM_PROCID\nexec python train.py", "2: RANK is SLURM_PROCID"),
    ],
)
def test_a_mistake_has_one_finding(script, says, lint):
    [found] = lint(script)
    assert says in found


@pytest.mark.parametrize(
    ("says", "version"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.0", (24, 11)), ("", (26, 5))],
)
def test_the_version_of_slurm(says, version, tmp_path, monkeypatch):
    """Without its configuration sbatch does not say it."""
    monkeypatch.setenv("PATH", f"{stand_ins(tmp_path, {'sbatch': f'echo {says}'})}:/usr/bin:/bin")
    assert lint_sbatch.slurm_version.__wrapped__() == version


def test_an_sbatch_that_hangs(commands_hang):
    """In a hook that runs at each commit."""
    assert lint_sbatch.slurm_version.__wrapped__() == (26, 5)


def test_folders_and_files_that_are_not_here(lint, tmp_path):
    """The folder of another machine is not looked for. What has too long a name is not there."""
    assert lint("#SBATCH --output=/no_such_file_system/me/%j.out") == []
    name = 300 * "x"
    assert lint(f"{HEADER}srun -K python {name}.py\nsrun -K bash {name}.sh") == []
    for folder in (name, f"{tmp_path}/absent"):
        [found] = lint(f"#SBATCH --output={folder}/%j.out")
        assert "no folder" in found


def test_a_script_whose_every_directive_is_misspelt(lint):
    """Is a job's nevertheless. Those of LSF are no mistakes."""
    [said] = lint("#!/bin/bash\n#SBTACH --nodes=2\npython a.py\n")
    assert said.startswith("2: ") and "begin it with #SBATCH" in said
    assert lint("#!/bin/bash\n#BSUB -n 4\npython a.py\n") == []


def test_a_script_that_is_no_job_has_no_findings(lint):
    script = "export CUDA_VISIBLE_DEVICES=0\ntorchrun train.py | tee log\n"
    assert lint(script) == []
    assert len(lint(script + "echo $SLURM_JOB_ID")) == 2


def test_the_hook_of_pre_commit_runs(tmp_path):
    """Without a Python of its own, so the file has to be executable."""
    hook = (REPOSITORY / ".pre-commit-hooks.yaml").read_text()
    entry, files = re.search(r"entry: (\S+)", hook)[1], re.search(r"files: (\S+)", hook)[1]
    assert re.search(files, "jobs/train.sbatch") and not re.search(files, "train.sh.py")
    (tmp_path / "job.sh").write_text("#SBATCH --output=absent/%j.out\n")
    done = run(REPOSITORY / entry, "job.sh", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("job.sh:1: no folder absent")


def test_ours_are_clean(tmp_path):
    """Also where srun does not inherit --cpus-per-task."""
    ours = [REPOSITORY.glob(glob) for glob in ("*.sh", "aux/*.sh", "local/**/*.sh")]
    stand_ins(tmp_path, {"sbatch": "echo slurm 22.05.8"})
    command = [sys.executable, "aux/lint_sbatch.py", *(file for files in ours for file in files)]
    done = run(*command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "empty").write_text("")
    assert lint_sbatch.main([str(tmp_path / "binary"), str(tmp_path / "empty")]) == 0
    assert lint_sbatch.main([str(tmp_path / "absent")]) == 2
    shown = capsys.readouterr()
    said = rf"lint_sbatch.py: cannot read '{tmp_path}/absent': [A-Z][a-z ]+\n"
    assert shown.out == "" and re.fullmatch(said, shown.err)
