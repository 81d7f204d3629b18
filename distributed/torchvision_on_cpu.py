"""torchvision beside a CPU build of torch: `from torchvision_on_cpu import torchvision`.

torchvision's wheel is built for CUDA. Beside a CPU build of torch its compiled part does not
load, and `import torchvision` ends with "RuntimeError: operator torchvision::nms does not
exist". Data sets and transforms need neither of the two operators in question. Declaring them
lets the import go through. Elsewhere nothing is declared.
"""

import torch

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms does not exist" not in str(error):
        raise
    torch.library.define(
        "torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
    torch.library.define(
        "torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
    import torchvision

__all__ = ["torchvision"]
