#!/bin/bash
# The same munged with a copy of the cluster's key.
# Type it as root: ./local/cluster/namespaces.sh exec docs/labs/munge_fixed.sh
folder=$(mktemp --directory)
cp "${SLURM_CONF%/*}"/*.conf "$folder"
cp "${SLURM_CONF%/*}/key/munge.key" "$folder/munge.key"
chmod 400 "$folder/munge.key"
sed --in-place "s|socket=[^,]*|socket=$folder/socket|" "$folder/generated.conf"
munged --key-file="$folder/munge.key" --socket="$folder/socket" --pid-file="$folder/pid" \
    --seed-file="$folder/seed" --log-file="$folder/log" --force
timeout 60 env SLURM_CONF="$folder/slurm.conf" sinfo
status=$?
munged --stop --socket="$folder/socket"
rm --recursive --force "$folder"
exit $status
