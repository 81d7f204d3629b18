"""Train a ConvNet on MNIST in a queue that stops jobs: train_ddp.py with the package resilience.

    python aux/prepare_data.py mnist                              # once, before any job
    python distributed/train_preemptible.py                       # one process: CUDA, Apple's MPS or the CPU
    ./torchrun.sh distributed/train_preemptible.py --epochs 3     # all GPUs of this machine, or two CPU ranks
    sbatch launch_slurm_with_torchrun.sh distributed/train_preemptible.py --epochs 3
    scancel --signal=TERM JOB                                     # a rehearsal: it saves, is requeued and resumes

Asked to stop, by SIGTERM or SIGUSR1, it saves after the step it is in. A run that was stopped and resumed has, on a CPU
bit for bit, the losses and weights of one that was not.
Grown from distributed/train_ddp.py: arguments, process group, data, model, checkpoint, training.
"""

import math
import os
import sys
from pathlib import Path

from resilience import stop_request
from resilience.arguments import ArgumentParser, device_name, indivisible, number, whole_number

stop_request.listen()  # before the slow imports: Slurm may ask at any time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

import mnist  # EDIT: your data
from resilience import checksums
from resilience.checkpoints import Checkpoints, seed_from
from resilience.place import find_ranks, init_process_group
from resilience.progress import Progress
from resilience.samplers import RunSampler

# --- arguments --------------------------------------------------------------------------------------------------------
parser = ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=whole_number(1), default=3, help="passes over the training images")
parser.add_argument("--max-steps", type=whole_number(1), help="stop after this many steps in all (default: never)")
batch = parser.add_mutually_exclusive_group()
batch.add_argument("--batch-size", type=whole_number(1), default="64", help="images per step, over all ranks")
batch.add_argument("--batch-size-per-rank", type=whole_number(1), help="the same, for each rank")
parser.add_argument("--learning-rate", type=number(0), default=0.02, help="of SGD with momentum 0.9")
parser.add_argument("--dropout", type=number(0, below=1), default=0.25, help="probability of dropping an activation")
parser.add_argument("--seed", type=whole_number(0), default=0, help="of weights, order of the images and dropout")
parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="dtype of autocast")
device = os.environ.get("TRAIN_DEVICE", "auto")
parser.add_argument("--device", type=device_name, default=device, help="auto, cpu, cuda or mps; or $TRAIN_DEVICE")
parser.add_argument("--data-dir", type=Path, default="data/mnist", help="written by aux/prepare_data.py")
parser.add_argument("--num-workers", type=whole_number(0), default=0, help="loader processes of each rank")
parser.add_argument("--log-every", type=whole_number(1), default=100, help="steps between two log lines")
parser.add_checkpoint_arguments()
parser.add_timeout_arguments()
args = parser.parse_args()

# --- process group ----------------------------------------------------------------------------------------------------
_, _, _, world_size = find_ranks()
if args.batch_size_per_rank is not None:
    args.batch_size = args.batch_size_per_rank * world_size
fault = indivisible("--batch-size", args.batch_size, world_size, f"{world_size} ranks") or Checkpoints.conflict(args)
place = init_process_group(args, fault)  # any rank's fault stops all of them, with one sentence
rank, device = place.rank, place.device

# --- data -------------------------------------------------------------------------------------------------------------
files = Path(args.data_dir, "MNIST/raw")
fault = checksums.damaged(files) if place.local_rank == 0 else None  # once per node; mnist.load compares sizes
fault = fault and f"{fault}; move it away and prepare it again: python aux/prepare_data.py mnist"
try:  # EDIT: your data; two TensorDatasets of images (n, 1, 28, 28) float32 and labels (n,) int64
    train_set, test_set = mnist.load(args.data_dir)
    if args.batch_size > len(train_set):
        fault = f"--batch-size {args.batch_size} is more than all {len(train_set)} images"
except ValueError as error:
    fault = str(error)
