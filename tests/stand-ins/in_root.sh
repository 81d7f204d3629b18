#!/bin/bash
# What the stand-ins share: run a command with a container's folder as its root, in a mount namespace of its own.
#
# Usage: in_root.sh FOLDER "HOST:CONTAINER,..." rw|ro COMMAND [ARG ...]
set -euo pipefail
if [[ "$1" != --in-namespace ]]; then
    exec unshare --mount --propagation slave "$0" --in-namespace "$@"
fi
root=$2 access=$4
IFS=, read -r -a mounts <<<"$3"
shift 4

mount --bind "$root" "$root"
for path in /proc /sys /dev /etc/hosts; do
    [[ -e "$root$path" ]] || touch "$root$path"
    mount --rbind "$path" "$root$path"
done
mount -t tmpfs tmpfs "$root/tmp"
for mount in "${mounts[@]}"; do
    from=${mount%%:*} to=$root${mount#*:}
    if [[ -d "$from" ]]; then mkdir --parents "$to"; else mkdir --parents "${to%/*}" && touch "$to"; fi
    mount --rbind "$from" "$to"
done
[[ "$access" == rw ]] || mount --options remount,bind,ro "$root"
for fd in /proc/self/fd/*; do                        # Enroot closes them all: a lock of the caller's is not held on
    fd=${fd##*/}
    ((fd < 3 || fd == 255)) || exec {fd}>&-
done
exec chroot "$root" "$@"
