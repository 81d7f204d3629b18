"""Runs a train script (argv[1]) with its arguments as it stands; then every rank prints a digest of its weights."""

import hashlib
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "distributed"))

from torch.nn.parallel import DistributedDataParallel

from resilience import step_zero

models = []
init = DistributedDataParallel.__init__


def remember(self, module, *args, **options):
    models.append(module)
    init(self, module, *args, **options)


def leave():
    for model in models:
        weights = b"".join(weight.detach().numpy().tobytes() for weight in model.state_dict().values())
        line = f"WEIGHTS {hashlib.sha256(weights).hexdigest()}\n"
        os.write(1, line.encode())  # one write: lines of ranks do not mix
    end()


DistributedDataParallel.__init__ = remember
end, step_zero.leave = step_zero.leave, leave
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
