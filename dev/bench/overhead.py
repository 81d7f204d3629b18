"""What the loop around a step costs: train_ddp.py's against those of Accelerate, Lightning and the HF Trainer.

    pip install -r requirements-bench.txt
    python dev/bench/overhead.py             # half a minute on a quiet CPU
    python dev/bench/overhead.py --check     # status 1 when less is reached than is promised

The same step in all of them: 16 numbers in, one linear layer with ten outputs, 16 rows a step, SGD with momentum on one
thread, so small that the loop is most of it. "Ours" is train_ddp.py as it stands but for the lines marked EDIT. The
others get the same DataLoader, and log the loss every 100 steps as train_ddp.py does; what they show and write besides
is turned off. Timed are the steps from the 200th on, by the data set, which nobody replaces. A framework that is not
installed is a row that claims nothing.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "distributed")]

import rows
from resilience.arguments import ArgumentParser, whole_number
from rows import Row

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=whole_number(1), default=7, help="turns of each, after a first one")
    parser.add_argument("--steps", type=whole_number(300), default=1200, help="of a turn; the first 200 are not timed")
    parser.add_argument("--check", action="store_true", help="status 1 when less is reached than is promised")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import torchvision_on_cpu  # noqa: F401  # before Lightning imports torchvision

LEASTS = {"Accelerate": 1.7, "Lightning": 2, "HF Trainer": 2.5}
PACKAGES = {"Accelerate": "accelerate", "Lightning": "lightning", "HF Trainer": "transformers"}
BATCH, FIRST = 16, 200


class Enough(BaseException):
    """Ends train_ddp.py, which would evaluate and save."""


class Clocked(TensorDataset):
    """Notes the time when the batches FIRST and `last` are fetched."""

    def __init__(self, steps: int):
        numbers = torch.randn(steps * BATCH, 16, generator=torch.Generator().manual_seed(0))
        super().__init__(numbers, numbers[:, :10].argmax(1))
        self.count, self.last, self.stamps, self.ends = 0, steps - 5, [], False

    def __getitem__(self, index):
        self.count += 1
        if self.count in (FIRST, self.last):
            self.stamps.append(rows.now())
        if self.count == self.last and self.ends:
            raise Enough
        return super().__getitem__(index)

    __getitems__ = __getitem__  # a DataLoader with a batch_sampler looks for it

    def seconds_a_step(self) -> tuple[float, float]:
        (wall, cpu), (last_wall, last_cpu) = self.stamps
        return (last_wall - wall) / (self.last - FIRST), (last_cpu - cpu) / (self.last - FIRST)


def loader(data: torch.utils.data.Dataset) -> DataLoader:
    """Fetches batches whole, as train_ddp.py's does, and in the form that all frameworks know: batch_sampler."""
    return DataLoader(data, batch_sampler=BatchSampler(range(len(data)), BATCH, drop_last=True), collate_fn=as_it_is)


def as_it_is(batch):
    return batch


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, fused=True)


# --- the loops --------------------------------------------------------------------------------------------------------


def train_ddp(data: Clocked) -> nn.Module:
    """train_ddp.py with another data set and model in the lines marked EDIT. Returns the model."""
    source = (REPOSITORY / "distributed/train_ddp.py").read_text()
    source, count = re.subn(
        r"^convolutions = .*\n.*\nmodel = .*# EDIT.*$", "model = nn.Linear(16, 10)", source, flags=re.M
    )
    source = source.replace("channels_last", "preserve_format")  # for images
    assert count == 1, "train_ddp.py has another model than overhead.py replaces"
    before, mine = sys.modules.get("mnist"), types.ModuleType("mnist")
    mine.load, mine.describe = lambda folder: (data, data), lambda folder: "numbers"
    data.ends = True
    alone = {name: value for name, value in os.environ.items() if not re.match("(LOCAL_)?RANK|WORLD_SIZE|SLURM", name)}
    command = ["train_ddp.py", "--device=cpu", f"--batch-size={BATCH}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(sys, "argv", [*command, f"--checkpoint-dir={folder}"]),
        patch.dict(os.environ, alone, clear=True),
        contextlib.suppress(Enough),
    ):
        sys.modules["mnist"] = mine
        script = Path(folder, "train_ddp.py")
        script.write_text(source)
        spec = importlib.util.spec_from_file_location("train_ddp", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    del sys.modules["mnist"]
    sys.modules.update({"mnist": before} if before else {})
    return module.model


def accelerate(data: Clocked) -> nn.Module:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), nn.Linear(16, 10)
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader(data))
    model.train()
    for step, (numbers, labels) in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(numbers), labels)
        accelerator.backward(loss)
        optimizer.step()
        if step % 100 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
    return accelerator.unwrap_model(model)


