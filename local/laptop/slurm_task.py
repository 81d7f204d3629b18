"""Decorate a function with @task. When it is called it runs here, or with --submit as a job.

    @task(time="01:00:00", nodes=2, ntasks_per_node=4)
    def train(args: Namespace, job: JobContext | None = None) -> dict: ...

    python train.py --epochs 3                                        # here; job is None
    python train.py --submit --env production --epochs 10             # a job on two nodes
    python train.py --submit --env production --nodes=4 --epochs 10   # overrides what @task says
    python train.py --submit --env production --fetch                 # waits, and brings the result

A task is a rank with one GPU. gpus_per_node=0, in Slurmfile.toml's [NAME.submit], in @task, or on
the command line, is for a cluster without GPUs. launch_slurm_to_torch.sh starts the ranks, and
run_script.sh if the Slurmfile says type = "container". The value that the function returns on rank
0 is written to result.json in the job's output folder, checkpoints/JOB-ID.
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
from math import isfinite
from pathlib import Path

# submission.py is imported only with --submit: it needs Python 3.11, and a job may have 3.10.
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "distributed"))


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
    import submission

    description = "Submits the script as a job. Its own arguments: --help without --submit."
    parser = submission.ArgumentParser(description=description)
    parser.add_argument("--submit", action="store_true", help="submit a job")
    submission.add_options(parser)
    names = {"nodes": 1, "ntasks_per_node": 1, "gpus_per_node": None} | resources
    for name, value in names.items():
        option = f"--{name.replace('_', '-')}"
        default = "one GPU per task" if value is None else value
        help = f"sbatch's option (default, from @task: {default})"
        if name in ("nodes", "ntasks_per_node"):
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
    """Submits this script with its own arguments. Returns the exit status."""
    import submission

    settings = submission.read_slurmfile(args.env)
    tasks = args.options["ntasks_per_node"]
    if "gpus_per_node" not in settings["submit"]:
        args.options.setdefault("gpus_per_node", tasks)
    gpus = str((settings["submit"] | args.options)["gpus_per_node"]).rpartition(":")[2]  # a100:4
    if gpus not in ("0", str(tasks)):
        wanted = f"{tasks} tasks and {gpus} GPUs on a node, but a task is a rank with a GPU"
        submission.fail(f"@task: {wanted}: write gpus_per_node={tasks} or ntasks_per_node={gpus}")
    in_container = settings["packaging"]["type"] == "container"
    launcher = "run_script.sh" if in_container else "launch_slurm_to_torch.sh"
    script = os.path.relpath(os.path.realpath(sys.argv[0]), REPOSITORY)
    args.command = [launcher, script, *sys.argv[1:]]
    return submission.without_traceback(submission.submit, args)


def write_result(result: object, folder: Path):
    """Writes result.json, whole or not at all. Keys and values that JSON lacks, nan for example,
    are written as text."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".result.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(in_json(result), indent=1) + "\n")
    temporary.replace(folder / "result.json")


def in_json(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
