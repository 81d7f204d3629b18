#!/bin/bash
# Turns a registry's image into the file from which Enroot makes containers. Run it once, on the
# login node.
#
# Usage: ./aux/import_image.sh [docker://IMAGE [FILE.sqsh]]
#        ./aux/import_image.sh 'docker://nvcr.io#nvidia/pytorch:25.10-py3'    # for an older driver
# Without arguments: NVIDIA's PyTorch, in pytorch.sqsh, where run_script.sh looks for it.
#
# It takes 20 GB and some minutes. Enroot unpacks in TMPDIR, and keeps layers in ~/.cache/enroot
# (ENROOT_CACHE_PATH). For images that are not public, see "Credentials" at
# https://github.com/NVIDIA/enroot/blob/main/doc/cmd/import.md
set -euo pipefail
die() { echo "import_image.sh: $*" >&2; exit 1; }

(($# <= 2)) || die "takes an image and a file, not $# arguments"
image=${1:-docker://nvcr.io#nvidia/pytorch:26.09-py3}
file=${2:-pytorch.sqsh}
[[ "$image" == *://* ]] || die "'$image' does not begin with docker://"
[[ ! -e "$file" ]] || die "$file exists already: remove it first to import $image"
command -v enroot >/dev/null || die "no enroot on $HOSTNAME: run it where Enroot is installed"

# A job that starts meanwhile sees the whole file or none.
partial=$file.$$.partial
trap 'rm --force "$partial"' EXIT
enroot import --output "$partial" "$image" || die "enroot cannot import $image, see above"
mv --no-target-directory "$partial" "$file"
echo "$file is $image"
