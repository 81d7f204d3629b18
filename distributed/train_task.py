"""One command on a laptop, under torchrun and on a cluster: MNIST with @task of aux/slurm_task.py.

    python distributed/train_task.py --epochs 3                          # here: CUDA or the CPU
    ./torchrun.sh distributed/train_task.py --epochs 3                   # here, several ranks
    python distributed/train_task.py --submit --env local --follow       # a job, by sbatch here
    python distributed/train_task.py --submit --env production --fetch   # a job over SSH
    python distributed/train_task.py --submit --help                     # its options

A job keeps a checkpoint of each epoch in checkpoints/JOB-ID, and resumes from the newest when
Slurm requeues it. Nothing above the function imports torch: the machine that submits needs none.
"""

import math
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "aux"))

from resilience.arguments import ArgumentParser, device_name, number, whole_number
from slurm_task import JobContext, task


# --- arguments ---
def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=whole_number(1), default=3, help="passes over the images")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--batch-size", type=whole_number(1), default="64", help="images per step, over all ranks"
    )
    batch.add_argument(
        "--batch-size-per-rank", type=whole_number(1), help="the same, for each rank"
    )
    parser.add_argument(
        "--learning-rate", type=number(0), default=0.02, help="of SGD with momentum"
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, help="of weights, order and dropout"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of autocast"
    )
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument(
        "--device", type=device_name, default=device, help="auto, cpu or cuda; or TRAIN_DEVICE"
    )
    parser.add_argument(
        "--data-dir", type=Path, default="data/mnist", help="of aux/prepare_data.py"
    )
    parser.add_argument(
        "--log-every", type=whole_number(1), default=100, help="steps between two log lines"
    )
    return parser.parse_args()


