"""torchvision's wheel is built for CUDA, and this torch for the CPU."""

import torchvision

print(f"torchvision {torchvision.__version__} is imported", flush=True)
