"""Train on MNIST to 99 % test accuracy in seconds: train_ddp.py with a network and a schedule made for speed.

    python aux/prepare_data.py mnist                # once, before any job
    python distributed/train_fast.py                # one process: CUDA, Apple's MPS or the CPU
    ./torchrun.sh distributed/train_fast.py         # all GPUs of this machine, or two CPU ranks
    sbatch launch_slurm_with_torchrun.sh distributed/train_fast.py

What saves time: a network that is small where images are large; 256 images a step; a learning rate that rises and
falls once over the run (Smith and Topin 2017, arxiv.org/abs/1708.07120); images shifted by up to two pixels, so that
few epochs are enough; bfloat16 where the device has units for it. With a tenth of MNIST's images take --epochs 17.
Grown from distributed/train_ddp.py: arguments, model, training.

    git diff --no-index distributed/train_ddp.py distributed/train_fast.py
"""

import argparse
import datetime
import math
import os
import sys
import time
import timeit
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import mnist  # EDIT: your data

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
parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
batch = parser.add_mutually_exclusive_group()  # an error if both are given
batch.add_argument("--batch-size", type=int, default="256", help="images per step, in all")
batch.add_argument("--batch-size-per-rank", dest="batch_size", type=lambda n: int(n) * world_size, help="or per rank")
parser.add_argument("--learning-rate", type=float, default=0.3, help="highest, of SGD")
parser.add_argument("--seed", type=int, default=0, help="of weights, order of the images and shifts")
precisions = ("auto", "fp32", "bf16")
parser.add_argument("--precision", choices=precisions, default="auto", help="of autocast; auto: bf16 where it is fast")
parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default=os.environ.get("TRAIN_DEVICE", "auto"))
parser.add_argument("--data-dir", default="data/mnist", help="written by aux/prepare_data.py")  # EDIT
parser.add_argument("--log-every", type=int, default=100, help="steps between two log lines")
parser.add_argument("--checkpoint-dir", type=Path, help="default: checkpoints/ and the job id, or the time")
requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"  # Slurm has started it again: it resumes
parser.add_argument("--resume", action="store_true", default=requeued, help="from the last of --checkpoint-dir")
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.log_every) < 1:
    stop("--epochs, --batch-size and --log-every are 1 or more")

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
try:  # EDIT: your data; two TensorDatasets of images (n, 1, 28, 28) float32 and labels (n,) int64
    train_set, test_set = mnist.load(args.data_dir)
    source = mnist.describe(args.data_dir)
except ValueError as error:
    stop(str(error))
if args.batch_size > len(train_set) or args.batch_size % world_size:
    stop(f"--batch-size {args.batch_size} must divide by {world_size} ranks, and be at most {len(train_set)} images")
sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # shuffled, in equal shares
batches = BatchSampler(sampler, args.batch_size // world_size, drop_last=True)  # this rank's indices, a list per step
test_batches = BatchSampler(range(rank, len(test_set), world_size), 1000, drop_last=False)  # each image on one rank
# A batch is train_set[list of indices]. EDIT: if yours takes single indices: batch_sampler=batches in place of both
train_loader = DataLoader(train_set, sampler=batches, batch_size=None, pin_memory=device.type == "cuda")  # EDIT
test_loader = DataLoader(test_set, sampler=test_batches, batch_size=None)  # EDIT

# --- model ------------------------------------------------------------------------------------------------------------
torch.manual_seed(args.seed)  # of the weights: the same in every process
# 28 x 28 pixels become 4 channels of 14 x 14, and these 32 of 6 x 6 in one step: the layers behind it are cheap.
layers = [nn.PixelUnshuffle(2), nn.Conv2d(4, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()]
layers += [nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()]
layers += [nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
# The ranks' BatchNorms are made equal before the evaluation, and not at every step.
ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False) if distributed else model
weights = {"nesterov": True, "weight_decay": 5e-4, "fused": device.type != "mps"}
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, **weights)
if args.precision == "auto":
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":  # a product in each: some CPUs with instructions for bfloat16 are slower with them
        matrices = [torch.ones(512, 512, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        fp32, bf16 = (min(timeit.repeat("x @ x", globals={"x": x}, number=1, repeat=10)) for x in matrices)
        fast = bf16 < 0.8 * fp32
    args.precision = "bf16" if fast else "fp32"
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
steps = args.epochs * len(train_loader)
for epoch in range(epochs_done + 1, args.epochs + 1):
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch, the same after a resume
    torch.manual_seed((args.seed + epoch) * world_size + rank)  # of the shifts: no two epochs or ranks alike
    losses, start = [], time.perf_counter()
    for step, (images, labels) in enumerate(train_loader, start=1):
        images, labels = (part.to(device, non_blocking=device.type == "cuda") for part in (images, labels))
        height, width = images.shape[-2:]
        x, y = torch.randint(5, (2,)).tolist()  # all images of the step by as much: a copy, and no more
        images = nn.functional.pad(images, [2, 2, 2, 2], mode="replicate")[:, :, y : y + height, x : x + width]
        done = ((epoch - 1) * len(train_loader) + step - 0.5) / steps
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(done / 0.3, (1 - done) / 0.7)
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

    for buffer in model.buffers() if distributed else []:
        dist.broadcast(buffer, 0)
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
