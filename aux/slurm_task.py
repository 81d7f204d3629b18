"""Decorate a function with @task: when it is called, it runs here, or with --submit --env NAME on
the command line as a job.

    @task(time="01:00:00", nodes=2, ntasks_per_node=4)
    def train(args: Namespace, job: JobContext | None = None) -> dict: ...

    python train.py --epochs 3                                        # here; job is None
    python train.py --submit --env production --epochs 10             # a job on two nodes
    python train.py --submit --env production --nodes=4 --epochs 10   # overrides what @task says
    python train.py --submit --env production --follow --fetch        # as with submit.py

A job gets one GPU per task. gpus_per_node overrides that: in Slurmfile.toml's [NAME.submit], in
@task, or on the command line; 0 for none. The repository's launchers start the ranks:
launch_slurm_to_torch.sh if a task is a rank, launch_slurm_with_torchrun.sh if the one task of a
node has several GPUs, run_script.sh if the Slurmfile says type = "container". The value that the
function returns on rank 0 is written to result.json in the job's output folder,
checkpoints/JOB-ID; `fetch` copies it.
"""

import functools
import inspect
import json
import os
import re
import sys
from argparse import ArgumentTypeError, Namespace
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
    """This rank's place in its Slurm job, or None if no launcher has started it, as in a batch
    shell. Stops with a sentence if srun has started several ranks without a launcher."""
    env = os.environ
    # srun sets this variable, and env.sh unsets an inherited one.
    started = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in env and started != "1":
        tasks = f"srun started {started} tasks, and each would train alone"
        how = "add --submit --env NAME, or sbatch launch_slurm_to_torch.sh"
        sys.exit(f"{Path(sys.argv[0]).name}: {tasks}: {how}")
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
        output_dir=Path("checkpoints", env.get("RUN", env["SLURM_JOB_ID"])),
    )


def task(**resources: str | int) -> Callable[[Callable], Callable]:
    """Decorates a function, which may take `job`. `resources` are options of sbatch: nodes,
    ntasks_per_node, time, ...

    Removes --submit and the options that belong to it from sys.argv: decorate above the call of
    the script's parser.
    """

    def decorate(function: Callable) -> Callable:
        submission = None
        if function.__module__ == "__main__" and "--submit" in sys.argv[1:]:
            submission = parse_submission(resources)

        @functools.wraps(function)
        def run_or_submit(*args, **kwargs):
            if submission:
                sys.exit(submit_script(submission))
            job = find_job()
            parameter = inspect.signature(function).parameters.get("job")
            if parameter:
                if job is None and parameter.default is inspect.Parameter.empty:
                    how = "add --submit --env NAME, or write job=None in its definition"
                    sys.exit(f"{function.__name__} needs a job: {how}")
                kwargs["job"] = job
            result = function(*args, **kwargs)
            if job and job.rank == 0:
                write_result(result, job.output_dir)
            return result

        return run_or_submit

    return decorate


def whole_number(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_submission(resources: dict[str, str | int]) -> Namespace:
    """The options of the submission, which it removes from sys.argv. `options` of the result are
    sbatch's."""
    import submit

    description = "Submits the script as a job. Its own arguments: --help without --submit."
    parser = submit.ArgumentParser(description=description)
    parser.add_argument("--submit", action="store_true", help="submit a job")
    submit.add_options(parser)
    names = {"nodes": 1, "gpus_per_node": None} | resources
    for name, value in names.items():
        option = f"--{name.replace('_', '-')}"
        default = "one GPU per task" if value is None else value
        help = f"sbatch's option (default, from @task: {default})"
        if name in ("nodes", "ntasks", "ntasks_per_node"):
            # As text, so that the parser also checks the numbers of @task
            parser.add_argument(option, default=str(value), type=whole_number, help=help)
        else:
            parser.add_argument(option, default=value, help=help)
    args, sys.argv[1:] = parser.parse_known_args()
    if args.env is None:
        parser.error("--submit needs --env NAME, one of the names in Slurmfile.toml")
    args.options = {name: value for name in names if (value := getattr(args, name)) is not None}
    return args


def submit_script(args: Namespace) -> int:
    """Submits this script, with its own arguments, by submit.py. Returns the exit status."""
    import submit
    from submission import slurmfile

    options = args.options
    settings = slurmfile.read(slurmfile.find(), args.env)
    # Without the option, the number in the launcher's header would apply.
    tasks = -(-options.get("ntasks", options["nodes"]) // options["nodes"])
    tasks = options.setdefault("ntasks_per_node", tasks)
    even = options["nodes"] * tasks
    if options.get("ntasks", even) != even:
        wanted = f"{options['ntasks']} tasks on {options['nodes']} nodes, not {tasks} on each"
        slurmfile.fail(f"@task: {wanted}: write ntasks={even} or another number of nodes")
    by_slurmfile = {name.replace("-", "_"): value for name, value in settings["submit"].items()}
    if "gres" not in options | by_slurmfile:
        options.setdefault("gpus_per_node", by_slurmfile.get("gpus_per_node", tasks))
    gpus = str(options.get("gpus_per_node", tasks)).rpartition(":")[2]  # a100:4
    if tasks > 1 and gpus not in ("0", str(tasks)):
        wanted = f"{tasks} tasks and {gpus} GPUs on a node, but a task is a rank with a GPU"
        slurmfile.fail(f"@task: {wanted}: write gpus_per_node={tasks} or ntasks_per_node={gpus}")

    launcher = "launch_slurm_to_torch.sh"
    if settings["packaging"]["type"] == "container":
        launcher = "run_script.sh"
    elif tasks == 1 and gpus not in ("0", "1"):
        launcher = "launch_slurm_with_torchrun.sh"
    args.sbatch = submit.sbatch_options(options)
    script = os.path.relpath(sys.argv[0])
    args.command = [os.path.relpath(REPOSITORY / launcher), script, *sys.argv[1:]]
    return submit.without_traceback(submit.submit, args)


def write_result(result: object, folder: Path):
    """Writes result.json, whole or not at all. Values that JSON lacks are written as text."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".result.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(result, indent=1, default=str) + "\n")
    temporary.replace(folder / "result.json")
