#!/bin/bash
# Gives a local cluster accounting, as most sites have it: slurmdbd with MariaDB, the account A, and
# a QOS "urgent" whose jobs preempt those of the QOS "normal".
#
# Usage, on node-1: ./tests/scripts/variants/accounting.sh
# Then restart slurmctld. Needs slurmdbd and mariadb-server.
set -euo pipefail
folder=$(dirname "$SLURM_CONF")
database=$folder/database

mkdir "$database"
mariadb-install-db --no-defaults --user=root --datadir="$database" >/dev/null
mariadbd --no-defaults --user=root --datadir="$database" --bind-address=127.0.0.1 \
    --socket="$database/socket" --pid-file="$database/pid" </dev/null &>"$folder/database.log" &
until [[ -S "$database/socket" ]]; do sleep 0.1; done
mariadb --no-defaults --socket="$database/socket" <<'END_OF_SQL'
CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
END_OF_SQL

cat >"$folder/slurmdbd.conf" <<END_OF_FILE
DbdHost=node-1
SlurmUser=root
AuthInfo=socket=$folder/munge/socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
PidFile=$folder/slurmdbd.pid
LogFile=$folder/slurmdbd.log
END_OF_FILE
chmod 600 "$folder/slurmdbd.conf"
slurmdbd
cat >>"$folder/generated.conf" <<END_OF_FILE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=node-1
AccountingStoragePass=$folder/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
END_OF_FILE
sed -i 's/^PreemptType=.*/PreemptType=preempt\/qos/' "$folder/slurm.conf"

until sacctmgr --immediate add cluster local >/dev/null; do sleep 0.2; done
sacctmgr --immediate add account A >/dev/null
sacctmgr --immediate add user root account=A >/dev/null
sacctmgr --immediate modify qos normal set GraceTime=30 >/dev/null
sacctmgr --immediate add qos urgent Preempt=normal >/dev/null
sacctmgr --immediate modify user root set qos+=urgent >/dev/null
