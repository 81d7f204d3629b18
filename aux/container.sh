# shellcheck shell=bash
# What is intricate about the container of run_script.sh, for the one task on each node: it is created once for all jobs,
# again when it is half made or its image was replaced, and never taken from a job that is in it; what is mounted, and
# which variables go in; errors as one sentence. To use or to edit run_script.sh, nobody has to read this.
# CONTAINER_IMAGE, _NAME, _MOUNTS and _ENV come from env.sh, $folder from run_script.sh.
set -euo pipefail
cd -P .
folder=$(realpath "${folder:?}")                     # $PWD begins with it, whatever link your home is
host=${SLURMD_NODENAME:-$HOSTNAME}                   # in a task of srun HOSTNAME is the batch shell's

say() {                                              # in the node's log, and in the job's
    echo "run_script.sh on $host: ${*//[[:cntrl:]]/ }"
    echo "run_script.sh on $host: ${*//[[:cntrl:]]/ }" >&2
}

die() {
    [[ "${SLURM_NODEID:-0}" == 0 ]] || sleep 5       # one node ends the job, and one is enough to say what all have
    say "$*"
    exit 1
}

container_exists() {
    local names
    names=$(enroot list) || die "enroot list fails"
    [[ $'\n'$names$'\n' == *$'\n'"$CONTAINER_NAME"$'\n'* ]]
}

write_record() { echo "$1" >"$record" || die "cannot write $record"; }

remove_container() {
    write_record "creating on $host"                 # half of it may be left
    enroot remove --force "$CONTAINER_NAME" || die "cannot remove the old container $CONTAINER_NAME"
}

create_container() {                                 # enroot create ...
    local output reason
    write_record "creating on $host"
    echo "Creating container $CONTAINER_NAME on $host from $CONTAINER_IMAGE"
    if ! output=$("$@" 2>&1); then
        echo "$output"                               # all of it in the node's log, what matters in the job's
        if [[ "$output" == *"File already exists: "* ]]; then
            write_record "creating on another node"  # it is in no lock of ours: the next job does not remove it
            die "container $CONTAINER_NAME is being created by another node: $own_folder"
        fi
        enroot remove --force "$CONTAINER_NAME" &>/dev/null || true
        write_record ""
        [[ ! "$output" =~ "No space left"|"uota exceeded" ]] ||
            die "the disk where Enroot keeps its containers is full, or your quota of it: $data (ENROOT_DATA_PATH)"
        reason=$(grep -E --max-count=1 "ERROR|FATAL" <<<"$output") ||
            reason=$(grep -E --max-count=1 "[Ff]ailed|[Cc]ould not" <<<"$output") || reason=${output##*$'\n'}
        die "no container from $CONTAINER_IMAGE: $reason"
    fi
    write_record "$image"
}

start_container() {                                  # enroot start ...; this shell stays, to hold the lock
    local status=0 errors
    trap : TERM INT                                  # the ranks may be saving; USR1 is ignored since run_task.sh
    flock --shared "$in_use"
    exec {one_at_a_time}>&-
    # What Enroot says itself comes with the host's name. It closes what is above 2: the ranks' stderr goes in as 0.
    exec {errors}> >(trap '' TERM INT; while IFS= read -r line; do say "$line"; done)
    "$@" 0>&2 2>&"$errors" {errors}>&- || status=$?
    exec {errors}>&-
    wait "$!" || true
    exit "$status"
}
inside=/workspace/mnt${PWD#"$folder"}
# shellcheck disable=SC2016,SC2034  # the shell in the container expands these; run_script.sh uses the array
enter=(bash -c 'cd "$0" && exec "$@" 2>&0 </dev/null' "$inside")

# --- what goes in -----------------------------------------------------------------------------------------------------
[[ "$PWD/" == "$folder/"* ]] || die "the repository, $PWD, is not in the folder of run_script.sh, $folder"
options=() mounts=()
IFS=, read -r -a words <<<"${CONTAINER_MOUNTS:-}"
for word in "${words[@]}"; do                        # in HOST:CONTAINER:none:rbind,ro the comma does not end the mount
    if [[ "$word" == */* || ${#mounts[@]} == 0 ]]; then mounts+=("$word"); else mounts[-1]+=,$word; fi
done
for mount in "${mounts[@]}"; do
    IFS=: read -r source target access <<<"$mount"
    [[ "$source" != */* || -e "$source" ]] || die "no $source on this node: CONTAINER_MOUNTS in env.sh names it"
    case "$access" in                                # Docker's and Pyxis' spelling; Enroot's own is left as it is
        ro) mount=$source:$target:none:x-create=auto,rbind,ro ;;
        rw) mount=$source:$target ;;
    esac
    options+=(--mount "$mount")
