"""One command on a laptop, under torchrun and on a cluster: MNIST with @task of aux/slurm_task.py.

    python distributed/train_task.py --epochs 3                                     # here: CUDA, Apple's MPS or the CPU
    ./torchrun.sh distributed/train_task.py --epochs 3                              # here, several ranks
    python distributed/train_task.py --submit --env local --follow --epochs 3       # a job: sbatch on this machine
    python distributed/train_task.py --submit --env production --fetch --epochs 3   # a job over SSH, result.json back
    python distributed/train_task.py --submit --help                                # what a job can be asked for

Data, model and steps are train_ddp.py's, so its figures are these. Nothing above the function imports torch: who
submits needs none.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "aux"))

from resilience.arguments import ArgumentParser, device_name, new_checkpoint_dir, uneven, whole_number
from slurm_task import JobContext, task


def get_device(name: str, local_rank: int, world_size: int):
    """CUDA, else Apple's MPS (for one process alone: gloo does not know it), else the CPU, unless `name` says which."""
    from resilience import step_zero

    device, fault = step_zero.choose_device(name, local_rank, world_size)
    if fault:
        sys.exit(f"train_task.py: {fault}")
    return device


@task(time="01:00:00", nodes=1, ntasks_per_node=2)
def train(args: Namespace, job: JobContext | None = None) -> dict[str, float]:
    """Trains, and returns loss and accuracy on the test images: the same on every rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import mnist
    import train_ddp
    from resilience import step_zero
    from resilience.progress import Progress

    if job:
        os.environ.update(job.torch_distributed_env())  # torchrun by hand has set the five itself
    names = ("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)
    rank, local_rank, world_size = (int(os.environ.get(*name)) for name in names)
    step_zero.speak_as(rank)
    fault = uneven("--batch-size", args.batch_size, world_size, f"{world_size} ranks")
    if fault := fault or mnist.missing_data(args.data_dir):
        step_zero.stop(fault, rank, speak=rank == 0)
    device = get_device(args.device, local_rank, world_size)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(args.seed)
    train_loader, test_loader = train_ddp.make_loaders(args, rank, world_size, device)
    bare_model, optimizer = train_ddp.make_model(args, device)
    model = bare_model
    if world_size > 1:
        model = DistributedDataParallel(bare_model, device_ids=[device.index] if device.type == "cuda" else None)
    scaler = torch.amp.GradScaler(device.type, enabled=False)

    folder = job.output_dir if job else new_checkpoint_dir()
    step, total_steps = 0, args.epochs * len(train_loader)
    progress = Progress(folder if rank == 0 else None, "images", step, total_steps)
    common = rank, world_size, device, progress
    for epoch in range(1, args.epochs + 1):
        *_, step = train_ddp.train_epoch(args, step, model, optimizer, scaler, train_loader, *common)
        loss, accuracy = train_ddp.evaluate(args, bare_model, test_loader, world_size, device)
        progress.epoch(step, epoch, test_loss=loss, test_accuracy=accuracy)
    return {"test_loss": loss, "test_accuracy": accuracy, "world_size": world_size}


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=whole_number(1), default=3, help="passes over the images")
    parser.add_argument("--batch-size", type=whole_number(1), default=64, help="images per step, over all ranks")
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument("--device", type=device_name, default=device, help="auto, cpu, cuda or mps; or TRAIN_DEVICE")
    parser.add_argument("--data-dir", type=Path, default="data/mnist", help="of aux/prepare_data.py")
    parser.add_argument("--log-every", type=whole_number(1), default=100, help="steps between two log lines")
    # What train_ddp.py has besides, at its defaults
    parser.set_defaults(learning_rate=0.02, dropout=0.25, seed=0, precision="fp32", num_workers=0, max_steps=None)
    return parser.parse_args()


if __name__ == "__main__":
    result = train(parse_arguments())
    if os.environ.get("RANK", "0") == "0":
        print(f"Finished: average_loss={result['test_loss']:.4f} accuracy={result['test_accuracy']:.4f}")
    from resilience import step_zero

    step_zero.leave()
