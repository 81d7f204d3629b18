"""@task: a function that runs here when it is called, and as a job with --submit --env NAME on
the command line.

    @task(time="01:00:00", nodes=2, ntasks_per_node=4)
    def train(args: Namespace, job: JobContext | None = None) -> dict: ...

    python train.py --epochs 3                                        # here; job is None
    python train.py --submit --env production --epochs 10             # a job on two nodes
    python train.py --submit --env production --nodes=4 --epochs 10   # overrides what @task says
    python train.py --submit --env production --follow --fetch        # as with submit.py

A job gets one GPU per task if the cluster has GPUs. gpus_per_node overrides that: in @task, in
Slurmfile.toml's [NAME.submit], or on the command line; 0 for none. The repository's launchers
start the ranks: launch_slurm_to_torch.sh if a task is a rank, launch_slurm_with_torchrun.sh if
the one task of a node has several GPUs, run_script.sh if the Slurmfile says type = "container".
The value that the function returns on rank 0 is written to result.json in the job's output
folder, checkpoints/JOB-ID; `fetch` copies it.
"""

import functools
import inspect
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# submit and submission are imported only when submitting: they need Python 3.11, and a job may have
# 3.10.
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "aux")]


@dataclass(frozen=True)
class JobContext:
    """A rank's place in its job."""

    job_id: int
    node_list: str  # as Slurm writes it, node-[1-4]
    rank: int
    local_rank: int
    world_size: int
    node_rank: int
    restart_count: int  # how often Slurm has requeued the job
    output_dir: Path

    def torch_distributed_env(self) -> dict[str, str]:
        """The five variables that torch.distributed reads (its "env://")."""
        return {
            "MASTER_ADDR": os.environ["MASTER_ADDR"],
            "MASTER_PORT": os.environ["MASTER_PORT"],
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
        }


def find_job() -> JobContext | None:
    """This rank's place in the Slurm job in which a launcher started it; None elsewhere, as in a
    batch shell.

    Ends the program with a sentence if srun started several tasks without a launcher, because each
    would run alone.
    """
    env = os.environ
    # Batch and interactive shells have a number near 2**32, or with Slurm 26.05 below 0.
    in_step = 0 <= int(env.get("SLURM_STEP_ID", -1)) < 2**31
    if in_step and "RANK" not in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        tasks = (
            f"srun started {env['SLURM_NTASKS']} tasks without a launcher, and each would train "
            "alone"
        )
        sys.exit(
            f"{Path(sys.argv[0]).name}: {tasks}: add --submit --env NAME, or sbatch "
            "launch_slurm_to_torch.sh"
        )
    if "SLURM_JOB_ID" not in env or "RANK" not in env:
        return None
    return JobContext(
        job_id=int(env["SLURM_JOB_ID"]),
        node_list=env["SLURM_JOB_NODELIST"],
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        node_rank=int(env.get("GROUP_RANK") or env.get("SLURM_NODEID", 0)),
        restart_count=int(env.get("SLURM_RESTART_COUNT", 0)),
        output_dir=Path("checkpoints", env["SLURM_JOB_ID"]),
    )


def task(**resources: str | int) -> Callable[[Callable], Callable]:
    """Decorates a function, which may take `job`. `resources` are options of sbatch: nodes,
    ntasks_per_node, time, ...

    Removes --submit and the options that belong to it from sys.argv: decorate above the call of
    the script's parser.
    """
    resources = {"nodes": 1, "gpus_per_node": None} | resources

    def decorate(function: Callable) -> Callable:
        submit_args = parse_submission(resources) if function.__module__ == "__main__" else None

        @functools.wraps(function)
        def run_or_submit(*args, **kwargs):
            if submit_args is not None:
                sys.exit(submit_script(resources, submit_args))
            job = find_job()
            parameter = inspect.signature(function).parameters.get("job")
            if parameter is not None:
                if job is None and parameter.default is inspect.Parameter.empty:
                    sys.exit(
                        f"{function.__name__} needs a job: add --submit --env NAME, or write "
                        "job=None in its definition to run it here"
                    )
                kwargs["job"] = job
            result = function(*args, **kwargs)
            if job and job.rank == 0:
                write_result(function.__name__, result, job.output_dir)
            return result

        return run_or_submit

    return decorate


