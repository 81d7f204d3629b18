"""What pytest has to know. What the tests share is in helpers/, as plugins."""

import signal
import subprocess

pytest_plugins = ["slurm", "pages", "engines", "models", "ddp_runs", "trials"]

# Like ctrl-C: by way of the fixtures, which end the cluster.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# In the background it is inherited ignored, also by children.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Fixtures that need root, and marks of what takes long or needs more than this machine
NEEDS = ("cluster", "engine", "debian", "memory", "laptop")
LONG = ("long", "scale", "gpu", "matrix", "kernels")
MINUTES = ("laptop", "preemption", "train_ddp", "train_fsdp", "launchers", "docs", "watch_job")


def pytest_collection_modifyitems(items):
    """Files that take minutes first, so that both processes end at the same time."""
    for item in items:
        needs = any(name.endswith(NEEDS) for name in item.fixturenames)
        if needs or any(map(item.get_closest_marker, LONG)):
            item.add_marker("slurm")
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in MINUTES)


def pytest_addoption(parser):
    help = "of the tests marked gpu: with cpu, the same code is run on the CPU, with gloo"
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help=help)


def pytest_report_header(config) -> str | None:
    """The log of make test-gpu begins with torch, NCCL, the driver and the GPUs."""
    if config.getoption("-m") != "gpu":
        return None
    import torch

    if config.getoption("--device") == "cpu" or not torch.cuda.is_available():
        return f"torch {torch.__version__}, no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return f"torch {torch.__version__}, NCCL {nccl}\n{gpus}"
