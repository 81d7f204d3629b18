#!/bin/bash
# A task of srun with Pyxis: enter.sh FOLDER MOUNTS IMAGE COMMAND. Pyxis unpacks a squashfs image on
# every node, for every step.
set -euo pipefail
folder=$1 mounts=${2//,/$'\n'} image=$3
shift 3
root=$(mktemp --directory "${ENROOT_STAND_IN:?}/pyxis.XXXX")
unsquashfs -no-progress -force -dest "$root" "$image" >/dev/null
exec "$(dirname "$0")/../in_root.sh" "$root" "$mounts"$'\n' rw /usr/bin/env --chdir="$folder" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
