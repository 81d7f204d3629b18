#!/bin/bash
# sinfo on a machine whose munge key is not the cluster's: here a munged with a key of its own, in a
# folder of its own. Type it as root: ./local/cluster/namespaces.sh exec
# docs/labs/munge_broken.sh
folder=$(mktemp --directory)
cp "${SLURM_CONF%/*}"/*.conf "$folder"
head --bytes=1024 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"
sed --in-place "s|socket=[^,]*|socket=$folder/socket|" "$folder/generated.conf"
munged --key-file="$folder/munge.key" --socket="$folder/socket" --pid-file="$folder/pid" \
    --seed-file="$folder/seed" --log-file="$folder/log" --force
timeout 60 env SLURM_CONF="$folder/slurm.conf" sinfo
status=$?
munged --stop --socket="$folder/socket"
rm --recursive --force "$folder"
exit $status
