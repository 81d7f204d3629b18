"""Text as characters: the files that aux/prepare_data.py wrote, memory-mapped, and windows of them.

A folder holds train.bin and val.bin, one number (uint8 or little-endian uint16) per character,
and vocabulary.json, which says which number is which character; SHA256SUMS has their checksums.
"""

import json
from argparse import Namespace
from pathlib import Path

import torch

from resilience import checksums
from resilience.samplers import seed_from

IGNORED = -100  # cross_entropy's ignore_index
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16}


def read_vocabulary(folder: Path) -> dict:
    """What is in vocabulary.json: characters, dtype, source, its sha256, train_tokens and
    val_tokens."""
    return json.loads((Path(folder) / "vocabulary.json").read_text())


def missing_data(folder: Path, context: int, local_rank: int = 0) -> str | None:
    """What is wrong in `folder` as one sentence, or None: files, sizes and, on local rank 0,
    checksums."""
    folder = Path(folder)
    remedy = "prepare it once, before the job: python aux/prepare_data.py shakespeare"
    try:
        vocabulary = read_vocabulary(folder)
        itemsize = DTYPES[vocabulary["dtype"]].itemsize
        sizes = {
            split: (vocabulary[f"{split}_tokens"], folder / f"{split}.bin")
            for split in ("train", "val")
        }
        wrong = next(
            (path for count, path in sizes.values() if path.stat().st_size != count * itemsize),
            None,
        )
        damage = f"{wrong} is not as long as in vocabulary.json beside it" if wrong else None
        if local_rank == 0:  # once per node: it reads every file whole
            damage = damage or checksums.damaged(folder)
    except OSError as error:
        return f"no prepared text at {error.filename} ({error.strerror}); {remedy}"
    except (ValueError, KeyError) as error:
        return (
            f"{folder / 'vocabulary.json'} is not one that aux/prepare_data.py wrote ({error!r}); "
            f"{remedy}"
        )
    if damage:
        return f"{damage}; move the folder away and {remedy}"
    shortest, path = min(sizes.values())
    if shortest <= context:
        return (
            f"--context {context} is too long for the {shortest} characters in {path}: "
            f"{shortest - 1} would do"
        )
    return None


def windows(folder: Path, split: str, context: int) -> torch.Tensor:
    """Every stretch of context + 1 characters of a split, (characters - context, context + 1),
    as a view of the file.

    Indexing it with a tensor of starts reads a whole batch at once, some 50 times faster than
    stacking slices.
    """
    vocabulary = read_vocabulary(folder)
    path, count = str(Path(folder) / f"{split}.bin"), vocabulary[f"{split}_tokens"]
    tokens = torch.from_file(path, shared=False, size=count, dtype=DTYPES[vocabulary["dtype"]])
    return tokens.unfold(0, context + 1, 1)


def read(windows: torch.Tensor, starts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The windows that begin at `starts`, (n, context + 1) int64, on the way to `device`."""
    batch = windows[starts].to(torch.int64)
    return (
        batch.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else batch.to(device)
    )


def random_batch(
    args: Namespace,
    windows: torch.Tensor,
    step: int,
    data_rank: int,
    data_ranks: int,
    device: torch.device,
) -> torch.Tensor:
    """This rank's sequences of a step, (batch_size / data_ranks, context + 1) int64: input and,
    one on, target.

    All ranks draw the whole batch, from seed and step alone, and take their part of it: the
    order of the data depends neither on the number of ranks nor on a restart. Steps count from
    0.
    """
    generator = torch.Generator().manual_seed(seed_from(args.seed, step))
    starts = torch.randint(len(windows), (args.batch_size,), generator=generator)
    return read(windows, starts.chunk(data_ranks)[data_rank], device)


def fixed_batches(args: Namespace, data_rank: int, data_ranks: int, device: torch.device):
    """This rank's part of the set to evaluate on: tokens and targets, (batch_size / data_ranks,
    context) int64.

    The set is the validation split in windows side by side, or --eval-windows of them, evenly
    spread. A batch for which too few are left is filled up, with targets that cross_entropy
    ignores: all ranks have the same number of batches of the same shape, since they have to meet
    in the collectives, and torch.compile takes time for each shape.
    """
    unseen = windows(args.data_dir, "val", args.context)
    starts = torch.arange(0, len(unseen), args.context)
    if 0 < args.eval_windows < len(starts):
        starts = starts[torch.linspace(0, len(starts) - 1, args.eval_windows).long()]
    rows = args.batch_size // data_ranks
    for part in starts.split(args.batch_size):
        mine = part[data_rank * rows :][:rows]
        batch = read(unseen, torch.cat((mine, part[:1].expand(rows - len(mine)))), device)
        targets = batch[:, 1:].clone()
        targets[len(mine) :] = IGNORED
        yield batch[:, :-1], targets


def describe(folder: Path) -> str:
    """What is in `folder`, in words for the log."""
    found = read_vocabulary(folder)
    return (
        f"{found['source']}, {found['train_tokens']} characters of {len(found['characters'])} "
        f"kinds, in {folder}"
    )
