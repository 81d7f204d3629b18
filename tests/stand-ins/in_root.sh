#!/bin/bash
# What the stand-ins share: run a command with a container's folder as its root, in a mount
# namespace of its own.
#
# Usage: in_root.sh FOLDER MOUNTS rw|ro COMMAND [ARG ...]
# MOUNTS: HOST:CONTAINER or HOST:CONTAINER:none:OPTIONS, a line each
set -euo pipefail
if [[ "$1" != --in-namespace ]]; then
    exec unshare --mount --propagation slave "$0" --in-namespace "$@"
fi
root=$2 access=$4
readarray -t mounts <<<"${3%$'\n'}"
shift 4

mount --bind "$root" "$root"
for path in /proc /sys /dev /etc/hosts; do
    [[ -e "$root$path" ]] || touch "$root$path"
    mount --rbind "$path" "$root$path"
done
mount -t tmpfs tmpfs "$root/tmp"
for mount in "${mounts[@]}"; do
    IFS=: read -r from to kind options <<<"$mount"
    fail="enroot-mount: failed to mount: $from at $root$to"
    if [[ ! -e "$from" || ( -n "$kind" && "$kind" != none ) ]]; then
        echo "$fail: No such file or directory" >&2
        exit 1
    fi
    # Links are followed in the container.
    to=$root$(chroot "$root" /usr/bin/readlink --canonicalize-missing "$to")
    if [[ -z "$kind" || "$options" == *x-create=auto* ]]; then
        if [[ -d "$from" ]]; then
            mkdir --parents "$to"
        else
            mkdir --parents "${to%/*}"
            touch "$to"
        fi
    fi
    [[ -e "$to" ]] || { echo "$fail: No such file or directory" >&2; exit 1; }
    mount --rbind "$from" "$to"
    [[ ",$options," != *,ro,* ]] || mount --options remount,bind,ro "$to"
done
[[ "$access" == rw ]] || mount --options remount,bind,ro "$root"
exec chroot "$root" "$@"
