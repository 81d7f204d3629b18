# shellcheck shell=bash
# Puts what is slow as many small files onto the nodes' local disks, from one file. In a job script:
#
#   source aux/launch/stage.sh
#   stage env.tar               # unpacked once on each node, where later jobs find it: in $STAGED
#   caches compiled.tar         # compilers and Hugging Face write to the local disk, not all anew
#   ./launch_slurm_with_torchrun.sh SCRIPT
#   pack compiled.tar           # what has been compiled, for nodes that have not compiled it yet
LOCAL=/tmp/staged-$UID # EDIT: a local disk of the nodes, best one that is not emptied after a job

# At a SIGTERM this shell waits for the launcher, which saves and requeues.
trap : TERM

on_each_node() {
    srun --export=ALL --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --mpi=none \
        --wait=0 --kill-on-bad-exit=1 "$@"
}

# unpack ARCHIVE FOLDER. A job that is killed leaves FOLDER.part behind, and the lock is free again.
unpack() {
    # shellcheck disable=SC2016
    on_each_node bash -c '
set -euo pipefail
archive=$1 folder=$2
fail() { rm -rf "$folder.part" && echo "stage.sh: $(hostname): $1" >&2 && exit 1; }
mkdir -p -m 700 "${folder%/*}"
if [[ ! -O "${folder%/*}" ]]; then fail "${folder%/*} belongs to somebody else"; fi
exec 9>"$folder.lock"
flock 9
if [[ -e "$folder" ]]; then exit; fi
rm -rf "$folder.part"
mkdir "$folder.part"
if [[ -e "$archive" ]]; then
    tar --extract --file "$archive" --directory "$folder.part" || fail "cannot unpack $archive"
fi
mv "$folder.part" "$folder"
' unpack "$1" "$2"
}

stage() {
    # A new archive gets a new folder, because a job may still use the old one.
    STAGED=$LOCAL/${1##*/}-$(stat --dereference --format=%s-%Y "$1") || exit 1
    unpack "$1" "$STAGED" || exit 1
}

caches() {
    local folder=$LOCAL/${1##*/}
    # Before the first job has packed them, an empty folder.
    unpack "$1" "$folder" || exit 1
    export TORCHINDUCTOR_CACHE_DIR=$folder/inductor TRITON_CACHE_DIR=$folder/triton
    export HF_DATASETS_CACHE=$LOCAL/datasets HF_MODULES_CACHE=$LOCAL/modules
}

pack() {
    # Of this node, which is the first. The rename makes it whole, if two jobs end at once.
    local part=$1.$SLURM_JOB_ID.partial
    if tar --create --file "$part" --directory "$LOCAL/${1##*/}" .; then
        mv "$part" "$1"
    else
        rm -f "$part"
        echo "stage.sh: $1 stays as it was" >&2
    fi
}
