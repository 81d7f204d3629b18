#!/bin/bash
# Runs a command in a Debian or Ubuntu of another release, whose packages have another version of
# Slurm, with this repository and this machine's Python at the same paths. As root.
#
# Usage: ./dev/slurm_root.sh RELEASE COMMAND [ARGUMENTS]
#        ./dev/slurm_root.sh trixie slurmd -V
#        MIRROR=http://... ./dev/slurm_root.sh noble slurmd -V
#
# Debian's bookworm has Slurm 22.05, trixie 24.11, forky and sid 26.05. Ubuntu's noble has 23.11,
# resolute 25.11. The first call makes the root, half a GiB in /var/lib/slurm-roots/RELEASE, from
# MIRROR, or from apt's mirror of Debian, or from the archive of Ubuntu.
set -euo pipefail
release=$1
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
root=/var/lib/slurm-roots/$release

if [[ ! -e "$root/ready" ]]; then
    rm -rf "$root"
    mkdir -p "$root"
    # What namespaces.sh and the tests call.
    packages=slurm-wlm,munge,iproute2,procps,make,git,openssh-client,squashfs-tools
    # Only sid has Apptainer, which mounts images with squashfuse.
    if [[ "$release" == sid ]]; then packages+=,apptainer,squashfuse,fuse3; fi
    options=(--variant=minbase --include="$packages")
    case "$release" in
        bookworm | trixie | forky | sid)
            # shellcheck disable=SC2016
            mirrors=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages')
            mirror=${MIRROR:-$(grep --max-count=1 '/debian/*$' <<<"$mirrors" || true)}
            script=sid
            ;;
        *)
            mirror=${MIRROR:-}
            script=gutsy
            options+=("--components=main,universe")
            # Debian 12 has no package with Ubuntu's keys.
            if [[ ! -e /usr/share/keyrings/ubuntu-archive-keyring.gpg ]]; then
                options+=(--no-check-gpg)
            fi
            ;;
    esac
    debootstrap "${options[@]}" "$release" "$root" "$mirror" "$script" >&2
    # Without localhost, torchrun by hand waits for ever.
    cp /etc/hosts "$root/etc/hosts"
    touch "$root/ready"
fi

# The root is entered by pivot_root, because nsenter would leave a chroot.
export root here
# shellcheck disable=SC2016
exec unshare --mount --propagation private bash -euo pipefail -c '
    mount --bind "$root" "$root"
    cd "$root"
    mount -t proc proc proc
    mount --rbind /sys sys
    mount --rbind /dev dev
    mount -t tmpfs run run
    mount --rbind /tmp tmp
    python=$(cd "$here" && .venv/bin/python -c "import sys; print(sys.base_prefix)")
    for folder in "$here" "$(realpath "$here/.venv")" "$python"; do
        if [[ "$folder" != /usr ]]; then
            mkdir -p "./$folder"
            mount --rbind "$folder" "./$folder"
        fi
    done
    mkdir -p .old
    pivot_root . .old
    cd "$here"
    umount --lazy /.old
    exec "$@"' bash "$@"
