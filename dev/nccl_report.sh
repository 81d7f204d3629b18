#!/bin/bash
# NCCL between ranks and between nodes, on a machine with one GPU: one page in ten minutes.
#
# Usage: ./dev/nccl_report.sh prepare             brings Slurm's packages into .nccl
#        OUT=FOLDER ./dev/nccl_report.sh run      as root; the page is FOLDER/nccl.md
#        OUT=FOLDER DEVICE=cpu ./dev/nccl_report.sh run    the rehearsal: gloo, one job at a time
#
# NCCL refuses two ranks on one GPU of one host, and a host is what NCCL_HOSTID says. So the nodes
# of a local cluster, which have it from local/cluster/task_prolog.sh, share the GPU, and talk over
# TCP. Their speed means nothing, everything else does. Without a Slurm that starts (or with
# SLURM=no) a torchrun for each node runs on this machine. The machine needs Python with torch, and
# Debian 12, Ubuntu 24.04 or a Slurm of its own. It needs no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DEVICE=${DEVICE:-cuda} CLUSTER=nccl WORK=${WORK:-/tmp/nccl_report}

# --- here: what the machine may lack ---

prepare() {
    local release state options
    rm -rf .nccl
    for release in bookworm noble; do
        mkdir -p ".nccl/$release"
        state=$(mktemp --directory)
        mkdir -p "$state"/{lists,archives}/partial "$state/parts"
        touch "$state/status" # as if nothing were installed
        case $release in
            bookworm) echo "deb http://deb.debian.org/debian bookworm main" ;;
            # Debian has no package with Ubuntu's keys.
            noble) echo "deb [trusted=yes] http://archive.ubuntu.com/ubuntu noble main universe" ;;
        esac >"$state/sources.list"
        options=(-o "Dir::State=$state" -o "Dir::State::status=$state/status"
            -o "Dir::Cache::archives=$state/archives" -o "Dir::Etc::SourceList=$state/sources.list"
            -o "Dir::Etc::SourceParts=$state/parts" -o APT::Architecture=amd64
            -o APT::Sandbox::User=root -o APT::Install-Recommends=false)
        apt-get "${options[@]}" --quiet=2 update
        apt-get "${options[@]}" --quiet=2 --yes --download-only install \
            slurmctld slurmd slurm-client munge iproute2 procps
        mv "$state"/archives/*.deb ".nccl/$release"
        # Every system has these, and Slurm's daemons need no Perl.
        rm -f ".nccl/$release"/{libc6,libperl5*,perl*,dpkg,tar,passwd,coreutils}_*.deb
        rm -rf "$state"
    done
    du --summarize --human-readable .nccl/*
}

# --- there ---

# Unpacks the packages that are not installed, beside what is there.
install_slurm() {
    local deb name status
    source /etc/os-release
    for deb in ".nccl/${VERSION_CODENAME:-none}"/*.deb; do
        name=${deb##*/}
        name=${name%%_*}
        status=$(dpkg-query --show --showformat='${Status}' "$name" 2>/dev/null || true)
        if [[ "$status" != *" installed" ]]; then
            # dpkg --extract would replace /lib, which is a link, by a folder.
            dpkg --fsys-tarfile "$deb" |
                tar --extract --directory=/ --keep-directory-symlink --skip-old-files
        fi
    done
    # Installing them would link their names.
    for name in slurmctld slurmd slurmstepd; do
        if ! type -P "$name" >/dev/null; then ln --symbolic "$name-wlm" "/usr/sbin/$name"; fi
    done
    ldconfig
}

slurm() { ./local/cluster/namespaces.sh "$@"; }
in_cluster() { slurm exec "$@"; }

