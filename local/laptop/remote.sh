# shellcheck shell=sh
# Runs one of the functions below, by name and with arguments, on the cluster over SSH or on this
# machine. See submission.py. POSIX sh, because the login shell may be any but csh,
# which cannot quote a line break.
set -eu

die() {
    echo "$*" >&2
    exit 1
}

# submit BASE NAME IMAGE VARIABLES LINKS LINK... sbatch [options] LAUNCHER [arguments]
# Makes a new folder NAME.XXXXXX in BASE, and submits there. Removes the folder if anything fails.
# Prints job id, folder and log.
# stdin: as many lines NAME=value as VARIABLES says, then a tar archive of the code. The values
# touch no disk and no command line; a line break in one is \n, a backslash \\.
submit() {
    base=$1 name=$2 image=$3 variables=$4 links=$5
    shift 5
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
    mkdir -p "$base"
    cd "$base"
    base=$(pwd)
    folder=$base/$(mktemp -d "$name.XXXXXX")
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 1' HUP INT TERM

    # -m dates the files now, because the clocks of two machines differ.
    message=$(tar -x -m --no-same-owner -f - -C "$folder" 2>&1) ||
        die "copying to $folder failed, it is removed: $(echo "$message" | head -n 1)"
    [ -e "$folder/.submission" ] || die "copying to $folder was interrupted, it is removed"
    while [ "$links" -gt 0 ]; do
        case $1 in /*) target=$1 ;; *) target=$base/$1 ;; esac
        if [ ! -e "$target" ]; then
            echo "note: no $target to link" >&2
        else
            name=${1%/}
            name=$folder/${name##*/}
            [ -e "$name" ] || ln -s "$target" "$name"
        fi
        links=$((links - 1))
        shift
    done
    if [ -n "$image" ]; then
        (cd "$folder" && ./aux/import_image.sh "$image" pytorch.sqsh >&2)
    fi
    cd "$folder"
    touch "$folder/.submission" # what changes from here on is the job's own
    job=$("$@") # sbatch
    trap - EXIT HUP INT TERM
    job=$(printf '%s\n' "$job" | tail -n 1) # a site's sbatch may print a banner before it
    job=${job%%;*} # in a federation the cluster's name follows
    printf '%s\n' "$job" "$folder"
    scontrol show job "$job" | sed -n 's/^ *StdOut=//p'
}

# wait_for JOB LOG FROM
# Prints the log from byte FROM on as it grows, until the job has ended, and each new state on
# stderr. Ends with the job's exit status, or 1 if it has none. slurmctld is asked at once, then
# every 15 seconds, because it serves everybody.
wait_for() {
    log=$2 from=$3 second=0 known=''
    ends="BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED"
    ends="^($ends|REVOKED|TIMEOUT)|Invalid job id"
    # Without a terminal sshd does not end its children when the connection is lost.
    while kill -0 "$PPID" 2>/dev/null; do
        [ $((second % 15)) != 0 ] || state=$(state "$1")
        size=$(wc -c 2>/dev/null <"$log") || size=$from
        [ "$size" -ge "$from" ] || from=0 # a requeued job may truncate its log
        [ "$size" = "$from" ] || tail -c "+$((from + 1))" "$log" | head -c "$((size - from))"
        from=$size
        # The job's last lines come before its end.
        [ "${state%, run time*}" = "$known" ] || echo "job $1: $state" >&2
        known=${state%, run time*}
        if echo "$state" | grep -Eq "$ends"; then
            case $state in COMPLETED*) exit 0 ;; esac
            status=$(scontrol show job "$1" | sed -n 's/.* ExitCode=\([0-9]*\):.*/\1/p')
            # 255 is that of a lost connection.
            case $status in '' | 0 | 255) exit 1 ;; esac
            exit "$status"
        fi
        sleep 1
        second=$((second + 1))
    done
    exit 255
}

# state JOB: in words. slurmctld forgets a job some minutes after its end; accounting keeps it.
state() {
    if shown=$(squeue --noheader --states=all --jobs="$1" \
        --format='%T (%r) on %N, run time %M' 2>&1) && [ -n "$shown" ]; then
        echo "$shown" | sed 's/ (None)//; s/ on ,/,/'
    elif kept=$(sacct --noheader --parsable2 --allocations --jobs="$1" \
        --format=State,NodeList,Elapsed 2>/dev/null) && [ -n "$kept" ]; then
        echo "$kept" | sed 's/|/ on /; s/|/, run time /'
    else
        echo "${shown:-Invalid job id}"
    fi
}

# fetch FOLDER: an archive of every file that the job wrote into its folder
fetch() {
    cd "$1"
    # A running job's log changes as tar reads it, which is tar's status 1.
    # By ctime, because cp -p and tar -x give a file an old mtime.
    find . -type f -cnewer .submission ! -path '*/__pycache__/*' -print0 |
        tar -c --null -T - --hard-dereference --warning=no-file-changed -f - || [ $? = 1 ]
}

echo "remote.sh is ready" # the output of ~/.bashrc ends here
"$@"
