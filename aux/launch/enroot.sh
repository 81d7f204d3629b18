#!/bin/bash
# Becomes a command in an Enroot container, which it creates if this node lacks it.
#
# Usage: srun --ntasks-per-node=1 ./aux/launch/enroot.sh ./torchrun.sh distributed/train_ddp.py
# It takes its settings, CONTAINER_*, from run_script.sh.
set -euo pipefail

# Creating a container takes minutes. As in torchrun.sh, SIGTERM does not end the job meanwhile. (If
# another node fails, srun kills this one half a minute later.)
trap '' TERM

host=${SLURMD_NODENAME:-$HOSTNAME}

die() {
    echo "enroot.sh on $host: $*" >&2
    exit 1
}

if ! command -v enroot >/dev/null; then
    die "no enroot on this node: ask for nodes that have it, or see docs/containers.md"
fi

# sbatch passes on the login node's /run/user/UID, and on a node without it Enroot fails.
if [[ ! -w "${XDG_RUNTIME_DIR:-/}" ]]; then unset XDG_RUNTIME_DIR; fi

# --- the container ---
name=$CONTAINER_NAME
if [[ -z "$name" ]]; then
    if [[ ! -r "$CONTAINER_IMAGE" ]]; then
        hint="run ./aux/import_image.sh once, or edit CONTAINER_IMAGE in run_script.sh"
        die "no image $CONTAINER_IMAGE: $hint"
    fi
    # The image's path and date: a new image gets a new container, and no job loses the old one.
    name=${CONTAINER_IMAGE#/}-$(date --utc --reference="$CONTAINER_IMAGE" +%Y%m%d-%H%M%S)
    name=${name//[^A-Za-z0-9_.-]/-}

    # Where Enroot keeps containers. From Enroot 4.0 on, `enroot info` prints the setting.
    info=$(enroot info 2>/dev/null || true)
    data=${ENROOT_DATA_PATH:-$(sed --quiet 's/^ *ENROOT_DATA_PATH=//p' <<<"$info")}
    export ENROOT_DATA_PATH=${data:-${XDG_DATA_HOME:-$HOME/.local/share}/enroot}
    mkdir --parents "$ENROOT_DATA_PATH"

    # One job creates it while others wait. It gets its name when it is whole.
    exec {lock}>"$ENROOT_DATA_PATH/.$name.lock"
    flock "$lock"
    if [[ ! -d "$ENROOT_DATA_PATH/$name" ]]; then
        half=$name.half-made-on-$host
        echo "Creating container $name in $ENROOT_DATA_PATH on $host"
        if ! enroot create --force --name "$half" "$CONTAINER_IMAGE"; then
            enroot remove --force "$half" || true
            die "no container from $CONTAINER_IMAGE in $ENROOT_DATA_PATH, see Enroot's words above"
        fi
        mv --no-target-directory "$ENROOT_DATA_PATH/$half" "$ENROOT_DATA_PATH/$name"
    fi
    exec {lock}>&-
fi

# --- what is mounted: the folder, the targets of the repository's links, and CONTAINER_MOUNTS ---
repository=$(pwd -P)
folder=$(realpath "$CONTAINER_FOLDER")
if [[ "$repository/" != "$folder/"* ]]; then
    die "the repository, $repository, is not in CONTAINER_FOLDER, $folder"
fi
inside=/workspace/mnt${repository#"$folder"}

options=(--root --rw --mount "$folder:/workspace/mnt")
for link in *; do
    if [[ ! -L "$link" || ! -e "$link" ]]; then continue; fi
    target=$(realpath "$link")
    if [[ "$target" == *[[:space:]:]* ]]; then
        echo "enroot.sh on $host: $link is not mounted: '$target' has a blank or colon" >&2
    else
        options+=(--mount "$target:$inside/$link")
    fi
done
IFS=, read -r -a mounts <<<"$CONTAINER_MOUNTS"
for mount in "${mounts[@]}"; do
    # Enroot spells :ro like this, and has no :rw.
    if [[ "$mount" == *:ro ]]; then mount=${mount%:ro}:none:x-create=auto,rbind,ro; fi
    options+=(--mount "${mount%:rw}")
done

# --- which variables go in, because a container has nothing else of the node's environment ---
IFS=', ' read -r -a names <<<"$CONTAINER_ENV"
names+=(RUN MASTER_ADDR MASTER_PORT NNODES NPROC_PER_NODE CPUS_PER_NODE OMP_NUM_THREADS)
names+=(PYTHONUNBUFFERED PYTHONFAULTHANDLER LOGLEVEL HF_HUB_OFFLINE WANDB_MODE)
names+=(CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING "${!CUDA_DEVICE_@}" "${!HEARTBEAT_@}")
# AMD's and Intel's
names+=("${!ROCR_@}" "${!HIP_@}" "${!HSA_@}" "${!MIOPEN_@}" "${!RCCL_@}" "${!ZE_@}" "${!CCL_@}")
names+=("${!SLURM@}" "${!NCCL_@}" "${!GLOO_@}" "${!TORCH_@}" "${!PYTORCH_@}")
names+=("${!FI_@}" "${!NVIDIA_@}" "${!MELLANOX_@}")
names+=(TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR HF_DATASETS_CACHE HF_MODULES_CACHE)
for variable in "${names[@]}"; do
    if [[ -v "$variable" ]]; then options+=(--env "$variable"); fi
done

# torchrun.sh ignores SIGTERM until torchrun is up. Any other command begins as without this script.
if [[ "$1" != */torchrun.sh ]]; then trap - TERM; fi

# The command gets this job's umask, because a login shell may take one from the image.
# shellcheck disable=SC2016  # expanded by the shell in the container, which becomes the command
exec enroot start "${options[@]}" "$name" \
    bash -c 'umask "$0" && cd "$1" && shift && exec "$@"' "$(umask)" "$inside" "$@"
