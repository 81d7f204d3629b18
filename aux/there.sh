# shellcheck shell=sh
# What submit.py runs on the cluster, over SSH or on this machine: one of the functions below, by name, with arguments.
# POSIX sh, because nobody knows the shell there. Errors are one sentence, the last line on stderr.
set -eu

die() {
    echo "$*" | head -n 1 >&2
    exit 1
}

# submit BASE NAME DIRECTORY MARK IMAGE VARIABLES LINKS LINK... sbatch [options] SCRIPT [arguments]
# stdin: so many VARIABLES, a line of NAME=value each, which touch no disk and no command line (a line break in a value is
# \n, a backslash \\), then a tar archive of the code.
# Makes a new folder NAME.XXXXXX in BASE, and submits from DIRECTORY in it. If anything fails, nothing is left.
submit() {
    base=$1 name=$2 directory=$3 mark=$4 image=$5 variables=$6 links=$7
    shift 7
    command -v sbatch >/dev/null ||
        die "there is no sbatch for a shell that is not a login shell: add its folder to PATH on top of ~/.bashrc there"
    while [ "$variables" -gt 0 ]; do
        IFS= read -r line
        value=$(printf '%b.' "${line#*=}") # the full stop keeps line breaks at the end
        export "${line%%=*}=${value%.}"
        variables=$((variables - 1))
    done
    case $base in [~] | [~]/*) base=$HOME${base#?} ;; esac
    { mkdir -p "$base" && cd "$base" && base=$(pwd) && folder=$base/$(mktemp -d "$name.XXXXXX"); } ||
        die "no new folder in job_base_dir $base"
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 1' HUP INT TERM

    # -m: now is the date of every file, so that newer ones are the job's own
    said=$(tar -x -m --no-same-owner -f - -C "$folder" 2>&1) ||
        die "copying to $folder failed, and it is removed: $(echo "$said" | grep -i -E "space|quota" || echo "$said")"
    [ -e "$folder/$mark" ] || die "copying to $folder broke off, and it is removed"
    while [ "$links" -gt 0 ]; do
        case $1 in /*) target=$1 ;; *) target=$base/$1 ;; esac
        if [ ! -e "$target" ]; then
            echo "note: nothing to link at $target" >&2
        elif [ ! -e "$folder/${1##*/}" ]; then
            ln -s "$target" "$folder/${1##*/}"
        fi
        links=$((links - 1))
        shift
    done
    if [ -n "$image" ]; then
        (cd "$folder" && ./aux/import_image.sh "$image" pytorch.sqsh >&2) || die "no image $image for the job, see above"
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
# Prints every second until the job has ended (unless FOLLOW is no, then once): "goes-on" or "ended", FROM, and how much
# the log has gained from that byte on; lines of what Slurm says of the job, and an empty one; the gain itself.
watch() {
    job=$1 log=$2 from=$3 follow=$4
    ends="BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT|UNKNOWN"
    while :; do
        shown=$(show "$job")
        if echo "$shown" | grep -Eq "JobState=($ends)"; then next=ended; else next=goes-on; fi
        size=$(wc -c 2>/dev/null <"$log") || size=$from
        [ "$size" -ge "$from" ] || from=0 # a requeued job begins its log again
        printf '%s\n' "$next $from $((size - from))" "$shown" ""
        [ "$size" = "$from" ] || tail -c "+$((from + 1))" "$log" | head -c "$((size - from))"
        from=$size
        [ "$next" = goes-on ] && [ "$follow" = yes ] || return 0
        sleep 1
    done
}

# Slurm forgets a job some minutes after its end, unless there is accounting.
show() {
    if shown=$(scontrol show job "$1" 2>&1); then
        echo "$shown" | grep -E '^ +(JobState|Requeue|RunTime|NodeList)='
    elif kept=$(sacct --noheader --parsable2 --allocations --format=State,ExitCode,Elapsed,NodeList --jobs="$1" \
        2>/dev/null) && [ -n "$kept" ]; then
        echo "$kept" | sed 's/^\([A-Z_]*\)[^|]*|\(.*\)|\(.*\)|\(.*\)$/JobState=\1 ExitCode=\2 RunTime=\3 NodeList=\4/'
    else
        case $shown in *"Invalid job id"*) state=UNKNOWN ;; *) state=UNREACHABLE ;; esac
        echo "JobState=$state"
    fi
}

# fetch FOLDER MARK: an archive of every file the job has made in its folder
fetch() {
    cd "$1"
    find . -type f -newer "$2" ! -path '*/__pycache__/*' -print0 | tar -c --null -T - -f -
}

cancel() { scancel "$1"; }

echo "there.sh begins" # whatever ~/.bashrc has printed ends here
echo "there.sh begins" >&2
"$@"
