"""What torchvision asks of its compiled part is declared, and the import goes through."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "distributed"))
from torchvision_on_cpu import torchvision

print(f"torchvision {torchvision.__version__} is imported", flush=True)
