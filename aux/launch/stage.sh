# shellcheck shell=bash
# Puts what is slow as many small files onto the nodes' local disks, from one file. In a job script:
#
#   source aux/launch/stage.sh
#   stage env.tar               # unpacked once on each node, where later jobs find it: in $STAGED,
#                               # which is only to be read
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

# unpack ARCHIVE FOLDER [NAME]. A job that is killed leaves FOLDER.part behind, and the lock is free
# again. With NAME, the folders NAME-SIZE-TIME are versions of archives, with two files beside each:
# FOLDER.files is the list of its content, and FOLDER.jobs has the archive and the jobs that use it.
unpack() {
    local jobs
    # Empty if Slurm does not answer: then no version is deleted.
    jobs=$(unset "${!SQUEUE_@}" && squeue --noheader --me --format=%A) || jobs=
    # shellcheck disable=SC2016
    on_each_node bash -c '
set -euo pipefail
shopt -s nullglob
archive=$1 folder=$2 name=${3:-} jobs=$(cat)
fail() { rm -rf "$folder.part" && echo "stage.sh: $(hostname): $1" >&2 && exit 1; }
content() { find . | LC_ALL=C sort; }
whole() {
    if [[ ! "$name" ]]; then return; fi
    if [[ ! -e "$folder.files" ]]; then return 1; fi
    [[ ! "$(cd "$folder" && content | LC_ALL=C comm -13 - "$folder.files" | head -n 1)" ]]
}
mkdir -p -m 700 "${folder%/*}"
if [[ ! -O "${folder%/*}" ]]; then fail "${folder%/*} belongs to somebody else"; fi
exec 9>"$folder.lock"
flock 9
if [[ "$name" ]]; then
    printf "%s\n" "$archive" "$SLURM_JOB_ID" >>"$folder.jobs"
    # Other versions of this archive that no job uses any more make room.
    for old in "$name"-*.jobs; do
        old=${old%.jobs}
        if [[ "$jobs" && "$old" != "$folder" ]] && grep -qxF "$archive" "$old.jobs" &&
            ! grep -qxF "$jobs" "$old.jobs"; then
            (flock --nonblock 8 && rm -rf "$old" "$old".{files,jobs}) 8>"$old.lock" || true
        fi
    done
fi
if [[ -e "$folder" ]]; then
    if whole; then exit; fi
    echo "stage.sh: $(hostname): $folder has lost files, and is unpacked again" >&2
fi
rm -rf "$folder".{part,gone}
mkdir "$folder.part"
# Only `caches` may lack its archive.
if [[ "$name" || -e "$archive" ]]; then
    tar --extract --file "$archive" --directory "$folder.part" || fail "cannot unpack $archive"
fi
if [[ "$name" ]]; then
    (cd "$folder.part" && content >"$folder.files") || fail "cannot list $archive"
fi
# Another job may use the folder that has lost files.
if [[ -e "$folder" ]]; then mv "$folder" "$folder.gone"; fi
mv "$folder.part" "$folder"
rm -rf "$folder.gone"
' unpack "$@" <<<"$jobs"
}

stage() {
    local archive
    archive=$(realpath --no-symlinks "$1") || exit 1
    # A new archive gets a new folder, because a job may still use the old one.
    STAGED=$LOCAL/${1##*/}-$(stat --dereference --format=%s-%Y "$1") || exit 1
    unpack "$archive" "$STAGED" "$LOCAL/${1##*/}" || exit 1
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
