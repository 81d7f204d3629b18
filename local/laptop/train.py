"""One command on a laptop, under torchrun and on a cluster: a small training with @task.

    cd local/laptop
    python train.py --epochs 3                              # here: CUDA or the CPU
    ../../torchrun.sh train.py --epochs 3                   # here, several ranks
    python train.py --submit --env local --wait             # a job, by sbatch on this machine
    python train.py --submit --env production --fetch       # a job over SSH, and its result
    python train.py --submit --help                         # its options

Nothing above the function imports torch, which the machine that submits may lack.
"""

import argparse
import os
import sys

from slurm_task import REPOSITORY, JobContext, task


@task(time="01:00:00", nodes=1, ntasks_per_node=2)
def train(args: argparse.Namespace, job: JobContext | None = None) -> dict[str, float]:
    """Returns loss and accuracy on the test images. Rank 0's go into result.json."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, DistributedSampler

    import mnist

    # --- process group ---
    # A launcher sets RANK, LOCAL_RANK and WORLD_SIZE. Any other process is alone.
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    device = torch.device("cpu")
    if args.device == "auto" and torch.accelerator.is_available() and sys.platform != "darwin":
        number = local_rank if torch.accelerator.device_count() > 1 else 0
        torch.accelerator.set_device_index(number)
        device = torch.device(torch.accelerator.current_accelerator().type, number)
    elif args.device == "auto" and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
        sys.exit("Slurm granted GPUs, but torch sees none: check nvidia-smi, or pass --device cpu")
    backend = dist.get_default_backend_for_device(device)
    gpu = None if device.type == "cpu" else device
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)

    def log(text: str):
        if rank == 0:
            print(text, flush=True)

    # --- data, model ---
    train_set, test_set = mnist.load(args.data_dir)
    log(f"Data: {mnist.describe(args.data_dir)}. World size {world_size}, {device.type}")
    if args.batch_size % world_size != 0 or args.batch_size > len(train_set):
        sys.exit(f"--batch-size must be a multiple of {world_size} (ranks), up to {len(train_set)}")
    sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
    options = {"sampler": sampler, "drop_last": True, "collate_fn": mnist.collate}
    loader = DataLoader(train_set, args.batch_size // world_size, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    # --- training ---
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader, start=1):
            loss = cross_entropy(ddp(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.log_every == 0 or step == len(loader):
                mean_loss = loss.detach() / world_size
                dist.all_reduce(mean_loss)
                log(f"epoch={epoch} step={step}/{len(loader)} loss={mean_loss.item():.6f}")

    # --- evaluation: each rank has a part of the test images ---
    images, labels = (tensor.to(device) for tensor in test_set[rank::world_size])
    with torch.inference_mode():
        logits = model(images)
        correct = (logits.argmax(1) == labels).sum()
        sums = torch.stack([cross_entropy(logits, labels, reduction="sum"), correct])
    dist.all_reduce(sums)
    test_loss, accuracy = (sums / len(test_set)).tolist()
    log(f"Finished: test_loss={test_loss:.6f} test_accuracy={accuracy:.4f}")
    if job and rank == 0:
        job.output_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), job.output_dir / "model.pt")
    # Before the process group: at the function's end, the removal of ddp can wait for ever for one
    # of gloo's threads.
    del ddp
    dist.destroy_process_group()
    return {"test_loss": test_loss, "test_accuracy": accuracy, "world_size": world_size}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    help = "images per step, over all ranks"
    parser.add_argument("--batch-size", type=int, default=64, help=help)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    help = "where prepare_data.py wrote MNIST"
    parser.add_argument("--data-dir", default=REPOSITORY / "data/mnist", help=help)
    parser.add_argument("--log-every", type=int, default=100, metavar="STEPS")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.log_every) < 1:
        parser.error("--epochs, --batch-size and --log-every must be 1 or more")
    train(args)
    # A thread of gloo can outlive the group and crash Python's shutdown, which this skips.
    os._exit(0)