@task(time="01:00:00", nodes=1, ntasks_per_node=2)
def train(args: Namespace, job: JobContext | None = None) -> dict[str, float]:
    """Trains, and returns loss and accuracy on the test images: the same on every rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

    import mnist
    from resilience.ranks import find_ranks
    from resilience.step_zero import device_fault

    # --- process group ---
    if job:
        # Without a job, torchrun has set them, or nobody.
        os.environ.update(job.torch_distributed_env())
    ranks = find_ranks()
    rank, local_rank, world_size = ranks.rank, ranks.local_rank, ranks.world_size
    if fault := device_fault(args.device, ranks):
        stop(fault, rank)
    device = torch.device("cpu")
    if args.device != "cpu" and torch.cuda.is_available():
        # GPU number local_rank, but number 0 if Slurm shows this rank a single GPU.
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    # A launcher has started this, perhaps as a single rank.
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # Waits for all: nobody is still connecting when a rank stops.
        dist.all_reduce(torch.zeros(1, device=device))

    # --- data ---
    if args.batch_size_per_rank is not None:
        args.batch_size = args.batch_size_per_rank * world_size
    if args.batch_size % world_size:
        stop(f"--batch-size {args.batch_size} does not divide by {world_size} ranks", rank)
    try:
        train_set, test_set = mnist.load(args.data_dir)
    except (OSError, ValueError) as error:
        stop(str(error), rank)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size // world_size, drop_last=True)
    loader = DataLoader(
        train_set, sampler=batches, batch_size=None, pin_memory=device.type == "cuda"
    )
    # Every test image once.
    mine = BatchSampler(range(rank, len(test_set), world_size), 1000, drop_last=False)
    test_loader = DataLoader(test_set, sampler=mine, batch_size=None)
    if len(loader) == 0:
        stop(
            f"--batch-size {args.batch_size} is more than the {len(train_set)} training images",
            rank,
        )

    # --- model ---
    torch.manual_seed(args.seed)  # the same weights on every rank
    convolutions = (
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
    )
    linears = nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10)
    model = nn.Sequential(*convolutions, nn.Flatten(), *linears).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.learning_rate, momentum=0.9, nesterov=True
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    autocast = torch.autocast(device.type, dtype, enabled=args.precision != "fp32")
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    if args.precision == "fp16" and device.type == "cpu" and rank == 0:
        print("warning: fp16 is slow on a CPU: use --precision bf16", file=sys.stderr)
    ddp_model = DistributedDataParallel(model) if distributed else model

    # --- checkpoint ---
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    epoch, loss, accuracy = 0, 0.0, 0.0
    newest = [newest_checkpoint(job.output_dir) if job and rank == 0 else None]
    if distributed:
        dist.broadcast_object_list(newest, device=device)  # one choice for all ranks
    if newest[0] and job.restart_count == 0:
        stop(
            f"{newest[0]} is from another job with the id {job.job_id}: move {job.output_dir} away",
            rank,
        )
    if newest[0]:
        state = torch.load(newest[0], map_location=device, weights_only=True)
        epoch, loss, accuracy = state["epoch"], state["test_loss"], state["test_accuracy"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
        if rank == 0:
            print(f"Resumed after epoch {epoch}", flush=True)

    def save_checkpoint():
        state = {"epoch": epoch, "test_loss": loss, "test_accuracy": accuracy}
        state |= {name: part.state_dict() for name, part in parts.items()}
        path = job.output_dir / f"checkpoint_epoch_{epoch}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".tmp").open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)  # the whole checkpoint or none

    def all_reduced(values: torch.Tensor) -> list[float]:
        if distributed:
            dist.all_reduce(values)
        return values.tolist()

    # --- training ---
    if rank == 0:
        print(
            f"Data: {mnist.describe(args.data_dir)}. World size {world_size}, {device.type}",
            flush=True,
        )
    while epoch < args.epochs:
        sampler.set_epoch(epoch)
        # Dropout: no two ranks and epochs alike.
        torch.manual_seed((args.seed * 1_000_003 + epoch) * 65_536 + rank)
        ddp_model.train()
        start = time.monotonic()
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = (
                tensor.to(device, non_blocking=device.type == "cuda") for tensor in (images, labels)
            )
            with autocast:
                batch_loss = nn.functional.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            scaler.scale(batch_loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % args.log_every == 0 or step == len(loader):
                (mean,) = all_reduced(batch_loss.detach()[None] / world_size)
                rate = step * args.batch_size / (time.monotonic() - start)
                line = (
                    f"epoch={epoch + 1} step={step}/{len(loader)} loss={mean:.4f} "
                    f"images_per_second={rate:.0f}"
                )
                if rank == 0:
                    print(line, flush=True)
                if not math.isfinite(mean):
                    stop(
                        f"the loss is {mean}: try a lower --learning-rate, or another --precision",
                        rank,
                    )
        epoch += 1

        model.eval()
        sums = torch.zeros(2, device=device)  # loss, right answers
        with torch.inference_mode():
            for images, labels in test_loader:
                images, labels = images.to(device), labels.to(device)
                with autocast:
                    logits = model(images)
                batch_loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
                sums += torch.stack((batch_loss, (logits.argmax(1) == labels).sum()))
        loss, accuracy = (value / len(test_set) for value in all_reduced(sums))
        if rank == 0:
            print(f"epoch={epoch} test_loss={loss:.4f} test_accuracy={accuracy:.4f}", flush=True)
            if job:
                save_checkpoint()
    return {"test_loss": loss, "test_accuracy": accuracy, "world_size": world_size}


def stop(sentence: str, rank: int):
    """Ends this rank with status 1."""
    print(f"train_task.py: rank {rank}: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)  # at once: gloo's threads can outlive the process group and hang the interpreter


def newest_checkpoint(folder: Path) -> str | None:
    paths = folder.glob("checkpoint_epoch_*.pt")
    return max(
        map(str, paths), key=lambda path: int(Path(path).stem.rpartition("_")[2]), default=None
    )


def shutdown():
    """Ends the process group, and with it this process: see stop."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        # For NCCL.
        ids = [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=ids)  # rank 0 may still be writing
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    result = train(parse_arguments())
    if os.environ.get("RANK", "0") == "0":
        print(
            f"Finished: average_loss={result['test_loss']:.4f} "
            f"accuracy={result['test_accuracy']:.4f}",
            flush=True,
        )
    shutdown()
