"""One command on a laptop, under torchrun and on a cluster: MNIST with @task of aux/slurm_task.py.

    python distributed/train_task.py --epochs 3                          # here: CUDA or the CPU
    ./torchrun.sh distributed/train_task.py --epochs 3                   # here, several ranks
    python distributed/train_task.py --submit --env local --follow       # a job, by sbatch here
    python distributed/train_task.py --submit --env production --fetch   # a job over SSH
    python distributed/train_task.py --submit --help                     # its options

A job keeps a checkpoint of each epoch in checkpoints/JOB-ID, and resumes from the newest when
Slurm requeues it. Nothing above the function imports torch: the machine that submits needs none.
"""

import faulthandler
import math
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "aux"))

from resilience.arguments import ArgumentParser, number, whole_number
from slurm_task import JobContext, task


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    add, positive = parser.add_argument, whole_number(1)
    add("--epochs", type=positive, default=3, help="passes over the images")
    add("--batch-size", type=positive, default=64, help="images per step, over all ranks")
    add("--learning-rate", type=number(0), default=0.02, help="of SGD with momentum")
    add("--seed", type=whole_number(0), default=0, help="of the weights and of the images' order")
    add("--device", choices=["auto", "cpu"], default="auto")
    add("--data-dir", type=Path, default="data/mnist", help="of aux/prepare_data.py")
    add("--log-every", type=positive, default=100, help="steps between two log lines")
    return parser.parse_args()


@task(time="01:00:00", nodes=1, ntasks_per_node=2)
def train(args: Namespace, job: JobContext | None = None) -> dict[str, float]:
    """Trains, and returns loss and accuracy on the test images: the same on every rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler

    import mnist

    # --- process group ---
    if job:
        # Without a job, torchrun has set them, or nobody.
        os.environ.update(job.torch_distributed_env())
    # A launcher sets RANK, LOCAL_RANK and WORLD_SIZE. In a step of srun without a launcher there
    # are Slurm's own numbers. Any other process is the only one.
    slurm = os.environ if 0 <= int(os.environ.get("SLURM_STEP_ID", -1)) < 2**31 else {}
    rank = int(os.environ.get("RANK", slurm.get("SLURM_PROCID", 0)))
    local_rank = int(os.environ.get("LOCAL_RANK", slurm.get("SLURM_LOCALID", 0)))
    world_size = int(os.environ.get("WORLD_SIZE", slurm.get("SLURM_NTASKS", 1)))
    device = torch.device("cpu")
    if args.device == "auto" and torch.cuda.is_available():
        # GPU number local_rank. If Slurm shows each rank only its own, that is number 0.
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    elif args.device == "auto" and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        hint = "check nvidia-smi, or pass --device cpu"
        stop(f"Slurm granted GPUs, but torch sees none: {hint}", rank)
    distributed = world_size > 1
    if distributed:
        # A rank that does not reach the others within 300 seconds prints where it waits, and ends.
        faulthandler.dump_traceback_later(300, exit=True)
        backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=gpu)
        # A first sum over all ranks. .item() waits for it.
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        total.item()
        faulthandler.cancel_dump_traceback_later()

    def log(text: str):
        if rank == 0:
            print(text, flush=True)

    def summed(values: torch.Tensor) -> list[float]:
        """The sums over all ranks."""
        if distributed:
            dist.all_reduce(values)
        return values.tolist()

    # --- data ---
    train_set, test_set = mnist.load(args.data_dir)
    if args.batch_size % world_size:
        stop(f"--batch-size {args.batch_size} is not divisible by {world_size} ranks", rank)
    if args.batch_size > len(train_set):
        many = f"the {len(train_set)} training images"
        stop(f"--batch-size {args.batch_size} is more than {many}", rank)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    test_sampler = range(rank, len(test_set), world_size)
    options = {"collate_fn": mnist.collate, "pin_memory": device.type == "cuda"}
    share = args.batch_size // world_size
    loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, 1000, sampler=test_sampler, **options)

    # --- model ---
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)
    ddp = nn.parallel.DistributedDataParallel(model) if distributed else model

    # --- checkpoint ---
    epoch, loss, accuracy = 0, 0.0, 0.0
    newest = [newest_checkpoint(job.output_dir) if job and rank == 0 else None]
    if distributed:
        dist.broadcast_object_list(newest, device=device)  # one choice for all ranks
    if newest[0] and job.restart_count == 0:
        remedy = f"move {job.output_dir} away"
        stop(f"{newest[0]} is from another job with the id {job.job_id}: {remedy}", rank)
    if newest[0]:
        state = torch.load(newest[0], map_location=device, weights_only=True)
        epoch, loss, accuracy = state["epoch"], state["test_loss"], state["test_accuracy"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        log(f"Resumed after epoch {epoch}")

    # --- training ---
    log(f"Data: {mnist.describe(args.data_dir)}. World size {world_size}, {device.type}")
    while epoch < args.epochs:
        sampler.set_epoch(epoch)
        ddp.train()
        start = time.monotonic()
        for step, (images, labels) in enumerate(loader, 1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            batch_loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            batch_loss.backward()
            optimizer.step()
            if step % args.log_every == 0 or step == len(loader):
                [mean] = summed(batch_loss.detach()[None] / world_size)
                rate = step * args.batch_size / (time.monotonic() - start)
                line = f"epoch={epoch + 1} step={step}/{len(loader)} loss={mean:.4f}"
                log(f"{line} images_per_second={rate:.0f}")
                if not math.isfinite(mean):
                    stop(f"the loss is {mean}: try a lower --learning-rate", rank)
        epoch += 1

        model.eval()
        sums = torch.zeros(2, device=device)  # loss, correct predictions
        with torch.inference_mode():
            for images, labels in test_loader:
                logits, labels = model(images.to(device)), labels.to(device)
                sums[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
        loss, accuracy = (value / len(test_set) for value in summed(sums))
        log(f"epoch={epoch} test_loss={loss:.4f} test_accuracy={accuracy:.4f}")
        if job and rank == 0:
            state = {"epoch": epoch, "test_loss": loss, "test_accuracy": accuracy}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            job.output_dir.mkdir(parents=True, exist_ok=True)
            # The whole checkpoint or none
            torch.save(state, job.output_dir / "part")
            os.replace(job.output_dir / "part", job.output_dir / f"checkpoint_epoch_{epoch}.pt")
    log(f"Finished: average_loss={loss:.4f} accuracy={accuracy:.4f}")
    return {"test_loss": loss, "test_accuracy": accuracy, "world_size": world_size}


def stop(sentence: str, rank: int):
    """Ends this rank with status 1."""
    print(f"train_task.py: rank {rank}: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)  # at once: gloo's threads can outlive the process group and hang the interpreter


def newest_checkpoint(folder: Path) -> str | None:
    found = {int(path.stem.split("_")[-1]): path for path in folder.glob("checkpoint_epoch_*.pt")}
    return str(found[max(found)]) if found else None


def shutdown():
    """Ends the process group, and this process for the same reason as stop()."""
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
    train(parse_arguments())
    shutdown()
