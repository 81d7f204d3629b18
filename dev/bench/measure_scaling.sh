#!/bin/bash
# All figures of docs/scaling.md, on clusters of network namespaces on this machine (root). Leave it alone meanwhile.
#
# Usage: make scaling                        about an hour on two cores, and 10 GB of memory
#        RANKS="8 64" make scaling           without the largest numbers of ranks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH" CLUSTER="scaling-$$"
figures=docs/figures

trap './local/cluster/namespaces.sh down' EXIT
trap 'exit 130' INT TERM
mkdir --parents "$figures" log/scaling
./local/cluster/namespaces.sh up --nodes 2 --cpus 4 --gpus 2        # more CPUs than two: Slurm binds no rank to one

for size in 1x2 2x1; do                              # inside a node, across nodes; nodes x ranks
    ./local/cluster/namespaces.sh exec sbatch --wait --nodes="${size%x*}" --gpus-per-node="${size#*x}" \
        --output="log/scaling/allreduce-$size.out" launch_slurm_with_torchrun.sh \
        dev/bench/allreduce.py --json "$figures/allreduce_$size.json"
done
./local/cluster/namespaces.sh exec ./dev/bench/scaling.sh --sizes "1x1 1x2 2x1 2x2" \
    distributed/train_ddp.py --epochs 1 --batch-size 64 --dropout 0 --log-every 10 \
    --learning-rate 0.001                            # a higher one, and rounding grows
cp log/scaling/scaling.json "$figures"
python dev/bench/predict_scaling.py --measured "$figures"/allreduce_*.json --parameters 1199882 --tokens 64 \
    --check "$figures/scaling.json" --json "$figures/prediction.json"
for strategy in FSDP TP; do                          # of a language model of 4 layers; two ranks are one group
    script=distributed/train_${strategy,,}.py arguments=() group=()
    [[ "$strategy" == FSDP ]] || { arguments=(--across-nodes) && group=(--tensor-parallel 2); }
    ./local/cluster/namespaces.sh exec ./dev/bench/scaling.sh --sizes "1x1 1x2 2x1" --modes strong \
        --out "log/scaling_${strategy,,}" "$script" "${arguments[@]}" --steps 60 --warmup-steps 10 --log-every 10 \
        --batch-size 64 --dropout 0 --precision fp32
    cp "log/scaling_${strategy,,}/scaling.json" "$figures/scaling_${strategy,,}.json"
    python dev/bench/predict_scaling.py --measured "$figures"/allreduce_*.json --strategy "$strategy" "${group[@]}" \
        --parameters 804096 --layers 4 --width 128 --tokens 4096 \
        --check "$figures/scaling_${strategy,,}.json" --json "$figures/prediction_${strategy,,}.json"
done

./local/cluster/namespaces.sh down                   # the next one is as large as its largest number of ranks needs
# shellcheck disable=SC2086  # several numbers
python dev/bench/growth.py --ranks ${RANKS:-8 64 512 4096}
cp log/growth/growth.json "$figures"
python dev/figures/draw_scaling.py