def lightning(data: Clocked) -> nn.Module:
    import lightning as L

    class Linear(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(16, 10)

        def training_step(self, batch, index):
            numbers, labels = batch
            loss = F.cross_entropy(self.model(numbers), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return optimizer_of(self)

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module = Linear()
    L.Trainer(accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=100, **off).fit(module, loader(data))
    return module.model


def hf_trainer(data: Clocked) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(16, 10)

        def forward(self, numbers, labels):
            logits = self.model(numbers)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class Named(torch.utils.data.Dataset):
        """The Trainer hands batches to the model by name."""

        def __len__(self):
            return len(data)

        def __getitems__(self, indices):
            return dict(zip(("numbers", "labels"), data[indices], strict=True))

    class Ours(Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(loader(Named()))

    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "num_train_epochs": 1, "per_device_train_batch_size": BATCH, "logging_steps": 100}
        options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0}
        arguments = TrainingArguments(folder, **options)
        module = Linear()
        constant = torch.optim.lr_scheduler.LambdaLR
        optimizer = optimizer_of(module)
        optimizers = optimizer, constant(optimizer, lambda step: 1.0)
        Ours(module, arguments, train_dataset=Named(), optimizers=optimizers).train()
    return module.model


# --- main -------------------------------------------------------------------------------------------------------------


def measure(train: Callable[[Clocked], nn.Module], steps: int) -> tuple[tuple[float, float], float]:
    """(wall, CPU) seconds a step of a turn, and the loss over all data after it."""
    data = Clocked(steps)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model = train(data).eval()
    with torch.inference_mode():
        loss = F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    return data.seconds_a_step(), loss


def main(args: Namespace):
    torch.set_num_threads(1)
    loops = {"Accelerate": accelerate, "Lightning": lightning, "HF Trainer": hf_trainer}
    missing = [name for name in loops if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        sentence = f"overhead.py: {', '.join(missing)}: not installed here (pip install -r requirements-bench.txt)"
        print(sentence, file=sys.stderr, flush=True)
    sides = {"ours": train_ddp} | {name: loops[name] for name in loops if name not in missing}
    taken, losses, busy = {name: [] for name in sides}, {}, []
    for _ in range(1 + args.rounds if len(sides) > 1 else 0):
        with rows.watched(busy):
            for name, train in sides.items():
                seconds, losses[name] = measure(train, args.steps)
                taken[name].append(seconds)
    rows.print_heads()
    missed = []
    for name in loops:
        row = Row("loop around a step", name, LEASTS[name], by_cpu=True)
        row.missing = "not installed" if name in missing else ""
        if name in sides:
            row.ours, row.theirs, row.busy = taken["ours"][1:], taken[name][1:], busy[1:]
            row.good = losses["ours"] < 1.02 * losses[name]
            row.quality = f"loss {losses['ours']:.3f}, theirs {losses[name]:.3f}"
        missed.append(rows.report(row))
    if args.check and any(missed):
        sys.exit("overhead.py: " + "; ".join(filter(None, missed)))


if __name__ == "__main__":
    main(args)