def parse_submission(resources: dict[str, str | int | None]) -> Namespace | None:
    """The options of the submission, removed from sys.argv; None without --submit."""
    if "--submit" not in sys.argv[1:]:
        return None
    import submit
    from resilience.arguments import ArgumentParser

    description = (
        "Submits the script as a job. For the script's own arguments, use --help without --submit."
    )
    parser = ArgumentParser(description=description)
    parser.add_argument(
        "--submit", action="store_true", help="submit a job to a cluster of Slurmfile.toml"
    )
    submit.add_options(parser)
    for name, value in resources.items():
        default = "one per task, if the cluster has GPUs" if value is None else value
        kind = str if value is None else type(value)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            type=kind,
            help=f"as for sbatch (@task: {default})",
        )
    submit_args, sys.argv[1:] = parser.parse_known_args()
    if submit_args.env is None:
        parser.error("--submit needs --env NAME, one of the names in Slurmfile.toml")
    return submit_args


def submit_script(resources: dict[str, str | int | None], submit_args: Namespace) -> int:
    """Submits this script, with its own arguments, by submit.py. Returns the exit status."""
    import submit
    from submission import slurmfile

    if not Path("env.sh").is_file():
        slurmfile.fail(f"no env.sh in {Path.cwd()}: cd to the repository")
    typed = {name: value for name in resources if (value := getattr(submit_args, name)) is not None}
    options = {name: value for name, value in (resources | typed).items() if value is not None}
    for fault in filter(None, (slurmfile.option_fault(name.replace("_", "-")) for name in options)):
        slurmfile.fail(f"@task: {fault}")
    for name in sorted({"nodes", "ntasks", "ntasks_per_node"} & options.keys()):
        if not str(options[name]).isdecimal():
            slurmfile.fail(f"@task: {name} is {options[name]!r}: write a whole number")
        options[name] = int(options[name])
    if "ntasks_per_node" not in options:  # else the number in the launcher's header would apply
        options["ntasks_per_node"] = -(-options.get("ntasks", options["nodes"]) // options["nodes"])
    environment = slurmfile.read(slurmfile.find(), submit_args.env)
    tasks, settings = options["ntasks_per_node"], environment["submit"]
    gpus = str(
        options.get(
            "gpus_per_node", settings.get("gpus_per_node", settings.get("gpus-per-node", tasks))
        )
    )
    gpus = gpus.rpartition(":")[2]  # a100:4
    if tasks > 1 and gpus.isdigit() and int(gpus) not in (0, tasks):
        wanted = (
            f"{tasks} tasks and {gpus} GPUs on each of {options['nodes']} nodes, but a task is a "
            "rank with a GPU"
        )
        slurmfile.fail(
            f"@task: {wanted}: write gpus_per_node={tasks}, or ntasks_per_node={gpus} without "
            "ntasks"
        )
    launcher = "launch_slurm_to_torch.sh"
    if environment["packaging"]["type"] == "container":
        launcher = "run_script.sh"
    elif tasks == 1 and gpus.isdigit() and int(gpus) > 1:
        launcher = "launch_slurm_with_torchrun.sh"
    even = tasks * options["nodes"]
    if options.get("ntasks", even) != even:
        wanted = (
            f"{options['ntasks']} tasks on {options['nodes']} nodes, but {launcher} starts as many "
            "on each"
        )
        slurmfile.fail(f"@task: {wanted}: write ntasks={even}, or fewer nodes")
    script = os.path.relpath(sys.argv[0])
    submit_args.sbatch, submit_args.default_gpus = submit.sbatch_options(options), tasks
    submit_args.command = [os.path.relpath(REPOSITORY / launcher), script, *sys.argv[1:]]
    return submit.interruptible(submit.submit, submit_args)


def write_result(name: str, result: object, folder: Path):
    """result.json: the whole file or none."""
    try:
        text = json.dumps(result, indent=1)
    except (TypeError, ValueError) as error:
        print(
            f"the result of {name} is not JSON ({error}): return numbers, strings, lists and dicts",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(1)  # at once: other ranks and gloo's threads may still be running
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".result.json.{os.getpid()}.tmp"
    temporary.write_text(text + "\n")
    temporary.replace(folder / "result.json")
