#!/bin/bash
# Install Debian or Ubuntu packages, or say what is missing. Used by the Makefile.
#
# Usage: ./dev/install.sh PACKAGE ...
set -euo pipefail

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "Needed and not installed: $*. As root on Debian or Ubuntu: apt-get install $*" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install --yes --no-install-recommends -qq "$@" >/dev/null
