"""resnet50 on JPEGs in shards, faster one change at a time: a table, and two of torch's traces.

    python dev/jpeg_speed.py --out FOLDER                # one GPU: about two minutes
    python dev/jpeg_speed.py --out FOLDER --device cpu   # the rehearsal: few and small

The images are synthetic, and drawn here. Each row keeps what the rows above it have changed.
"""

import argparse
import io
import os
import random
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch.nn.functional import cross_entropy, interpolate
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.transforms import v2

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--out", type=Path, required=True, help="the folder of the traces")
parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
args = parser.parse_args()
on_gpu, device = args.device == "cuda", torch.device(args.device)
size, batch_size, images, steps = (224, 128, 1024, 60) if on_gpu else (64, 4, 32, 2)
cpus = len(os.sched_getaffinity(0))


def write_shards(folder: Path, shards: int = 16):
    """Tar files of JPEGs, 256 x 256, about 30 kB each as photographs of that size have."""
    torch.manual_seed(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for number in range(images // shards):
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

    def __init__(self, folder: Path):
        self.paths = sorted(folder.glob("*.tar"))
        change = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        self.change = v2.Compose(change)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        first, count = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            for path in self.paths[first % len(self.paths) :: count]:
                with tarfile.open(path) as tar:
                    for entry in tar:
                        image = Image.open(tar.extractfile(entry))
                        yield self.change(image), int(entry.name.partition("-")[0])


def train(folder: Path, trace: Path | None, **how: bool) -> tuple[float, float, float]:
    """Images/s, the GPU's busy share, and the peak memory in GiB."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = how["tf32"]
    layout = torch.channels_last if how["channels_last"] else torch.contiguous_format
    model = torchvision.models.resnet50().to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=how["fused"])
    mean = torch.tensor([124.0, 116.0, 104.0], device=device).view(3, 1, 1)
    forward = torch.compile(model) if how["compile"] else model
    workers = min(cpus - 1, 14) if how["workers"] else 0
    # Forked, because new processes would run this file again.
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader = iter(DataLoader(Shards(folder), batch_size, pin_memory=on_gpu, **options))

    def step():
        pixels, labels = (part.to(device, non_blocking=True) for part in next(loader))
        pixels = ((pixels.float() - mean) / 58).to(memory_format=layout)
        with torch.autocast(device.type, torch.bfloat16, enabled=how["bf16"]):
            loss = cross_entropy(forward(pixels).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def wait():
        torch.get_device_module(device).synchronize()

    for _ in range(5 if on_gpu else 1):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = done = time.perf_counter()
    count = 0
    while count < steps and done - start < 8:
        step()
        count += 1
        done = time.perf_counter()
    wait()
    rate = count * batch_size / (time.perf_counter() - start)

    busy = float("nan")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        start = time.perf_counter()
        for _ in range(4 if on_gpu else 1):
            step()
        wait()
        seconds = time.perf_counter() - start
    if on_gpu:
        events = [event for event in seen.events() if not event.is_user_annotation]
        kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
        busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e6 / seconds
    if trace:
        seen.export_chrome_trace(str(trace))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    return rate, busy, peak


CHANGES = {
    "float32, images read in the rank": {},
    "loader workers": {"workers": True},
    "TF32": {"tf32": True},
    "bf16": {"bf16": True},
    "channels_last": {"channels_last": True},
    "fused optimizer": {"fused": True},
    "torch.compile": {"compile": True},
}
if not on_gpu:
    del CHANGES["torch.compile"]
how = dict.fromkeys(("workers", "tf32", "bf16", "channels_last", "fused", "compile"), False)
args.out.mkdir(parents=True, exist_ok=True)
with tempfile.TemporaryDirectory() as folder:
    write_shards(Path(folder))
    bytes_each = sum(path.stat().st_size for path in Path(folder).iterdir()) / images
    print(f"{images} images of {bytes_each / 1000:.0f} kB in 16 shards, batch {batch_size}.\n")
    print("| resnet50 | images/s | GPU busy | peak, GiB |\n|---|---|---|---|", flush=True)
    for number, (name, change) in enumerate(CHANGES.items()):
        how |= change
        ends = number in (0, len(CHANGES) - 1)
        trace = args.out / f"trace-{'before' if number == 0 else 'after'}.json.gz" if ends else None
        rate, busy, peak = train(Path(folder), trace, **how)
        print(f"| {name} | {rate:,.1f} | {busy:.0%} | {peak:.1f} |", flush=True)
