"""@task: a function that runs here when it is called, and on a cluster with --submit --env NAME on the command line.

    @task(time="01:00:00", nodes=2, ntasks_per_node=1, gpus_per_node=2)
    def train(args: Namespace, job: JobContext | None = None) -> dict: ...

    python train.py --epochs 3                                        # here, and job is None
    python train.py --submit --env production --epochs 10             # there: a job of two nodes
    python train.py --submit --env production --nodes=4 --epochs 10   # whatever @task names can be said again
    python train.py --submit --env production --follow --fetch        # as with submit.py

Ranks are started by the repository's launchers: by launch_slurm_to_torch.sh if a task is a rank, and by
launch_slurm_with_torchrun.sh if a node's one task has several GPUs. What the function returns on rank 0 is written
to result.json in the job's output folder, checkpoints/JOB-ID, which `fetch` brings back.
"""

import functools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "aux")]

import slurmfile
import submit
from resilience.arguments import ArgumentParser, let_srun_read
from resilience.stop_request import write_whole


@dataclass(frozen=True)
class JobContext:
    """A rank's place in its job."""

    job_id: int
    node_list: str  # as Slurm writes it, node-[1-4]
    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    restart_count: int  # how often Slurm has started the job again
    output_dir: Path

    def torch_distributed_env(self) -> dict[str, str]:
        """The five variables by which torch.distributed finds the other ranks (its "env://")."""
        return {
            "MASTER_ADDR": os.environ["MASTER_ADDR"],
            "MASTER_PORT": os.environ["MASTER_PORT"],
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
        }


def find_job() -> JobContext | None:
    """This rank's place in the Slurm job that a launcher has started it in; None elsewhere, in a batch shell too."""
    env = os.environ
    if "SLURM_JOB_ID" not in env or "MASTER_ADDR" not in env:
        return None
    if "TORCHELASTIC_RUN_ID" in env or "SPAWN_RANKS" in env:  # they inherit Slurm's variables, which are their parent's
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK"
    elif int(env.get("SLURM_STEP_ID", 2**32)) < 2**31:
        names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID"
    else:
        return None
    rank, local_rank, world_size, node_rank = (int(env[name]) for name in names)
    return JobContext(
        job_id=int(env["SLURM_JOB_ID"]),
        node_list=env["SLURM_JOB_NODELIST"],
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        node_rank=node_rank,
        restart_count=int(env.get("SLURM_RESTART_COUNT", 0)),
        output_dir=Path("checkpoints", env["SLURM_JOB_ID"]),
    )


def task(**resources: str | int) -> Callable[[Callable], Callable]:
    """Decorates a function that takes `job`. `resources` are options of sbatch: nodes, ntasks_per_node or ntasks, time.

    Takes --submit and what belongs to it off sys.argv, and so has to stand above the script's own parser's call.
    """
    resources = {"nodes": 1, "gpus_per_node": 0} | resources

    def decorate(function: Callable) -> Callable:
        asked = take_options(resources) if function.__module__ == "__main__" else None

        @functools.wraps(function)
        def run_or_submit(*args, **kwargs):
            if asked is not None:
                sys.exit(submit_script(resources, asked))
            job = find_job()
            result = function(*args, job=job, **kwargs)
            if job and job.rank == 0:
                write_result(function.__name__, result, job.output_dir)
            return result

        return run_or_submit

    return decorate


def take_options(resources: dict[str, str | int]) -> Namespace | None:
    """What the command line says of the submission, taken off sys.argv; None without --submit."""
    if "--submit" not in sys.argv[1:]:
        return None
    description = "What job --submit asks for. The script's own arguments: --help without --submit."
    parser = ArgumentParser(description=description)
    parser.add_argument("--submit", action="store_true", help="as a job, as Slurmfile.toml says")
    submit.add_options(parser)
    for name, value in resources.items():
        help = f"as for sbatch (@task: {value})"
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=type(value), help=help)
    asked, sys.argv[1:] = parser.parse_known_args()
    if asked.env is None:
        parser.error("--submit needs --env NAME, one of the names in Slurmfile.toml")
    return asked


def submit_script(resources: dict[str, str | int], asked: Namespace) -> int:
    """Submits this script, with the arguments that are its own, by submit.py."""
    said = {name: value for name in resources if (value := getattr(asked, name)) is not None}
    options = resources | said
    for fault in filter(None, (slurmfile.option_fault(name.replace("_", "-")) for name in options)):
        slurmfile.fail(f"@task: {fault}")
    if "ntasks_per_node" not in options:  # else the launcher's header would say how many
        options["ntasks_per_node"] = -(-options.get("ntasks", options["nodes"]) // options["nodes"])
    gpus = int(str(options["gpus_per_node"]).rpartition(":")[2])  # a100:4
    way = "with_torchrun" if options["ntasks_per_node"] == 1 and gpus > 1 else "to_torch"
    script = os.path.relpath(sys.argv[0])
    asked.sbatch = submit.sbatch_options(options)
    asked.command = [os.path.relpath(REPOSITORY / f"launch_slurm_{way}.sh"), script, *sys.argv[1:]]
    return submit.interruptible(submit.submit, asked)


def write_result(name: str, result: object, folder: Path):
    """result.json, whole or not at all."""
    try:
        text = json.dumps(result, indent=1)
    except (TypeError, ValueError) as error:
        print(f"what {name} returns is no JSON ({error}): return numbers, strings, lists and dicts", file=sys.stderr)
        let_srun_read()
        os._exit(1)
    write_whole(folder / "result.json", text + "\n")
