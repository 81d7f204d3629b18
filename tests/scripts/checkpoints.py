"""Run under torchrun by tests/test_checkpoint.py, on two ranks: what checkpoint.py makes of faults.

    torchrun ... checkpoints.py FOLDER

Rank 0 prints a line of JSON for each scenario: its name, and what it has found.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import checkpoint
import tensor_parallel_by_hand

dist.init_process_group("gloo")
rank = dist.get_rank()
FOLDER = Path(sys.argv[1])


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that is split over the ranks, after so many steps."""
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def weight(model: torch.nn.Module) -> list:
    return model.weight.full_tensor().flatten().tolist()


AFTER = {steps: weight(trained(steps)[0]) for steps in (1, 2, 3)}


def saved(name: str, steps: tuple = (1, 2), **options) -> checkpoint.Folder:
    """A folder with checkpoints after these steps."""
    runs = checkpoint.Folder(FOLDER / name, **options)
    for step in steps:
        runs.save(step, *trained(step))
    runs.wait()
    return runs


def attempt(call) -> dict:
    """What the call returns or how it ends, and what it complains of."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            found = {"returns": call()}
        except SystemExit as end:
            found = {"ends": end.code}
    return found | {"says": said.getvalue()}


def loaded(name: str, **options) -> dict:
    model, optimizer = trained(0)
    found = attempt(lambda: checkpoint.Folder(FOLDER / name, **options).load(model, optimizer))
    after = [step for step, expected in AFTER.items() if weight(model) == expected]
    moments = optimizer.state[model.weight].get("step", torch.zeros(()))
    return found | {"weights": after, "moments": moments.item()}


def damage(path: Path, call):
    if rank == 0:
        call(path)
    dist.barrier()


def job(number: int, restarts: int):
    os.environ |= {"SLURM_JOB_ID": str(number), "SLURM_RESTART_COUNT": str(restarts)}


def names(name: str) -> list[str]:
    return sorted(path.name for path in (FOLDER / name).iterdir())


# --- scenarios ---


def whole():
    saved("whole", (1, 2, 3))
    return loaded("whole") | {"names": names("whole")}


def kinds_of_state(model, optimizer) -> dict:
    """What a run may have besides: with a state_dict, of which one is split, or a plain value."""
    average = fully_shard(torch.nn.Linear(16, 16))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return {"average": average, "schedule": schedule, "best": 9.0, "place": {"shard": 0}}


def whatever_else():
    """A run that resumes has all of it as it was."""
    runs, (model, optimizer) = checkpoint.Folder(FOLDER / "else"), trained(1)
    extra = kinds_of_state(model, optimizer)
    optimizer.step()
    extra["schedule"].step()
    extra |= {"best": 0.5, "place": {"shard": 7}}
    with torch.no_grad():
        extra["average"].weight.fill_(3)
    runs.save(1, model, optimizer, extra)
    runs.wait()

    model, optimizer = trained(0)
    again = kinds_of_state(model, optimizer)
    found = attempt(lambda: checkpoint.Folder(FOLDER / "else").load(model, optimizer, again))
    found |= {name: again[name] for name in ("best", "place")}
    found["average"] = set(weight(again["average"])) == {3.0}
    return found | {"schedule": [again["schedule"].last_epoch, optimizer.param_groups[0]["lr"]]}


def without_what_it_asks_for():
    """A checkpoint that lacks a state is not taken for one that has it."""
    saved("without", (1,))
    return attempt(lambda: checkpoint.Folder(FOLDER / "without").load(*trained(0), {"best": 1}))


def copies_of_what_all_hold():
    """Only rank 0 copies a model that is whole on every rank."""
    runs, model = checkpoint.Folder(FOLDER / "whole-model"), torch.nn.Linear(4, 4)
    given, async_save = [], checkpoint.dcp.async_save

    def seen(state, **options):
        given.append(len(state["model"]))
        return async_save(state, **options)

    checkpoint.dcp.async_save = seen
    runs.save(1, model, torch.optim.AdamW(model.parameters()))
    checkpoint.dcp.async_save = async_save
    return {"returns": runs.wait(), "copied": given}


def one_to_keep():
    """The newest is damaged, and a run that resumes from the one before keeps what it saves."""
    saved("keep", (1, 3))
    damage(FOLDER / "keep/step_3/.metadata", os.unlink)
    runs, (model, optimizer) = checkpoint.Folder(FOLDER / "keep", keep=1), trained(0)
    found = attempt(lambda: runs.load(model, optimizer))
    runs.save(2, *trained(2))
    runs.wait()
    dist.barrier()  # rank 0 gives the name, and deletes
    found["names"] = names("keep")
    runs.save(3, *trained(3))
    return found | {"replaced": runs.wait()} | {"weights": loaded("keep")["weights"]}


def unseen_by_one():
    """On NFS a rank may see a new folder later than rank 0."""
    saved("unseen", (1,))
    steps = checkpoint.steps
    if rank == 1:
        checkpoint.steps = lambda path: []
    found = loaded("unseen")
    checkpoint.steps = steps
    return found


def two_names():
    """By hand the default is the second of the start, and each rank has its own clock."""
    found = attempt(lambda: str(checkpoint.Folder(FOLDER / f"second-{rank}").path))
    return {"name": Path(found["returns"]).name} | found


def saved_twice():
    """A stop in a step that has been saved, or read, writes nothing again. The name of a checkpoint
    is on the disk before the save counts."""
    synced, fsync = [], os.fsync

    def seen(file):
        synced.append(os.path.isdir(f"/proc/self/fd/{file}"))
        fsync(file)

    checkpoint.os.fsync = seen
    runs = saved("twice", (1,))
    checkpoint.os.fsync = fsync
    dist.barrier()  # rank 0 gives the name
    before = (FOLDER / "twice/step_1").stat().st_ino
    runs.save(1, *trained(1))
    runs.wait()
    again = (FOLDER / "twice/step_1").stat().st_ino != before
    runs = checkpoint.Folder(FOLDER / "twice")
    attempt(lambda: runs.load(*trained(0)))
    runs.save(1, *trained(1))
    runs.wait()
    read = (FOLDER / "twice/step_1").stat().st_ino != before
    return {"again": again, "read": read, "folder": synced[-1:]}


def copied_at_once():
    """What a step changes after save() has returned is not in the checkpoint."""
    runs, (model, optimizer) = checkpoint.Folder(FOLDER / "copied"), trained(1)
    write_data = FileSystemWriter.write_data

    def late(self, *arguments):
        changed.wait()
        return write_data(self, *arguments)

    import threading

    changed = threading.Event()
    FileSystemWriter.write_data = late
    runs.save(1, model, optimizer)
    with torch.no_grad():
        model.weight.zero_()
    changed.set()
    runs.wait()
    FileSystemWriter.write_data = write_data
    return loaded("copied")


def truncated():
    saved("truncated")
    damage(FOLDER / "truncated/step_2/__1_0.distcp", lambda path: os.truncate(path, 100))
    return loaded("truncated")


def missing_file():
    saved("missing")
    damage(FOLDER / "missing/step_2/__0_0.distcp", os.unlink)
    return loaded("missing")


def all_damaged():
    saved("damaged")
    for step in (1, 2):
        damage(FOLDER / f"damaged/step_{step}/.metadata", os.unlink)
    return loaded("damaged")


def killed_while_it_saved():
    """What another program has left stays, as does what somebody has moved."""
    saved("killed", (1,))
    for name in (".step_2.7.0.node-1.gpu.99", ".step_50.part", "step_9.bad"):
        new = FOLDER / "killed" / name
        damage(FOLDER / "killed/step_1", lambda path, new=new: shutil.copytree(path, new))
    return loaded("killed") | {"names": names("killed")}


def full_disk():
    """A later save goes well again."""
    runs = saved("full", (1,))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    runs.save(2, *trained(2))
    found = attempt(runs.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["names"] = names("full")
    runs.save(3, *trained(3))
    return found | {"then": runs.wait(), "later": names("full")}


def away():
    """A folder that cannot be read is not an empty one. An old checkpoint that cannot be found
    cannot be deleted, and that is no fault of the new one."""

    def steps(path):
        raise PermissionError(13, "Permission denied")

    runs, found = saved("away", (1,)), checkpoint.steps
    checkpoint.steps = steps
    begins = attempt(lambda: checkpoint.Folder(FOLDER / "away", resume=False))
    runs.save(2, *trained(2))
    checkpoint.steps, written = found, runs.wait()
    dist.barrier()  # rank 0 gives the name
    return begins | {"written": written, "names": names("away")}


def empty_owner():
    """As a start leaves it that is killed, or has no room, while it writes the file."""
    saved("empty", (1,))
    damage(FOLDER / "empty/owner", lambda path: os.truncate(path, 0))
    return loaded("empty")


def not_finite():
    runs, (model, optimizer) = saved("finite", (1,)), trained(2)
    if rank == 1:
        model.weight.to_local().data[0, 0] = float("nan")
    return attempt(lambda: runs.save(2, model, optimizer)) | {"names": names("finite")}


def own_weights():
    """Each rank has experts of its own under a name for all: as plain tensors, also those that
    tensor parallelism by hand leaves it, and as DTensors. Copies that only rounding parts are no
    weights of its own."""
    whole = torch.nn.Linear(4, 4)
    mine = torch.full((4, 3), rank + 1.0)
    kinds = {
        "plain": mine,
        "dtensor": DTensor.from_local(mine, init_device_mesh("cpu", (2,)), [Shard(0)]),
        "by_hand": tensor_parallel_by_hand.RowLinear(whole, rank, 2).weight.detach(),
        "copies": torch.full((4, 3), 1 + 1e-7 * rank),
    }
    return {name: saved_and_loaded(name, weight) for name, weight in kinds.items()}


def saved_and_loaded(name: str, weight: torch.Tensor) -> dict:
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(weight.clone())
    optimizer, runs = torch.optim.AdamW(model.parameters()), checkpoint.Folder(FOLDER / name)
    found = attempt(lambda: runs.save(1, model, optimizer)) | {"written": runs.wait()}
    dist.barrier()  # rank 0 gives the name
    with torch.no_grad():
        model.experts.zero_()
    attempt(lambda: runs.load(model, optimizer))
    return found | {"own": bool((model.experts == weight).all()), "names": names(name)}


def slow_words():
    """Rank 0 needs a while to say what rank 1 has found."""
    runs, times = checkpoint.Folder(FOLDER / "slow"), {}

    def slowly(*words, **options):
        time.sleep(0.3)
        times["printed"] = time.monotonic()

    checkpoint.print = slowly
    attempt(lambda: runs.end_if("no luck" if rank == 1 else None))
    del checkpoint.print
    return times | {"ended": time.monotonic()}


def other_values():
    """A tuple is a list in JSON, and no other value."""
    saved("values", (1,), metadata={"betas": (0.9, 0.95), "config": {"layers": 8}})
    same = loaded("values", metadata={"betas": (0.9, 0.95), "config": {"layers": 8}})
    other = loaded("values", metadata={"betas": (0.9, 0.95), "config": {"layers": 4}})
    return other | {"same": same["returns"]}


def not_shared():
    """Each rank has a folder of this name."""
    here = Path.cwd()
    for number in (0, 1):
        (FOLDER / f"node-{number}/runs").mkdir(parents=True, exist_ok=True)
        (FOLDER / f"node-{number}/runs/owner").write_text("6 0 node-1 99")
    os.chdir(FOLDER / f"node-{rank}")
    found = attempt(lambda: checkpoint.Folder("runs"))
    os.chdir(here)
    return found


def zombie():
    """Start 9 of job 7 still runs when Slurm has started the job for the 10th time."""
    job(7, 9)
    writer, parts = checkpoint.dcp.FileSystemWriter, []
    checkpoint.dcp.FileSystemWriter = lambda path, **options: (
        parts.append(path.name) or writer(path, **options)
    )
    old = saved("zombie", (1,))
    checkpoint.dcp.FileSystemWriter = writer
    job(7, 10)
    checkpoint.Folder(FOLDER / "zombie")
    job(7, 9)
    again = attempt(lambda: checkpoint.Folder(FOLDER / "zombie"))
    return {"again": again, "writes": ended(old), "names": names("zombie"), "parts": parts}


def two_jobs():
    """A job takes over another one's folder, if it is told to resume."""
    job(7, 0)
    first = saved("jobs", ())
    job(8, 0)
    found = {"refused": attempt(lambda: checkpoint.Folder(FOLDER / "jobs", resume=False))}
    first.save(1, *trained(1))
    found["first"] = first.wait()
    new = checkpoint.Folder(FOLDER / "jobs")
    found["writes"] = ended(first)
    new.save(2, *trained(2))
    return found | {"then": new.wait(), "names": names("jobs")}


