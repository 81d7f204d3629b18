"""resnet50 on JPEGs in shards: images/s with some of the changes of docs/04_faster.md.

    python examples/jpeg_speed.py FOLDER            # float32, and the rank itself reads the images
    python examples/jpeg_speed.py FOLDER workers tf32 bf16 channels_last fused compile
    ./torchrun.sh examples/jpeg_speed.py FOLDER workers     # on all ranks, with DDP

The images are synthetic, and each rank draws its own into FOLDER at first. torch's trace of rank 0
is left beside them.
"""

import io
import os
import random
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch.nn.functional import cross_entropy, interpolate
from torch.profiler import profile
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.transforms import v2

folder, changes = Path(sys.argv[1]), sys.argv[2:]
rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
world_size, on_node = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
if on_gpu:
    torch.cuda.set_device(local_rank if torch.cuda.device_count() > 1 else 0)
size, batch_size, images, steps = (224, 128, 64, 60) if on_gpu else (64, 4, 2, 2)


def write_shard(path: Path):
    """A tar file of JPEGs, 256 x 256, about 36 kB each."""
    with tarfile.open(path, "w") as tar:
        for number in range(images):
            # Noise on several scales, which compresses about as well as a photograph.
            scales = [torch.rand(1, 3, size, size) for size in (4, 16, 64, 256)]
            layers = [interpolate(noise, (256, 256), mode="bilinear") for noise in scales]
            pixels = (255 * sum(layers) / len(layers)).to(torch.uint8)[0]
            content = io.BytesIO()
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(content, "JPEG", quality=90)
            entry = tarfile.TarInfo(f"{random.randrange(1000)}-{number}.jpg")
            entry.size = content.tell()
            content.seek(0)
            tar.addfile(entry, content)


class Shards(IterableDataset):
    """Endlessly, the images (3, size, size) uint8 and labels of this worker's shards."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        crop, flip = v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()
        change = v2.Compose([crop, flip, v2.PILToTensor()])
        worker = get_worker_info()
        while True:
            for path in shards[worker.id :: worker.num_workers] if worker else shards:
                with tarfile.open(path) as tar:
                    for entry in tar:
                        image = Image.open(tar.extractfile(entry))
                        yield change(image), int(entry.name.partition("-")[0])


folder.mkdir(parents=True, exist_ok=True)
shards = [folder / f"{16 * rank + number:03}.tar" for number in range(16)]
for path in shards:
    if not path.exists():
        write_shard(path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = "tf32" in changes
layout = torch.channels_last if "channels_last" in changes else torch.contiguous_format
model = torchvision.models.resnet50().to(device, memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused="fused" in changes)
forward = model
if world_size > 1:
    dist.init_process_group(dist.get_default_backend_for_device(device))
    forward = torch.nn.parallel.DistributedDataParallel(model)
if "compile" in changes:
    forward = torch.compile(forward)
mean = torch.tensor([124.0, 116.0, 104.0], device=device).view(3, 1, 1)
# env.sh knows a node's CPUs and ranks. srun may have bound this rank to its share already.
env, cpus = os.environ, len(os.sched_getaffinity(0))
share = int(env.get("CPUS_PER_NODE", cpus)) // int(env.get("NPROC_PER_NODE", on_node))
workers = max(0, min(cpus, share, 15) - 1) if "workers" in changes else 0
# Forked, because new processes would run this file again.
options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
loader = iter(DataLoader(Shards(), batch_size, pin_memory=on_gpu, **options))


def train(count: int) -> float:
    """So many steps. Returns the images per second of all ranks."""
    start = time.perf_counter()
    for _ in range(count):
        pixels, labels = (part.to(device, non_blocking=True) for part in next(loader))
        pixels = ((pixels.float() - mean) / 58).to(memory_format=layout)
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in changes):
            loss = cross_entropy(forward(pixels).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.get_device_module(device).synchronize()
    return count * batch_size * world_size / (time.perf_counter() - start)


for _ in range(5 if on_gpu else 1):
    train(1)
line = f"images_per_second={train(steps):.1f}"
with profile() as seen:
    start = time.perf_counter()
    train(4)
    seconds = time.perf_counter() - start
if on_gpu:
    events = [event for event in seen.events() if not event.is_user_annotation]
    kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e6 / seconds
    line += f" gpu_busy={busy:.3f}"
    line += f" peak_memory_gib={torch.cuda.max_memory_allocated() / 2**30:.1f}"
if rank == 0:
    seen.export_chrome_trace(str(folder / f"{'-'.join(['trace', *changes])}.json.gz"))
    print(line, flush=True)
if world_size > 1:
    dist.barrier()
    dist.destroy_process_group()
    if not on_gpu:
        os._exit(0)  # gloo on a CPU may abort a Python that shuts down
