#!/bin/bash
# Strong and weak scaling of a train script: the same training on more and more ranks, each size a Slurm job of its own.
#
# Usage: ./dev/bench/scaling.sh [options] SCRIPT [its arguments]        on a login node, one job after the other
#   --sizes "1x1 1x2 2x2"    nodes x ranks of a node; figures are relative to the first
#   --modes "strong weak"    strong: with the arguments as they are; weak: the number after --batch-size times the ranks
#   --rounds 3               each size so often, in turns; the medians are shown
#   --launcher launch_slurm_with_torchrun.sh
#   --cpus-per-rank 1
#   --cpu                    ask for no GPUs (else for one a rank)
#   --out log/scaling        folder for the jobs' logs, and scaling.json
#
#   ./dev/bench/scaling.sh --sizes "1x1 1x8 2x8" distributed/train_ddp.py --epochs 1 --batch-size 128 --log-every 5 \
#       --dropout 0
#   SBATCH_ACCOUNT=A SBATCH_PARTITION=P ./dev/bench/scaling.sh ...
#
# Throughput and losses are those of the script's own log lines: loss=, images_per_second= or tokens_per_second=. Status 1
# when strong scaling has changed the losses: say --dropout 0 where ranks drop other activations. The checkpoints of
# these jobs are removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
die() { echo "scaling.sh: ${*//[[:cntrl:]]/ }" >&2; exit 1; }

command="$*"
sizes="1x1 1x2 2x2" modes="strong weak" rounds=3 launcher=launch_slurm_with_torchrun.sh cpus=1 gpus=1 out=log/scaling
while (($#)); do
    case "$1" in
        --cpu) gpus=0 && shift && continue ;;
        -h | --help) sed --quiet '2,/^[^#]/ { s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}" && exit ;;
        --sizes | --modes | --rounds | --launcher | --cpus-per-rank | --out) (($# > 1)) || die "$1 takes a value" ;;
        -*) die "there is no option $1 before the script: --help lists them" ;;
        *) break ;;
    esac
    case "$1" in
        --sizes) sizes=$2 ;;
        --modes) modes=$2 ;;
        --rounds) rounds=$2 ;;
        --launcher) launcher=$2 ;;
        --cpus-per-rank) cpus=$2 ;;
        --out) out=$2 ;;
    esac
    shift 2
done
(($#)) || die "which train script? as in: ./dev/bench/scaling.sh distributed/train_ddp.py --batch-size 64 --dropout 0"
[[ -f "$1" ]] || die "no such train script: $1 (in $PWD)"
[[ -f "$launcher" ]] || die "no such launcher: $launcher (in $PWD)"
[[ "$sizes" =~ ^[1-9][0-9]*x[1-9][0-9]*(\ [1-9][0-9]*x[1-9][0-9]*)*$ ]] ||
    die "--sizes takes nodes x ranks of a node, as \"1x1 1x2 2x2\", not '$sizes'"
[[ "$modes" =~ ^(strong|weak|strong weak)$ ]] || die "--modes takes strong, weak or \"strong weak\", not '$modes'"
[[ "$rounds" =~ ^[1-9][0-9]*$ ]] || die "--rounds takes a whole number of at least 1, not '$rounds'"
[[ "$cpus" =~ ^[1-9][0-9]*$ ]] || die "--cpus-per-rank takes a whole number of at least 1, not '$cpus'"
[[ "$modes" != *weak* || "$* " =~ \ --batch-size\ [1-9][0-9]*\  ]] ||
    die "weak scaling multiplies the number after --batch-size: give the script one, or say --modes strong"
[[ " $* " != *" --checkpoint-dir"* ]] ||
    die "leave --checkpoint-dir out: every job has a folder of its own, which is removed when the job has ended"
command -v sbatch >/dev/null || die "no sbatch here: run it where jobs are submitted"

name=scaling-$$
trap 'scancel --name="$name" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

run() {                                              # mode, size, round, script and arguments
    local ranks=$((${2%x*} * ${2#*x})) per_node=${2#*x} log=$out/$1-$2-$3.out arguments=("${@:4}") i job
    for ((i = 1; i < ${#arguments[@]}; i++)); do
        [[ "$1" != weak || "${arguments[i - 1]}" != --batch-size ]] || arguments[i]=$((arguments[i] * ranks))
    done
    echo "Round $3 of $rounds, $1 scaling, $2: ${arguments[*]}"
    sbatch --wait --parsable --job-name="$name" --output="$log" --nodes="${2%x*}" --ntasks-per-node="$per_node" \
        --gpus-per-node=$((gpus * per_node)) --cpus-per-task="$cpus" \
        "$launcher" "${arguments[@]}" >"$out/job" &
    wait "$!" || die "the job of $1 scaling on $2 has failed, see $log"
    job=$(<"$out/job")
    rm --recursive --force "checkpoints/${job%%;*}" "log/${job%%;*}" "$out/job"    # after the ; is the cluster's name
}

mkdir --parents "$out"
rm --force "$out"/{strong,weak}-*.out                # an earlier call's
for ((round = 1; round <= rounds; round++)); do
    for mode in $modes; do
        for size in $sizes; do
            [[ "$mode $size" == "weak 1x1" && "$modes" != weak ]] || run "$mode" "$size" "$round" "$@"
        done
    done
done
python3 dev/bench/read_scaling.py --command "$command" "$out"
