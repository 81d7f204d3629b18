#!/bin/bash
# Run a command in this node's Enroot container. A container that does not exist yet, or whose image has changed, is
# created first. One task of srun per node; CONTAINER_IMAGE, _NAME, _MOUNTS and _ENV come from env.sh.
#
# Usage: srun --ntasks-per-node=1 ./aux/run_task.sh ./aux/enter_container.sh ./torchrun.sh distributed/train_ddp.py
#
# A container exists when `enroot list` names it. Enroot keeps them in ENROOT_DATA_PATH, which needs room:
#   srun bash -c 'grep -h "^ENROOT_DATA_PATH" /etc/enroot/enroot.conf /etc/enroot/enroot.conf.d/*.conf'
# prints it, or nothing where it is the default, ~/.local/share/enroot. It has to be a folder of each node's own.
set -euo pipefail
host=${SLURMD_NODENAME:-$HOSTNAME}                   # in a task of srun HOSTNAME is the batch shell's

die() {
    [[ "${SLURM_NODEID:-0}" == 0 ]] || sleep 5       # one node ends the job, and one is enough to say what all have
    echo "enter_container.sh on $host: $*"       # in the node's log, and in the job's
    echo "enter_container.sh on $host: $*" >&2
    exit 1
}

container_exists() {
    local names
    names=$(enroot list) || die "enroot list fails"
    [[ $'\n'$names$'\n' == *$'\n'"$CONTAINER_NAME"$'\n'* ]]
}

# Whose container it is and whether it is whole: empty for one that somebody else made, "creating" while it is not whole,
# then the image it was made from. The same file is the lock. Not in /tmp, which at many sites is another one in each job.
record=/var/tmp/enroot-$UID-$host-$CONTAINER_NAME
write_record() {
    echo "$1" >"$record" || die "cannot write $record"
}

create() {
    local output
    write_record creating
    echo "Creating container $CONTAINER_NAME on $host from $CONTAINER_IMAGE"
    if ! output=$(enroot create --name "$CONTAINER_NAME" "$CONTAINER_IMAGE" 2>&1); then
        [[ "$output" != *"already exists"* ]] ||
            die "container $CONTAINER_NAME is being created by another node: ENROOT_DATA_PATH must be a folder of this node's own"
        enroot remove --force "$CONTAINER_NAME" &>/dev/null || true
        write_record ""
        [[ "$output" != *"No space left"* ]] ||
            die "the disk where Enroot keeps its containers is full (ENROOT_DATA_PATH, see aux/enter_container.sh)"
        die "no container from $CONTAINER_IMAGE: ${output##*$'\n'}"
    fi
    write_record "$image"
}

command -v enroot >/dev/null || die "no enroot on this node: ask for nodes that have it, or see the end of run_script.sh"
[[ -r "$CONTAINER_IMAGE" ]] || die "no image $CONTAINER_IMAGE: run ./aux/import_image.sh once, or edit the top of env.sh"
image=$(stat --dereference --format="inode %i, %s bytes, %y" "$CONTAINER_IMAGE")

exec {lock}>>"$record" || die "cannot write $record"
flock "$lock"                                        # until Enroot starts the command and closes it
made_from=$(<"$record")
if ! container_exists; then
    create
elif [[ -z "$made_from" ]]; then
    echo "Container $CONTAINER_NAME on $host was made by hand: it is used as it is, whatever $CONTAINER_IMAGE has become"
elif [[ "$made_from" != "$image" ]]; then
    in_use=$(enroot list --fancy | awk -v name="$CONTAINER_NAME" '$1 == name { print $2 }') || in_use=""
    [[ -z "$in_use" ]] ||
        die "$CONTAINER_IMAGE has changed, but another job is in container $CONTAINER_NAME: wait for it, or edit CONTAINER_NAME"
    write_record creating
    enroot remove --force "$CONTAINER_NAME" || die "cannot remove the old container $CONTAINER_NAME"
    create
fi

options=(--root --rw --mount "$PWD:/workspace/mnt")
IFS=, read -r -a mounts <<<"${CONTAINER_MOUNTS:-}"
for mount in "${mounts[@]}"; do
    options+=(--mount "$mount")
done
# Nothing of the host's environment is in the container unless it is named. RANK and LOCAL_RANK are torchrun's to set.
for name in $(compgen -e); do
    case "$name" in
        MASTER_ADDR | MASTER_PORT | WORLD_SIZE | NNODES | NPROC_PER_NODE | CPUS_PER_NODE | OMP_NUM_THREADS) ;;
        SLURM_* | SLURMD_NODENAME | NCCL_* | GLOO_* | TORCH_* | PYTORCH_* | TRAIN_DEVICE | DEBUG | LOGLEVEL) ;;
        CUDA_VISIBLE_DEVICES | CUDA_DEVICE_* | CUDA_LAUNCH_BLOCKING) ;;    # not CUDA_HOME: the image has its own
        JOB_OUTCOME | JOB_FAILURE | JOB_STEP_BEFORE | PYTHONUNBUFFERED | PYTHONFAULTHANDLER) ;;
        *) [[ ",${CONTAINER_ENV:-}," == *",$name,"* ]] || continue ;;
    esac
    options+=(--env "$name")
done
# shellcheck disable=SC2016  # "$@" is for the shell in the container
exec enroot start "${options[@]}" "$CONTAINER_NAME" bash -c 'cd /workspace/mnt && exec "$@"' bash "$@"
