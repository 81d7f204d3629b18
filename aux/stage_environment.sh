#!/bin/bash
# Copies a virtual environment to every node's local disk, for a job whose shared file system makes
# `import` slow.
#
# Usage: in env.sh, after the line that activates .venv:
#        PATH=$(./aux/stage_environment.sh .venv /tmp)/bin:$PATH
#
# It prints the copy's folder, which is inside the given folder and belongs to this job, and removes
# it when Slurm ends the job. Only one file is copied, .venv.tar beside the environment; it is made
# if it is missing, or packages have been installed since. The copy's programs run the copy's
# python, but some files still point to the original: bin/activate, and packages installed with `pip
# install --editable`. Python's standard library stays where it is, which is on a node's local disk
# if /usr/bin/python3 made the environment.
set -euo pipefail
die() { echo "stage_environment.sh on $HOSTNAME: ${*//[[:cntrl:]]/ }" >&2; exit 1; }

# The comment above is the help.
if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
    sed --quiet '2,/^[^#]/s/^# \?//p' "$0"
    exit
fi

(($# == 2)) ||
    die "takes a virtual environment and a folder on every node's local disk, not $# arguments"
[[ -n "${SLURM_JOB_ID:-}" ]] || die "runs only in a job, where env.sh calls it"
[[ "$2" == /* ]] || die "'$2' is not the absolute path of a folder on every node's local disk"
[[ -e "$1/pyvenv.cfg" && -x "$1/bin/python" ]] || die "$1 is not a virtual environment (in $PWD)"
venv=$(readlink --canonicalize "$1")
copy=$2/environment-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
if [[ -d "$copy" ]]; then
    # A second launcher in the same job.
    echo "$copy"
    exit
fi

# --- one file, on the shared file system ---
newer=$(find -H "$venv" "$venv"/lib/python*/site-packages -maxdepth 0 -newer "$venv.tar" 2>&1) ||
    true
if [[ -n "$newer" ]]; then
    # A job that starts meanwhile sees the whole file or none.
    partial=$venv.tar.$SLURM_JOB_ID.partial
    trap 'rm --force "$partial"' EXIT
    tar --create --file "$partial" --directory "$venv" . || die "cannot write $venv.tar, see above"
    mv --no-target-directory "$partial" "$venv.tar"
fi

# --- on every node ---
# With --overlap and --mem=0, these steps take no CPUs or memory from the ranks' step.
on_every_node=(srun --overlap --mem=0 --nodes="$SLURM_JOB_NUM_NODES"
    --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1)
fail() {
    "${on_every_node[@]}" rm --recursive --force "$copy" "$copy.tar" </dev/null >&2
    die "$@"
}

# Waits for the SIGTERM with which Slurm ends the job, and then for every process that has the copy
# in its environment, because ranks may be saving.
# shellcheck disable=SC2016  # the inner shell expands these
"${on_every_node[@]}" bash -c '
    trap "" USR1
    trap : TERM
    sleep infinity &
    wait
    while grep --quiet --no-messages --fixed-strings "$1/" /proc/[0-9]*/environ; do sleep 1; done
    rm --recursive --force "$1" "$1.tar"
' - "$copy" </dev/null &>/dev/null &

sbcast "$venv.tar" "$copy.tar" || fail "sbcast cannot write $copy.tar on every node, see above"
# shellcheck disable=SC2016  # as above
"${on_every_node[@]}" bash -c '
    set -euo pipefail
    mkdir --mode=700 "$1"
    tar --extract --file "$1.tar" --directory "$1"
    rm "$1.tar"
    # Line 1 of a program is "#!OLD/bin/python3"; if that would be too long, line 2 has the path
    # after "exec".
    to="s|/.*/bin/python|$1/bin/python|"
    find "$1/bin" -type f -exec env LC_ALL=C \
        sed --in-place --expression "1{/^#!/$to}" --expression "2{/exec/$to}" {} +
' - "$copy" </dev/null >&2 || fail "cannot unpack $venv.tar in $2 on every node, see above"
echo "$copy"