done
for link in *; do                                    # data -> /scratch/data: what a link leads to is there, too
    [[ -L "$link" && -e "$link" ]] || continue
    target=$(realpath "$link")
    if [[ "$(readlink "$link")" != /* && "$target/" == "$folder/"* ]]; then
        continue                                     # it leads there inside as well
    elif [[ "$target" == *[[:space:]:]* ]]; then
        [[ "${SLURM_NODEID:-0}" != 0 ]] || say "$link leads to '$target': Enroot mounts no path with a blank or a colon"
    else
        options+=(--mount "$target:$inside/$link")
    fi
done
# Nothing of the host's environment is in the container unless it is named. RANK and LOCAL_RANK are torchrun's to set.
for name in $(compgen -e); do
    case "$name" in
        MASTER_ADDR | MASTER_PORT | WORLD_SIZE | NNODES | NPROC_PER_NODE | CPUS_PER_NODE | OMP_NUM_THREADS) ;;
        SLURM_* | SLURMD_NODENAME | NCCL_* | GLOO_* | TORCH_* | PYTORCH_* | TRAIN_DEVICE | DEBUG | LOGLEVEL) ;;
        CUDA_VISIBLE_DEVICES | CUDA_DEVICE_* | CUDA_LAUNCH_BLOCKING) ;;    # not CUDA_HOME: the image has its own
        JOB_OUTCOME | JOB_FAILURE | JOB_SAVED_STEP | PYTHONUNBUFFERED | PYTHONFAULTHANDLER) ;;
        *) [[ ",${CONTAINER_ENV:-}," == *",$name,"* ]] || continue ;;
    esac
    options+=(--env "$name")
done

# --- the container ----------------------------------------------------------------------------------------------------
command -v enroot >/dev/null || die "no enroot on this node: ask for nodes that have it, or see docs/containers.md"
[[ -r "$CONTAINER_IMAGE" ]] || die "no image $CONTAINER_IMAGE: run ./aux/import_image.sh once, or edit the end of env.sh"
image=$(stat --dereference --format="inode %i, %s bytes, %.9Y" "$CONTAINER_IMAGE")

# ENROOT_DATA_PATH is in the error for a container that is not there. The locks are there too, as `enroot list` shows no
# hidden files: nodes that share the folder share the locks.
own_folder="ENROOT_DATA_PATH must be a folder of each node's own"
data=$(enroot start "no-container-of-this-name.$$" 2>&1) || true
data=${data##*": "} data=${data%/*}
[[ "$data" == /* && -d "$data" ]] || die "enroot does not name its ENROOT_DATA_PATH: $data"
record=$data/.$CONTAINER_NAME.image                  # empty: made by hand; "creating on HOST"; the image it was made from
exec {one_at_a_time}>>"$record" {in_use}>>"${record%.image}.in-use" || die "cannot write $record"
flock "$one_at_a_time" || die "cannot lock $record: $own_folder"

if container_exists; then
    made_from=$(<"$record")
    case "$made_from" in
        "$image") ;;
        "") echo "Container $CONTAINER_NAME on $host was made by hand, and is used as it is" ;;
        "creating on $host") remove_container ;;     # the job that created it was killed
        "creating on "*)
            die "container $CONTAINER_NAME is half made, by ${made_from#creating on }: enroot remove $CONTAINER_NAME; $own_folder" ;;
        *)
            flock --nonblock "$in_use" ||
                die "$CONTAINER_IMAGE has changed, but another job is in container $CONTAINER_NAME: wait for it"
            remove_container
            ;;
    esac
fi