# The page so far, from the parts that have begun, and everything else as one archive.
publish() {
    local new=$WORK/new.$BASHPID
    cat "$WORK"/page/* >"$new" && mv "$new" "$OUT/nccl.md"
    # A log may grow meanwhile.
    tar --create --gzip --file="$new" --directory="$WORK" logs 2>/dev/null || true
    mv "$new" "$OUT/logs.tar.gz"
}

# part NUMBER TITLE SECONDS FUNCTION [ARGUMENTS]: its output, as a part of the page.
part() {
    local number=$1 title=$2 limit=$3 begin=$SECONDS left=$((DEADLINE - SECONDS)) status=0
    shift 3
    if ((left < limit)); then limit=$left; fi
    if ((limit < 10)); then
        printf '\n## %s\n\nNo time was left.\n' "$title" >"$WORK/page/$number"
        return
    fi
    { printf '\n## %s\n\n' "$title"; } >"$WORK/page/$number"
    timeout --kill-after=10 "$limit" ./dev/nccl_report.sh "$@" \
        >>"$WORK/page/$number" 2>&1 || status=$?
    printf '\n(%s s, status %s)\n' "$((SECONDS - begin))" "$status" >>"$WORK/page/$number"
    echo "part $number, $*: $((SECONDS - begin)) s, status $status"
    publish
}

# On a GPU several parts run at once, because they mostly wait.
together() {
    if [[ "$DEVICE" == cuda ]]; then part "$@" & else part "$@"; fi
}

block() {
    echo '```'
    # Without torch's frames in C++.
    grep --invert-match -E '^frame #|^ *(at|from) .*\.(cpp|h):' |
        tail --lines="${1:-25}" | cut --characters=1-400
    echo '```'
}

# job NAME NODES LAUNCHER SCRIPT ...: submits it, and prints its id.
job() {
    local name=$1 nodes=$2 launcher=$3
    shift 3
    in_cluster sbatch --parsable --nodes="$nodes" --ntasks-per-node=1 --gpus-per-node=1 \
        --cpus-per-task=4 --job-name="$name" --output="$WORK/logs/$name" "$launcher" "$@"
}

state_of() { in_cluster scontrol --oneliner show job "$1" | grep -oP 'JobState=\K\S+'; }

# ended JOB SECONDS: waits for its end.
ended() {
    local end=$((SECONDS + $2))
    until [[ ! "$(state_of "$1")" =~ PENDING|RUNNING|COMPLETING|REQUEUED ]]; do
        if ((SECONDS > end)); then break; fi
        sleep 1
    done
    echo "Job $1: $(state_of "$1")."
    in_cluster scancel "$1"
}

# says NAME WORDS SECONDS: waits for words in a job's log.
says() {
    local end=$((SECONDS + $3))
    until grep --quiet -E "$2" "$WORK/logs/$1" 2>/dev/null; do
        if ((SECONDS > end)); then echo "$1 has not said '$2' after $3 s." && return 1; fi
        sleep 0.5
    done
}

# --- the parts ---

machine() {
    source /etc/os-release
    {
        echo "$PRETTY_NAME, Linux $(uname --kernel-release), $(nproc --all) CPUs"
        nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || true
        nvidia-smi topo -m || true
        python3 -c 'import sys, torch; print(sys.version.split()[0], "torch", torch.__version__)'
        if [[ "$DEVICE" == cuda ]]; then
            python3 -c 'import torch; print("NCCL", torch.cuda.nccl.version())'
        fi
        slurmd -V || true
        echo "cgroup: $(stat --file-system --format=%T /sys/fs/cgroup)"
        ls -l /dev/nvidia* || true
    } 2>&1 | block 60
}

TEXT="--num-hidden-layers 2 --hidden-size 64 --context 32 --batch-size 48 --learning-rate 0.002"
TEXT+=" --warmup-steps 5 --steps 60 --log-every 5 --precision fp32 --no-compile"
TEXT+=" --deterministic"

# report NODES PART ...: aux/cluster_report.py, as on any cluster.
report() {
    local nodes=$1 id name=report-$1
    shift
    if [[ "$SLURM" == yes ]]; then
        id=$(job "$name" "$nodes" launch_slurm_with_torchrun.sh aux/cluster_report.py "$@")
        ended "$id" 420
        cp -r "log/$id" "$WORK/logs/$name-runs" || true
    else
        agents "$nodes" aux/cluster_report.py "$@" >"$WORK/logs/$name" 2>&1 || echo "status $?"
    fi
    if grep --quiet '^# Cluster report' "$WORK/logs/$name"; then
        sed --quiet '/^# Cluster report/,$p' "$WORK/logs/$name" | sed 's/^# /### /'
    else
        block 40 <"$WORK/logs/$name"
    fi
}

# agents NODES SCRIPT ...: without Slurm, a torchrun for each node.
agents() {
    local nodes=$1 node pids=() status=0 port=$((20000 + RANDOM % 10000))
    shift
    for ((node = 0; node < nodes; node++)); do
        SLURMD_NODENAME=node-$node NCCL_HOSTID=node-$node python3 -m torch.distributed.run \
            --nnodes="$nodes" --node-rank="$node" --nproc-per-node=1 \
            --master-addr=127.0.0.1 --master-port="$port" "$@" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
    return "$status"
}

launchers() {
    local id way
    for way in to_torch with_mp; do
        id=$(job "ranks-$way" 2 "launch_slurm_$way.sh" aux/check_ranks.py --timeout 60)
        ended "$id" 100
        block 20 <"$WORK/logs/ranks-$way"
    done
}

# SIGTERM, requeue, resume under Slurm; then stopped on two nodes, and resumed on four.
requeue() {
    local whole stopped folder=$WORK/checkpoints
    local train=(launch_slurm_with_torchrun.sh distributed/train_fsdp.py)
    # shellcheck disable=SC2206 # words
    local options=($TEXT --data-dir "$WORK/text")
    whole=$(job whole 2 "${train[@]}" "${options[@]}" --checkpoint-dir "$folder/whole")
    stopped=$(job stopped 2 "${train[@]}" "${options[@]}" --checkpoint-dir "$folder/stopped")
    says stopped '^step=5/' 90
    in_cluster scancel --signal=TERM "$stopped"
    says stopped '^Requeued|^Not requeued' 60
    in_cluster scontrol update "JobId=$stopped" StartTime=now || true
    ended "$stopped" 100
    ended "$whole" 60
    # The same, but stopped for good, and resumed on twice as many nodes.
    stopped=$(job first-half 2 "${train[@]}" "${options[@]}" --checkpoint-dir "$folder/more")
    in_cluster scontrol update "JobId=$stopped" Requeue=0
    says first-half '^step=5/' 90
    in_cluster scancel --signal=TERM "$stopped"
    ended "$stopped" 60
    options+=(--checkpoint-dir "$folder/more")
    stopped=$(job second-half 4 "${train[@]}" "${options[@]}" --resume)
    ended "$stopped" 100
    for name in whole stopped first-half second-half; do
        echo "$name:" && grep -E '^(step=(15|30|60)/|Stopped|Requeued|Not requ|Resumed|Finished)' \
            "$WORK/logs/$name" | cut --characters=1-90
    done | block 40
}

# fault NAME: dev/nccl_faults.py, with what its log, watch_job.py, RAS and the flight recorder say.
fault() {
    local id=local begin=$SECONDS name=fault-$1 pid='' inside=() step=()
    if [[ "$SLURM" == yes ]]; then
        inside=(./local/cluster/namespaces.sh exec)
        # By srun, because torchrun's reports would hide a rank's last words.
        id=$(job "$name" 2 launch_slurm_to_torch.sh dev/nccl_faults.py "$1")
        step=(srun "--jobid=$id" --overlap --nodes=1 --ntasks=1)
    else
        mkdir -p "log/$1"
        TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=log/$1/nccl_rank_ \
            agents 2 dev/nccl_faults.py "$1" >"$WORK/logs/$name" 2>&1 &
        pid=$!
    fi
    if [[ "$1" =~ hangs|differs ]] && says "$name" 'done step 20' 90; then
        sleep 9
        echo "watch_job.py, 9 s after step 20:"
        "${inside[@]}" python3 aux/watch_job.py "$id" --after 5 2>&1 | block 30
        echo "RAS at that time:"
        # 28028 is its port.
        local ask='exec 3<>/dev/tcp/localhost/28028 && echo verbose status >&3 && timeout 8 cat <&3'
        timeout 15 "${inside[@]}" "${step[@]}" bash 2>&1 <<<"$ask" | block 60
    fi
    if [[ -n "$pid" ]]; then
        wait "$pid" || echo "Status $?."
        id=$1
    else
        ended "$id" 150
    fi
    echo "$((SECONDS - begin)) s from sbatch to the end. The log:"
    block 40 <"$WORK/logs/$name"
    if compgen -G "log/$id/nccl_rank_*" >/dev/null; then
        cp "log/$id"/nccl_rank_* "$WORK/logs/" 2>/dev/null || true
        echo "The flight recorder's dumps, read by torchfrtrace:"
        timeout 60 python3 -m torch.distributed.flight_recorder.fr_trace --prefix nccl_rank_ \
            "log/$id" 2>&1 | block 30
    fi
}

binding() {
    # shellcheck disable=SC2016 # on the node
    local look='echo "GPUs ${CUDA_VISIBLE_DEVICES:-unset}, NCCL_HOSTID ${NCCL_HOSTID:-unset}"
        tail --lines=3 /proc/self/cgroup
        nvidia-smi --list-gpus
        head --bytes=0 /dev/nvidia0 && echo opens'
    echo "With --gpus-per-node=1:"
    in_cluster timeout 20 srun --nodes=1 --gpus-per-node=1 bash 2>&1 <<<"$look" | block
    echo "Without a GPU:"
    in_cluster timeout 20 srun --nodes=1 bash 2>&1 <<<"$look" | block
    true # without a GPU, head has to fail
}

speed() {
    python3 - <<'END'
import os, sys, tempfile
from pathlib import Path
sys.path.insert(0, "dev")
import gpu_report
cpu = os.environ["DEVICE"] == "cpu"
rows = ("0.1b", "0.1b, FSDP of one rank", "eager")
for table in (gpu_report.SPEED, gpu_report.SPEED_OF_CPU):
    for name in {*table} - {*rows}:
        del table[name]
with tempfile.TemporaryDirectory() as folder:
    report = gpu_report.Report(os.environ["DEVICE"], Path(folder))
    report.prepare()
    print(report.speed())
END
}

# Without the profiler's lines about itself.
jpegs() {
    python3 dev/jpeg_speed.py --device "$DEVICE" --out "$OUT" 2>&1 | grep --invert-match '^USDT'
}

run() {
    local fault
    DEADLINE=$((SECONDS + ${LIMIT:-565}))
    rm -rf "$WORK"
    mkdir -p "$WORK"/{page,logs} "$OUT"
    chmod 755 "$WORK"
    if [[ "$DEVICE" == cpu ]]; then export OMP_NUM_THREADS=1; fi
    cat >"$WORK/page/00" <<END
# NCCL between ranks and nodes, on one GPU, $(date +%F) ($DEVICE)

All nodes share the GPU, so several ranks are slow, and check_ranks.py may find its memory in use.
END
    if [[ -z "${SLURM:-}" ]]; then
        SLURM=no
        install_slurm >"$WORK/logs/install" 2>&1 || true
        # The nodes claim more CPUs than there are, so that no job waits for another.
        if timeout 60 ./local/cluster/namespaces.sh up --nodes 20 --cpus 64 --gpus 1 \
            >"$WORK/logs/cluster" 2>&1; then SLURM=yes; fi
    fi
    export SLURM
    trap 'slurm down >/dev/null 2>&1 || true; publish' EXIT
    part 01 "Machine" 30 machine
    if [[ "$SLURM" == no ]]; then
        echo "Slurm does not start, so a torchrun runs for each node:" >>"$WORK/page/01"
        if [[ -e "$WORK/logs/cluster" ]]; then block 20 <"$WORK/logs/cluster" >>"$WORK/page/01"; fi
    fi
    PYTHONPATH=aux python3 -c "
import cluster_report, pathlib
cluster_report.folder = pathlib.Path('$WORK')
cluster_report.prepare()"
    # The rehearsal has two CPUs, and tests/test_cluster_report.py for the rest.
    local two=(checks losses stop hang) four=(checks losses stop)
    if [[ "$DEVICE" == cpu ]]; then two=(checks) four=(checks); fi
    together 02 "aux/cluster_report.py on two nodes" 330 report 2 "${two[@]}"
    together 03 "aux/cluster_report.py on four nodes" 330 report 4 "${four[@]}"
    if [[ "$SLURM" == yes ]]; then
        together 04 "check_ranks.py by srun and by spawn" 200 launchers
        together 05 "SIGTERM, requeue, and another number of nodes" 300 requeue
    fi
    for fault in hangs dies stays-away differs; do
        together "06-$fault" "A rank that $fault" 200 fault "$fault"
    done
    wait
    if [[ "$SLURM" == yes ]]; then part 07 "What Slurm lets a task see" 60 binding; fi
    part 08 "resnet50 on JPEGs" 200 jpegs
    part 09 "train_fsdp.py on this GPU alone" 200 speed
}

# A part goes on after a command that fails.
if [[ "${1-}" != prepare && "${1-}" != run ]]; then set +e; fi
"$@"
