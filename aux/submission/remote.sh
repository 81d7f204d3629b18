# shellcheck shell=sh
# Runs one of the functions below, by name and with arguments, on the cluster over SSH or on this
# machine. See remote.py. POSIX sh, because the login shell may be any. An error is one sentence,
# the last line on stderr.
set -eu

die() {
    echo "$*" | head -n 1 >&2
    exit 1
}

# submit BASE NAME DIRECTORY MARK IMAGE GPUS VARIABLES LINKS LINK... sbatch [options] SCRIPT [args]
# Makes a new folder NAME.XXXXXX in BASE, and submits from DIRECTORY in it. Removes the folder if
# anything fails.
# stdin: as many lines NAME=value as VARIABLES says, then a tar archive of the code. The values
# touch no disk and no command line; a line break in one is \n, a backslash \\.
# GPUS: the default of --gpus-per-node, or 0 if the cluster has no GPUs; if empty, the script's
# header applies.
submit() {
    base=$1 name=$2 directory=$3 mark=$4 image=$5 gpus=$6 variables=$7 links=$8
    shift 8
    command -v sbatch >/dev/null ||
        die "no sbatch in the PATH of a non-login shell:" \
            "add its folder to PATH at the top of ~/.bashrc there"
    while [ "$variables" -gt 0 ]; do
        IFS= read -r line
        value=$(printf '%b.' "${line#*=}") # the full stop keeps trailing line breaks
        export "${line%%=*}=${value%.}"
        variables=$((variables - 1))
    done
    case $base in [~] | [~]/*) base=$HOME${base#?} ;; esac
    { mkdir -p "$base" && cd "$base" && base=$(pwd) &&
        folder=$base/$(mktemp -d "$name.XXXXXX"); } ||
        die "cannot make a folder in job_base_dir $base"
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 1' HUP INT TERM

    # -m dates the files now, so that newer ones are the job's own.
    message=$(tar -x -m --no-same-owner -f - -C "$folder" 2>&1) ||
        die "copying to $folder failed, it is removed:" \
            "$(echo "$message" | grep -i -E "space|quota" || echo "$message")"
    [ -e "$folder/$mark" ] || die "copying to $folder was interrupted, it is removed"
    while [ "$links" -gt 0 ]; do
        case $1 in /*) target=$1 ;; *) target=$base/$1 ;; esac
        if [ ! -e "$target" ]; then
            echo "note: no $target to link" >&2
        elif [ ! -e "$folder/${1##*/}" ]; then
            ln -s "$target" "$folder/${1##*/}"
        fi
        links=$((links - 1))
        shift
    done
    if [ -n "$image" ]; then
        (cd "$folder" && ./aux/import_image.sh "$image" pytorch.sqsh >&2) ||
            die "no image $image for the job, see above"
    fi
    # Slurm 26.05 refuses SBATCH_GPUS_PER_NODE beside --gres=gpu.
    case "$*" in *--gres=*gpu*) gpus='' ;; esac
    if [ -n "$gpus" ]; then
        # A cluster without GPUs would refuse the job.
        case $(sinfo --noheader --format=%G) in *gpu*) ;; *) gpus=0 ;; esac
        # Weaker than the option, stronger than the header.
        export SBATCH_GPUS_PER_NODE="${SBATCH_GPUS_PER_NODE:-$gpus}"
    fi
    cd "$folder/$directory"
    touch "$folder/$mark"
    job=$("$@") # sbatch
    trap - EXIT HUP INT TERM
    job=${job%%;*}
    printf '%s\n' "$job" "$folder"
    scontrol show job "$job" | sed -n 's/^ *StdOut=//p'
}

# watch JOB LOG FROM FOLLOW
# Prints every second until the job has ended (once, if FOLLOW is no): "running" or "ended", FROM,
# and the number of new bytes of the log from there; Slurm's lines on the job, and an empty line;
# the new bytes. slurmctld is asked at once, then every 15 seconds, because it serves everybody.
watch() {
    job=$1 log=$2 from=$3 follow=$4 second=0 ask=0
    ends="BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED"
    ends="$ends|REVOKED|TIMEOUT|UNKNOWN"
    while :; do
        if [ "$second" -ge "$ask" ]; then
            shown=$(show "$job")
            ask=$((second + 15))
        fi
        if echo "$shown" | grep -Eq "JobState=($ends)"; then next=ended; else next=running; fi
        size=$(wc -c 2>/dev/null <"$log") || size=$from
        [ "$size" -ge "$from" ] || from=0 # a requeued job may truncate its log
        printf '%s\n' "$next $from $((size - from))" "$shown" ""
        [ "$size" = "$from" ] || tail -c "+$((from + 1))" "$log" | head -c "$((size - from))"
        from=$size
        [ "$next" = running ] && [ "$follow" = yes ] || return 0
        sleep 1
        second=$((second + 1))
    done
}

# slurmctld forgets a job some minutes after its end; accounting keeps it.
show() {
    if shown=$(scontrol show job "$1" 2>&1); then
        echo "$shown" | grep -E '^ +(JobState|Requeue|RunTime|NodeList)='
    elif kept=$(sacct --noheader --parsable2 --allocations --jobs="$1" \
        --format=State,ExitCode,Elapsed,NodeList 2>/dev/null) && [ -n "$kept" ]; then
        named='JobState=\1 ExitCode=\2 RunTime=\3 NodeList=\4'
        echo "$kept" | sed "s/^\([A-Z_]*\)[^|]*|\(.*\)|\(.*\)|\(.*\)\$/$named/"
    else
        case $shown in *"Invalid job id"*) state=UNKNOWN ;; *) state=UNREACHABLE ;; esac
        echo "JobState=$state"
    fi
}

# fetch FOLDER MARK: an archive of every file that the job wrote into its folder
fetch() {
    cd "$1"
    find . -type f -newer "$2" ! -path '*/__pycache__/*' -print0 | tar -c --null -T - -f -
}

cancel() { scancel "$1"; }

echo "remote.sh is ready" # the output of ~/.bashrc ends here
echo "remote.sh is ready" >&2
"$@"
