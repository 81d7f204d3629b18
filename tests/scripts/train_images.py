"""train_ddp.py with data and a model of one's own: folders of images, and a smaller network.

    python aux/prepare_data.py mnist                      # once, before any job
    ./torchrun.sh distributed/train_ddp.py --epochs 3     # all GPUs of this machine, or two CPU ranks
    sbatch launch_slurm_with_torchrun.sh distributed/train_ddp.py --epochs 3

EDIT marks the lines for your own data and model.
Grown from local/train_single.py: arguments, process group, data, model, training.
"""

import argparse
import datetime
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from torchvision_on_cpu import torchvision  # EDIT: your data

# --- arguments --------------------------------------------------------------------------------------------------------
# rank: number of this process, of world_size; local_rank: its number on its node; from 0. Set by launcher, or Slurm.
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
distributed = "RANK" in os.environ or world_size > 1  # a launcher sets RANK, a bare srun does not


def stop(sentence: str):
    sys.stderr.write(f"[Rank {rank} on {os.uname().nodename}] {sentence}\n")
    os._exit(1)  # not sys.exit, which could wait for the other ranks


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.error = stop  # argparse's errors, too
parser.add_argument("--epochs", type=int, default=3, help="passes over the training images")
batch = parser.add_mutually_exclusive_group()  # not both; with 64 for "64" argparse lets --batch-size 64 pass
batch.add_argument("--batch-size", type=int, default="64", help="images per step, in all")
batch.add_argument("--batch-size-per-rank", dest="batch_size", type=lambda n: int(n) * world_size, help="or per rank")
parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD with momentum 0.9")
parser.add_argument("--dropout", type=float, default=0.25, help="probability of dropping an activation")
parser.add_argument("--seed", type=int, default=0, help="of weights, order of the images and dropout")
parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="fp16 is in train_preemptible.py")
parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default=os.environ.get("TRAIN_DEVICE", "auto"))
parser.add_argument("--data-dir", default="data/mnist", help="written by aux/prepare_data.py")  # EDIT
parser.add_argument("--log-every", type=int, default=100, help="steps between two log lines")
parser.add_argument("--checkpoint-dir", type=Path, help="default: checkpoints/ and the job id, or the time")
requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"  # Slurm has started it again: it resumes
parser.add_argument("--resume", action="store_true", default=requeued, help="from the last of --checkpoint-dir")
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.log_every) < 1 or not 0 <= args.dropout < 1:
    stop("--epochs, --batch-size and --log-every are 1 or more, --dropout is below 1")

# --- process group ----------------------------------------------------------------------------------------------------
if args.device == "auto" and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0" and not torch.cuda.is_available():
    stop("Slurm granted GPUs here, but torch sees none: say --device cpu if that is meant")
if args.device == "auto":
    mps = torch.backends.mps.is_available() and not distributed
    args.device = "cuda" if torch.cuda.is_available() else ("mps" if mps else "cpu")
device = torch.device(args.device)
if args.device == "cuda":  # GPU number local_rank; but number 0 if Slurm shows this rank one GPU alone
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
if distributed:  # all ranks meet here; nccl sends between GPUs, gloo between CPUs
    if args.device == "mps":
        stop("--device mps is for one process without a launcher: gloo does not know it")
    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):  # the rendezvous: where they meet
        stop(f"this is one of {world_size} ranks, but MASTER_ADDR or MASTER_PORT is not set: use a launcher")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank, world_size=world_size)
    sys.excepthook = lambda *error, old=sys.excepthook: (old(*error), os._exit(1))  # gloo's threads can keep it
    dist.all_reduce(torch.zeros(1, device=device))  # the first data sent: a rank out of reach is noticed here
place = f"{os.uname().nodename} | world size: {world_size} | local rank: {local_rank} | device: {device}"
print(f"[Rank: {rank} | {place}]\n", end="", flush=True)  # one write: lines of two ranks do not mix
log = print if rank == 0 else (lambda *args, **kwargs: None)  # only rank 0 logs

# --- data -------------------------------------------------------------------------------------------------------------
try:  # EDIT: your data; a folder for each class
    to = torchvision.transforms
    to = to.Compose([to.Resize((32, 32)), to.ToTensor(), to.Normalize([0.5] * 3, [0.25] * 3)])
    train_set = torchvision.datasets.ImageFolder(args.data_dir + "/train", to)
    test_set = torchvision.datasets.ImageFolder(args.data_dir + "/test", to)
    source = f"{len(train_set)} images of {len(train_set.classes)} classes in {args.data_dir}"
except OSError as error:
    stop(str(error))
if args.batch_size > len(train_set) or args.batch_size % world_size:
    stop(f"--batch-size {args.batch_size} must divide by {world_size} ranks, and be at most {len(train_set)} images")
sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # shuffled, in equal shares
batches = BatchSampler(sampler, args.batch_size // world_size, drop_last=True)  # this rank's indices, a list per step
test_batches = BatchSampler(range(rank, len(test_set), world_size), 1000, drop_last=False)  # each image on one rank
# A batch is train_set[list of indices]. EDIT: if yours takes single indices: batch_sampler=batches in place of both
train_loader = DataLoader(train_set, batch_sampler=batches, num_workers=2, multiprocessing_context="fork")
test_loader = DataLoader(test_set, batch_sampler=test_batches)

# --- model ------------------------------------------------------------------------------------------------------------
torch.manual_seed(args.seed)  # of the weights: the same in every process
convolutions = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
linears = nn.Sequential(nn.Flatten(), nn.Dropout(args.dropout), nn.Linear(32 * 7 * 7, len(train_set.classes)))
model = nn.Sequential(convolutions, linears)  # EDIT: your model
model = model.to(device, memory_format=torch.channels_last if device.type != "mps" else None)  # faster convolutions
ddp = nn.parallel.DistributedDataParallel(model) if distributed else model  # backward() averages over all ranks
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, fused=device.type != "mps")
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

# --- checkpoint -------------------------------------------------------------------------------------------------------
folder = args.checkpoint_dir or Path("checkpoints", os.environ.get("SLURM_JOB_ID", time.strftime("%Y-%m-%d_%H-%M-%S")))
state = {"model": model, "optimizer": optimizer}
epochs_done = max((int(path.stem.split("_")[-1]) for path in folder.glob("checkpoint_epoch_*.pt")), default=0)
if epochs_done and not args.resume:
    stop(f"{folder} has checkpoints: say --resume, or choose another --checkpoint-dir")
if epochs_done:
    saved = torch.load(folder / f"checkpoint_epoch_{epochs_done}.pt", map_location=device, weights_only=True)
    for name, part in state.items():
        part.load_state_dict(saved[name])  # the optimizer's has the learning rate: --learning-rate is ignored
folder.mkdir(parents=True, exist_ok=True)
log(f"Data: {source}. Checkpoints: {folder}", flush=True)
if args.resume:
    log(f"Resumed after epoch {epochs_done}" if epochs_done else f"No checkpoint in {folder}", flush=True)

# --- training ---------------------------------------------------------------------------------------------------------
for epoch in range(epochs_done + 1, args.epochs + 1):
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch, the same after a resume
    torch.manual_seed((args.seed + epoch) * world_size + rank)  # of dropout: no two epochs or ranks alike
    losses, start = [], time.perf_counter()
    for step, (images, labels) in enumerate(train_loader, start=1):
        images, labels = (part.to(device, non_blocking=device.type == "cuda") for part in (images, labels))
        with autocast:
            loss = nn.functional.cross_entropy(ddp(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # .item() would wait for the GPU, at every step
        if step % args.log_every == 0 or step == len(train_loader):
            mean = torch.stack(losses).mean()
            if distributed:
                dist.all_reduce(mean.div_(world_size))  # divides, then sums over all ranks, both in place
            mean = mean.item()  # waits for the GPU: only then read the clock
            seconds = (time.perf_counter() - start) / len(losses)  # of one step
            steps_left = (args.epochs - epoch + 1) * len(train_loader) - step
            time_left = datetime.timedelta(seconds=round(seconds * steps_left))
            progress = f"images_per_second={args.batch_size / seconds:.0f} time_left={time_left}"
            log(f"epoch={epoch} step={step}/{len(train_loader)} loss={mean:.6f} {progress}", flush=True)
            if not math.isfinite(mean):
                stop(f"the loss is {mean:.6f}: try a lower --learning-rate")
            losses, start = [], time.perf_counter()

    model.eval()
    sums = torch.zeros(2, device=device)  # loss, correct predictions
    with torch.inference_mode(), autocast:
        for images, labels in test_loader:
            logits, labels = model(images.to(device)).float(), labels.to(device)
            sums[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
    if distributed:
        dist.all_reduce(sums)
    test_loss, accuracy = (sums / len(test_set)).tolist()
    log(f"epoch={epoch} test_loss={test_loss:.6f} test_accuracy={accuracy:.4f}", flush=True)
    if rank == 0:
        torch.save({name: part.state_dict() for name, part in state.items()}, folder / "unfinished")
        os.replace(folder / "unfinished", folder / f"checkpoint_epoch_{epoch}.pt")  # whole, or not there

log(f"Finished: epoch={args.epochs}, checkpoints in {folder}", flush=True)
if distributed:
    dist.barrier(device_ids=[device.index] if args.device == "cuda" else None)  # all wait till rank 0 has saved
    dist.destroy_process_group()
    if device.type == "cpu":
        os._exit(0)  # skips Python's shutdown, which can crash while a thread of gloo still runs