def of_no_run():
    """What was in a folder before any run stays as it is, and no run begins there."""
    found = {}
    for name, content in (("model", "my thesis"), ("owner", "me"), ("link", "7 0 node-1 1")):
        folder = FOLDER / "of_no_run" / name
        kept = folder / ("elsewhere" if name == "link" else name)
        if rank == 0:
            folder.mkdir(parents=True)
            kept.write_text(content)
            if name == "link":
                (folder / "owner").symlink_to(kept)
        dist.barrier()
        found[name] = attempt(lambda folder=folder: checkpoint.Folder(folder))
        found[name]["kept"] = kept.read_text() == content
    return found


def ended(runs: checkpoint.Folder) -> dict:
    """How a save ends, which would end the process."""
    end = os._exit

    def instead(status: int):
        raise SystemExit(status)

    os._exit = instead
    runs.save(3, *trained(3))
    found = attempt(runs.wait)
    os._exit = end
    return found


SCENARIOS = (whole, copied_at_once, truncated, missing_file, all_damaged, killed_while_it_saved)
SCENARIOS += (whatever_else, without_what_it_asks_for, copies_of_what_all_hold, one_to_keep)
SCENARIOS += (unseen_by_one, two_names, saved_twice)
SCENARIOS += (full_disk, not_finite, slow_words, other_values, not_shared, zombie, two_jobs)
SCENARIOS += (of_no_run, own_weights, away, empty_owner)
for scenario in SCENARIOS:
    found = scenario()
    everywhere = [None, None]
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        print(json.dumps([scenario.__name__, everywhere]), flush=True)
dist.barrier()
os._exit(0)
