"""A plugin for make test-gpu: the log begins with torch, NCCL, the driver and the GPUs."""

import subprocess

import torch


def pytest_report_header(config) -> str:
    if config.getoption("--device") == "cpu" or not torch.cuda.is_available():
        return f"torch {torch.__version__}, no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return f"torch {torch.__version__}, NCCL {nccl}\n{gpus}"
