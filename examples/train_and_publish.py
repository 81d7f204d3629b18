"""A trainer that servers follow: every few steps it writes its weights to files, and tells them.

    ./torchrun.sh examples/train_and_publish.py weights localhost:8000 --steps 100

In a job, docs/other_jobs.md starts it beside examples/serve_newest.py. weights/step_N is a folder
that from_pretrained() and vLLM can read. It is written beside the older ones, and gets its name
when it is whole. A server that is slow, hangs or is dead delays no step.

It needs preemption.py, checkpoint.py, hugging_face.py, transformer.py, sizes.py, token_files.py and
heartbeat.py. Its checkpoints, from which a requeued job resumes, are in checkpoints/RUN. By hand
without the variable RUN each run is a new one.
"""

import sys

sys.path.append("distributed")  # EDIT: where these files are
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import os
import queue
import shutil
import threading
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import heartbeat
import hugging_face
import sizes
from transformer import Transformer

BATCH, CONTEXT, SAVE_EVERY = 16, 64, 50
KEEP = 3  # folders of weights, because a slow server may still read an older one
TIMEOUT = 60  # seconds for a server to load weights

parser = heartbeat.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("weights", type=Path, help="the folder for the weights, which all nodes share")
parser.add_argument("servers", nargs="*", metavar="HOST:PORT")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--publish-every", type=int, default=10, metavar="STEPS")
args = parser.parse_args()

device = torch.device("cpu")
if torch.accelerator.is_available():
    number = int(os.environ["LOCAL_RANK"]) if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)
dist.init_process_group(dist.get_default_backend_for_device(device))
rank, world_size = dist.get_rank(), dist.get_world_size()
if BATCH % world_size != 0:
    heartbeat.fail(f"{BATCH} windows cannot be split over {world_size} ranks: change BATCH")

# EDIT: your data and your model. This one learns the bytes of this file by heart.
text = torch.tensor(list(Path(__file__).read_bytes()))
model = Transformer(sizes.new_config(sizes.SIZES["cpu"], CONTEXT, vocab_size=256))
model.init_weights(device, seed=0)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)


def tell(server: str, news: queue.Queue):
    """In a thread for each server: asks it to load the newest weights, once at a time.

    It prints a line in one piece, because lines of several threads could mix.
    """
    while True:
        path = news.get()
        # EDIT: what your server wants. docs/other_jobs.md has vLLM's.
        url, body = f"http://{server}/reload", path.name.encode()
        try:
            if news.empty():  # if not, it was slow, and misses this one
                with urllib.request.urlopen(url, body, timeout=TIMEOUT):
                    print(f"{server} serves {path.name}\n", end="", flush=True)
        except (OSError, HTTPException) as error:
            print(f"{server} has not loaded {path.name}: {error}\n", end="", file=sys.stderr)
        news.task_done()


def publish(step: int):
    """All ranks call it, because of split weights (FSDP) each rank has a part."""
    path = args.weights / f"step_{step}"
    hugging_face.write(path, model)
    if rank == 0:
        found = checkpoint.steps(args.weights)
        # A job that was stopped may have published more steps than it has saved.
        later = sum(number > step for number in found)
        for number in found[:later] + found[later + KEEP :]:
            shutil.rmtree(args.weights / f"step_{number}", ignore_errors=True)
        for news in all_news:
            news.put(path)


all_news = []
if rank == 0:
    for server in args.servers:
        all_news.append(queue.Queue())
        threading.Thread(target=tell, args=[server, all_news[-1]], daemon=True).start()

checkpoints, fault = checkpoint.Folder(resume="RUN" in os.environ), None
if rank == 0:
    # publish deletes, so the folder has to be this run's.
    args.weights.mkdir(parents=True, exist_ok=True)
    owner = args.weights / "owner"
    if not owner.exists() and not checkpoint.steps(args.weights):
        owner.write_text(str(checkpoints.path))
    if not owner.exists() or owner.read_text() != str(checkpoints.path):
        fault = f"{args.weights} belongs to another run: choose a new folder"
checkpoints.end_if(fault)
step, stopped = checkpoints.load(model, optimizer), False
publish(step)
while step < args.steps and not stopped:
    step += 1
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, [BATCH], generator=generator)
    windows = torch.stack([text[i : i + CONTEXT + 1] for i in starts[rank::world_size]]).to(device)
    logits = ddp(windows[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % args.publish_every == 0 or step == args.steps:
        publish(step)
        if rank == 0:
            print(f"step={step}/{args.steps} loss={loss.item():.4f}\n", end="", flush=True)
    stopped = preemption.asked(device, step if step < args.steps else None)
    if stopped or step % SAVE_EVERY == 0 or step == args.steps:
        checkpoints.save(step, model, optimizer)

saved = checkpoints.wait()
if rank == 0:
    print(checkpoints.outcome(step, stopped), flush=True)
# Until the servers have the last weights, unless one hangs, or Slurm asks this job to stop.
deadline = time.monotonic() + TIMEOUT
while any(news.unfinished_tasks for news in all_news) and time.monotonic() < deadline:
    if stopped or preemption.received:
        break
    time.sleep(0.1)
preemption.end(stopped, not saved)
