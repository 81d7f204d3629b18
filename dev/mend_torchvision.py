"""Let torchvision be imported beside a CPU build of torch. `make` runs it in its own environment.

Some package indexes have torch for the CPU and torchvision for CUDA. `import torchvision` then ends
with "operator torchvision::nms does not exist", because its compiled operators cannot be loaded,
although its data sets and transforms need none of them. In an environment of your own, install both
from one index instead: pytorch.org/get-started says how.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

DECLARATIONS = """
# Added by dev/mend_torchvision.py: without its compiled operators torchvision still asks for them.
if not _has_ops():
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)
"""


if __name__ == "__main__":
    command = [sys.executable, "-c", "import torchvision"]
    tried = subprocess.run(command, capture_output=True, text=True)
    if "operator torchvision::nms does not exist" in tried.stderr:
        package = Path(importlib.util.find_spec("torchvision").origin).parent
        with (package / "extension.py").open("a") as file:
            file.write(DECLARATIONS)
        print("torchvision is built for CUDA and torch for the CPU: mended in this environment")
