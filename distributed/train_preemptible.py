"""Train a ConvNet on MNIST in jobs that Slurm may stop: train_ddp.py with the package resilience.

    python aux/prepare_data.py mnist                              # once, before any job
    ./torchrun.sh distributed/train_preemptible.py --epochs 3     # one rank per GPU, or two
    sbatch launch_slurm_with_torchrun.sh distributed/train_preemptible.py --epochs 3
    scancel --signal=TERM JOB     # a rehearsal: it saves, is requeued and resumes

Asked to stop by SIGTERM or SIGUSR1, it saves after the current step. A run that was stopped and
resumed has the losses and weights of one that was not, on a CPU bit for bit.
Grown from distributed/train_ddp.py: arguments, process group, data, model, checkpoint, training.
"""

import math
import os
import sys
from datetime import timedelta
from pathlib import Path

from resilience import stop_request

stop_request.listen()  # before the slow imports: Slurm may ask at any time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import mnist  # EDIT: your data
from resilience import checksums
from resilience.arguments import ArgumentParser, device_name, indivisible, number, whole_number
from resilience.checkpoint_files import folder_fault
from resilience.checkpoints import Checkpoints
from resilience.place import Place
from resilience.progress import Progress
from resilience.ranks import find_ranks
from resilience.samplers import RunSampler, seed_from
from resilience.step_zero import device_fault, step_zero

# --- arguments ---
parser = ArgumentParser(description=__doc__)
count, positive = whole_number(0), whole_number(1)
parser.add_argument("--epochs", type=positive, default=3, help="passes over the training images")
parser.add_argument(
    "--max-steps", type=positive, help="stop after this many steps (default: never)"
)
parser.add_argument("--batch-size", type=positive, default=64, help="per step, over all ranks")
parser.add_argument("--learning-rate", type=number(0), default=0.02, help="of SGD, momentum 0.9")
parser.add_argument("--dropout", type=number(0, below=1), default=0.25, help="share of activations")
parser.add_argument("--seed", type=count, default=0, help="of weights, data order and dropout")
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="dtype")
default_device = os.environ.get("TRAIN_DEVICE", "auto")
parser.add_argument("--device", type=device_name, default=default_device, help="auto, cpu or cuda")
parser.add_argument("--data-dir", default="data/mnist", help="written by aux/prepare_data.py")
parser.add_argument("--num-workers", type=count, default=0, help="loader processes of each rank")
parser.add_argument("--log-every", type=positive, default=100, help="steps between two log lines")
parser.add_checkpoint_arguments()
parser.add_timeout_arguments()
args = parser.parse_args()

# --- process group ---
# RANK, LOCAL_RANK and WORLD_SIZE, which the launcher sets. A script that srun starts without a
# launcher finds Slurm's own numbers.
ranks = find_ranks()
rank, local_rank, world_size = ranks.rank, ranks.local_rank, ranks.world_size

fault = (
    device_fault(args.device, ranks)
    or indivisible("--batch-size", args.batch_size, world_size, f"{world_size} ranks")
    or folder_fault(args.checkpoint_dir, args.resume, ".pt")
)
use_cuda = args.device != "cpu" and torch.cuda.is_available() and not fault
device = torch.device("cpu")
if use_cuda:
    # GPU number local_rank, but number 0 if Slurm shows this rank a single GPU.
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)

# Step 0: the ranks compare what they know. A fault on any rank ends all of them.
store = step_zero(args, ranks, device, fault)
place = Place(ranks, device, args.init_timeout)
if world_size > 1:
    backend = "nccl" if use_cuda else "gloo"
    wait = timedelta(seconds=args.init_timeout)
    place.beat.start()
    with place.connecting(backend, store):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=wait
        )
        place.all_reduced([1])  # NCCL connects in its first collective
if args.deterministic:
    torch.use_deterministic_algorithms(True)


def log(text: str):
    if rank == 0:
        print(text, flush=True)


# --- data ---
files = Path(args.data_dir, "MNIST/raw")
# Once per node, because it reads every file whole.
fault = checksums.damaged(files) if local_rank == 0 else None
if fault:
    fault += "; move it away and prepare it again: python aux/prepare_data.py mnist"
