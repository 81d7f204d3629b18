#!/bin/bash
# The first program of every node of the Docker cluster. As root it sets up the jobs' user, the
# munge key and the configuration, then starts the daemons, whose messages `docker logs node-1`
# shows. The container ends when one of them ends.
#
# Usage: NODES=2 CPUS=2 entrypoint.sh
# Runs in a container whose host name is node-1, node-2, ... (see Dockerfile).
set -euo pipefail

repository=/data
cluster=/run/slurm-cluster # this container's own, except for the volumes key and state
export SLURM_CONF=$cluster/slurm.conf # sudo drops it

fail() {
    echo "entrypoint.sh on $HOSTNAME: $*" >&2
    exit 1
}

[[ "${NODES:-}" =~ ^[1-9][0-9]{0,2}$ ]] ||
    fail "NODES takes a number from 1 to 999, not '${NODES:-}'"
[[ "${CPUS:-}" =~ ^[1-9][0-9]{0,2}$ ]] || fail "CPUS takes a number from 1 to 999, not '${CPUS:-}'"
[[ "$HOSTNAME" =~ ^node-([0-9]+)$ ]] || fail "a node's host name is node-1, node-2, ..."
((BASH_REMATCH[1] <= NODES)) ||
    fail "the cluster has $NODES nodes: NODES=${BASH_REMATCH[1]} docker compose up -d ..."
! pidof -q munged || fail "this node is up already"

# The user gets the uid of the repository's owner, so that the files jobs write there belong to
# whoever cloned it. If that is root, as it always seems to be under a rootless engine, the user may
# do there what users may do in /tmp: add files, but not change those of others.
read -r uid gid < <(stat --format="%u %g" "$repository")
if ((uid == 0)); then
    uid=10000 gid=10000
    folders=("$repository" "$repository"/{data,checkpoints,log})
    mkdir --parents "${folders[@]}"
    chgrp "$gid" "${folders[@]}"
    chmod g+w,+t "${folders[@]}"
fi
setpriv --reuid "$uid" --regid "$gid" --clear-groups test -w "$repository" ||
    fail "user $uid may not write into the repository, where jobs leave their logs:" \
        "clone it into a folder of your own"
getent group "$gid" >/dev/null || groupmod --gid "$gid" user
sed --in-place "s/^user:x:[0-9]*:[0-9]*:/user:x:$uid:$gid:/" /etc/passwd
chown --recursive "$uid:$gid" ~user

# The first node to start makes the key, whole or not at all. `docker compose down --volumes`
# deletes it.
key="$cluster/key/munge.key"
if [[ ! -e "$key" ]]; then
    (umask 377 && head --bytes=1024 /dev/urandom >"$key.$HOSTNAME")
    ln "$key.$HOSTNAME" "$key" 2>/dev/null || [[ -e "$key" ]] || fail "cannot make $key"
    rm --force "$key.$HOSTNAME"
fi

# Remove what a killed container left behind, then write the configuration, with real GPUs if there
# are any.
rm --recursive --force "$cluster/munge"
mkdir --parents "$cluster"/{munge,spool}
shopt -s nullglob
gpus=(/dev/nvidia[0-9]*)
/opt/cluster/configure.sh "$cluster" "$NODES" "$CPUS" "${#gpus[@]}" none
printf '%s' "${gpus[@]/#/$'\nName=gpu File='}" >"$cluster/gres.conf"

munged --key-file="$key" --socket="$cluster/munge/socket" --pid-file="$cluster/munge/pid" \
    --seed-file="$cluster/munge/seed" --log-file="$cluster/munge/log"
# A restarted node has lost its ranks, but is back before Slurm misses it, so the other ranks would
# wait for them. Set to DOWN for a moment, it makes Slurm end or requeue its jobs; slurmd's
# registration brings it up again.
if (: </dev/tcp/node-1/6817) 2>/dev/null; then
    scontrol update NodeName="$HOSTNAME" State=DOWN Reason=restarted || true
fi
trap 'kill $(jobs -p); wait; exit 0' TERM INT # docker stop: slurmctld saves its state
if [[ "$HOSTNAME" == node-1 ]]; then
    slurmctld -D &
fi
slurmd -D -N "$HOSTNAME" &
wait -n || true
fail "a daemon has ended, see above"