place.stop_if_any(fault)
trained_on = sorted(files.glob("train-*-ubyte")) if rank == 0 else []  # other data: another run, which rank 0 notices
identity = [checksums.of(path)[:12] for path in trained_on]
source = mnist.describe(args.data_dir)
steps_per_epoch = len(train_set) // args.batch_size
total_steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
# A TensorDataset takes a batch of indices at once. Others: DataLoader(train_set, batch_sampler=batches, **workers)
batches = RunSampler(len(train_set), args.batch_size, range(total_steps), args.seed, rank, world_size)
test_batches = BatchSampler(range(rank, len(test_set), world_size), 1000, drop_last=False)  # each image once
workers = {"num_workers": args.num_workers, "worker_init_fn": stop_request.ignore}
workers |= {"multiprocessing_context": "fork"} if args.num_workers else {}  # spawned ones would run this script again
train_loader = DataLoader(train_set, sampler=batches, batch_size=None, pin_memory=device.type == "cuda", **workers)
test_loader = DataLoader(test_set, sampler=test_batches, batch_size=None)

# --- model ------------------------------------------------------------------------------------------------------------
torch.manual_seed(args.seed)  # the same weights on every rank
convolutions = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU())
linears = nn.Sequential(nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(128, 10))
model = nn.Sequential(convolutions, nn.Dropout(args.dropout), nn.Flatten(), linears)  # EDIT: your model
model = model.to(device, memory_format=torch.channels_last if device.type != "mps" else None)  # faster convolutions
ddp = DistributedDataParallel(model) if world_size > 1 else model  # averages the gradients over the ranks
# DDP rebuilds its buckets after the first pass, which changes the order of its sums. This pass is discarded, so that a
# resumed run rounds as one that was not stopped.
ddp.eval()(next(iter(train_loader))[0].to(device)).sum().backward()
model.zero_grad()
fused = device.type != "mps" and args.precision != "fp16"  # one operation for all weights; wrong if step 1 is skipped
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, fused=fused)
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
autocast = torch.autocast(device.type, dtype, enabled=args.precision != "fp32")
scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")  # keeps small gradients from being 0
if args.precision == "fp16" and device.type == "cpu" and rank == 0:
    print("warning: fp16 is slow on a CPU: use --precision bf16", file=sys.stderr)

# --- checkpoint -------------------------------------------------------------------------------------------------------
if rank == 0:
    print(f"Data: {source}. Checkpoints: {args.checkpoint_dir}", flush=True)
state = {"model": model, "optimizer": optimizer, "scaler": scaler}
names = ("batch_size", "learning_rate", "dropout", "seed", "precision")  # a run that is resumed must be equal in these
checkpoints = Checkpoints(args, place, {name: vars(args)[name] for name in names} | {"data": identity}, total_steps)
first = checkpoints.resume(state)
batches.steps = range(first, total_steps)
test_loss, accuracy = (checkpoints.values.get(name, math.nan) for name in ("test_loss", "test_accuracy"))

# --- training ---------------------------------------------------------------------------------------------------------
progress = Progress(args, place, "images", args.batch_size, first, total_steps)
model.train()
for step, (images, labels) in enumerate(train_loader, start=first + 1):
    torch.manual_seed(seed_from(args.seed, step, rank))  # of dropout: the same after a resume, in the midst of an epoch
    images, labels = (tensor.to(device, non_blocking=device.type == "cuda") for tensor in (images, labels))
    with autocast:
        loss = nn.functional.cross_entropy(ddp(images).float(), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # optimizer.step(); with fp16 none at all if any gradient is inf or nan
    scaler.update()  # with fp16: the scale for the next step
    epoch = math.ceil(step / steps_per_epoch)
    if progress.add(step, loss):
        progress.log(step, epoch)
    save, stop = checkpoints.due(step)

    if step % steps_per_epoch == 0 or step == total_steps:
        model.eval()
        sums = torch.zeros(2, device=device)  # loss, correct predictions
        with torch.inference_mode(), autocast, place.longer_timeout(args.save_timeout):
            for images, labels in test_loader:
                logits, labels = model(images.to(device)).float(), labels.to(device)
                right = (logits.argmax(1) == labels).sum()
                sums += torch.stack((nn.functional.cross_entropy(logits, labels, reduction="sum"), right))
        test_loss, accuracy = place.all_reduced(sums / len(test_set))
        progress.log_evaluation(step, epoch, test_loss=test_loss, test_accuracy=accuracy)
        model.train()
        save = True
    if save:
        progress.check_loss(step)  # weights that are not finite must not replace good ones
        checkpoints.save(step, state, test_loss=test_loss, test_accuracy=accuracy)
    if stop:
        break

epoch = math.ceil(checkpoints.step / steps_per_epoch)
checkpoints.finish(f"epoch={epoch} average_loss={test_loss:.4f} accuracy={accuracy:.4f}")
place.shutdown()
