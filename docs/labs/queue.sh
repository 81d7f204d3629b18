#!/bin/bash
# Jobs that wait, each for another reason: what squeue says of them, and then what lets each of them
# start. As root, on a cluster that nobody else uses: ./local/cluster/namespaces.sh exec
# docs/labs/queue.sh
set -euo pipefail
submit() { sbatch --parsable --output=/dev/null --time=00:10:00 --job-name "$@"; }
hosts=$(scontrol show hostnames "$(sinfo --noheader --format=%N)")
first=${hosts%%$'\n'*} last=${hosts##*$'\n'} cpus=$(sinfo --noheader --format=%c)
count=$(($(wc --lines <<<"$hosts") - 1))         # nodes, less the last one, which is drained
tidy() { scancel "${jobs[@]}" && scontrol update NodeName="$last" State=RESUME; }

submit fails --wait --wrap=false >/dev/null || true
failed=$(squeue --noheader --states=FAILED --name=fails --format=%i | head --lines=1)
scontrol update NodeName="$last" State=DRAIN Reason=repair
others=$(submit others --nodelist="$first" --cpus-per-task=$((cpus - 1)) --wrap="sleep 600")
array=$(submit array --nodelist="$first" --array=0-1%1 --wrap="sleep 600")
jobs=("$others" "$array")
trap tidy EXIT
held=$(submit held --hold --wrap="sleep 1")
later=$(submit later --begin=now+1hour --wrap="sleep 1")
after=$(submit after --dependency=afterany:"$others" --wrap="sleep 1")
never=$(submit never --dependency=afterok:"$failed" --wrap="sleep 1")
drained=$(submit drained --nodelist="$last" --wrap="sleep 1")
large=$(submit large --nodes="$count" --cpus-per-task=2 --wrap="sleep 1")
behind=$(submit behind --nodes="$count" --cpus-per-task=2 --wrap="sleep 1")
jobs+=("$held" "$later" "$after" "$never" "$drained" "$large" "$behind")
sleep 10                           # until Slurm has looked at all of them
squeue --sort=i --format="%9j %8T %R"

scontrol release "$held"           # JobHeldUser
scontrol update JobId="$later" StartTime=now
scontrol update JobId="$never" Dependency=
scontrol update JobId="$array" ArrayTaskThrottle=2
scontrol update NodeName="$last" State=RESUME
sleep 5 && squeue --states=RUNNING --format="%9j %8T %R"
# In place of their end: Resources, Priority and Dependency are over.
scancel "$others" "$array"
deadline=$((SECONDS + 120))
until [[ -z "$(squeue --noheader)" ]]; do
    ((SECONDS < deadline)) || exit 1
    sleep 1
done
trap - EXIT
echo "The queue is empty."
