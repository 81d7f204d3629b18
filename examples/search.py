"""A search by Optuna whose trials are trainings of all ranks: rank 0 asks, and tells the others."""

import sys

import optuna
import torch
import torch.distributed as dist
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(rate: float) -> float:
    """Stands in for a training: all ranks meet in a collective."""
    # One write, because two ranks share the log.
    print(f"rank {rank}: {rate}\n", end="", flush=True)
    loss = torch.tensor((rate - 0.01) ** 2)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


# Several jobs may share the file.
if rank == 0:
    storage = JournalStorage(JournalFileBackend(sys.argv[1]))
    study = optuna.create_study(storage=storage, study_name="rate", load_if_exists=True)
for _ in range(5):
    settings = [None]
    if rank == 0:
        trial = study.ask()
        settings = [{"rate": trial.suggest_float("rate", 1e-3, 1e-1, log=True)}]
    dist.broadcast_object_list(settings)
    loss = train(**settings[0])
    if rank == 0:
        study.tell(trial, loss)
dist.destroy_process_group()