try:
    # EDIT: your data; two TensorDatasets of images (n, 1, 28, 28) float32 and labels (n,) int64
    train_set, test_set = mnist.load(args.data_dir)
    if args.batch_size > len(train_set):
        fault = f"--batch-size {args.batch_size} is more than the {len(train_set)} images"
except ValueError as error:
    fault = fault or str(error)
place.stop_if_any(fault)
# With different data it would be another run, which rank 0 notices.
trained_on = sorted(files.glob("train-*-ubyte")) if rank == 0 else []
identity = [checksums.of(path)[:12] for path in trained_on]

steps_per_epoch = len(train_set) // args.batch_size
total_steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
steps = range(total_steps)
sampler = RunSampler(len(train_set), args.batch_size, steps, args.seed, rank, world_size)
test_sampler = BatchSampler(range(rank, len(test_set), world_size), 1000, drop_last=False)
# Workers are forked, because spawned ones would run this script again. They ignore signals, which
# are for the rank.
workers = {"num_workers": args.num_workers, "worker_init_fn": stop_request.ignore}
if args.num_workers:
    workers["multiprocessing_context"] = "fork"
# A TensorDataset takes a batch of indices at once. EDIT: other datasets need DataLoader(train_set,
# batch_sampler=sampler, **workers).
train_loader = DataLoader(
    train_set, sampler=sampler, batch_size=None, pin_memory=use_cuda, **workers
)
test_loader = DataLoader(test_set, sampler=test_sampler, batch_size=None)

# --- model ---
torch.manual_seed(args.seed)
# EDIT: your model
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
    nn.Dropout(args.dropout), nn.Flatten(),
    nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(128, 10),
)  # fmt: skip
model = model.to(device, memory_format=torch.channels_last)
# backward() averages the gradients over all ranks.
ddp = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
# DDP rebuilds its buckets after the first pass, which changes the order of its sums. This pass is
# discarded, so that a resumed run rounds like one that was not stopped.
images, labels = next(iter(train_loader))
ddp.eval()
ddp(images.to(device)).sum().backward()
model.zero_grad()
# A fused optimizer would be wrong if fp16 skips the first step.
fused = args.precision != "fp16"
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, fused=fused)
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
autocast = torch.autocast(device.type, dtype, enabled=args.precision != "fp32")
# With fp16 it keeps small gradients from becoming 0.
scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

# --- checkpoint ---
log(f"Data: {mnist.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}")
state = {"model": model, "optimizer": optimizer, "scaler": scaler}
# A resumed run must be equal in these.
names = ("batch_size", "learning_rate", "dropout", "seed", "precision")
run = {name: vars(args)[name] for name in names} | {"data": identity}
checkpoints = Checkpoints(args, place, run, total_steps)
first = checkpoints.resume(state)
sampler.steps = range(first, total_steps)
test_loss = checkpoints.values.get("test_loss", math.nan)
accuracy = checkpoints.values.get("test_accuracy", math.nan)

# --- training ---
progress = Progress(args, place, "images", args.batch_size, first, total_steps)
model.train()
for step, (images, labels) in enumerate(train_loader, start=first + 1):
    # Seeds dropout, the same after a resume in the middle of an epoch.
    torch.manual_seed(seed_from(args.seed, step, rank))
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    with autocast:
        loss = nn.functional.cross_entropy(ddp(images).float(), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # optimizer.step(), which fp16 skips if a gradient is inf or nan
    scaler.update()
    epoch = math.ceil(step / steps_per_epoch)
    if progress.add(step, loss):
        progress.log(step, epoch)
    save, stop = checkpoints.due(step)

    if step % steps_per_epoch == 0 or step == total_steps:
        model.eval()
        # The sum of the losses, and the number of correct predictions.
        sums = torch.zeros(2, device=device)
        with torch.inference_mode(), autocast, place.longer_timeout(args.save_timeout):
            for images, labels in test_loader:
                logits, labels = model(images.to(device)).float(), labels.to(device)
                sums[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
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
