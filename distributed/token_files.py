"""Text as token files: train.bin and val.bin, memory-mapped, and windows of them.

Each holds one number per token (uint8, or uint16 or uint32 in little-endian order). vocabulary.json
beside them, which aux/prepare_data.py writes, says how many numbers there are and how to turn them
into text.

A folder of nanoGPT's (github.com/karpathy/nanoGPT, data/) works as well: it holds uint16, and
either meta.pkl with its characters or, without it, GPT-2's tokens.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

IGNORED = -100  # cross_entropy's ignore_index
# torch can index int32 but not uint32, and no vocabulary needs the sign bit.
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.int32}
GPT2_SIZE = 50_257


class NothingButData(pickle.Unpickler):
    """For meta.pkl, which may be a stranger's: reads dicts, strings and numbers, but no code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and is not read")


def read_vocabulary(folder: Path) -> dict:
    """The content of vocabulary.json: dtype, source, train_tokens, val_tokens, id (of the data),
    and under "tokenizer" its name ("characters", "bytes" or "tokenizer.json"), its size and, for
    "characters", these in order. Raises OSError, ValueError or KeyError.
    """
    folder = Path(folder)
    described = folder / "vocabulary.json"
    if described.exists() or not (folder / "train.bin").exists():
        return json.loads(described.read_text())

    tokenizer = {"name": "tokenizer.json", "size": GPT2_SIZE}
    if (folder / "meta.pkl").exists():
        with (folder / "meta.pkl").open("rb") as file:
            meta = NothingButData(file).load()
        letters = [meta["itos"][i] for i in range(meta["vocab_size"])]
        tokenizer = {"name": "characters", "size": len(letters), "characters": letters}
    sizes = {split: (folder / f"{split}.bin").stat().st_size for split in ("train", "val")}
    counts = {f"{split}_tokens": size // 2 for split, size in sizes.items()}
    source = "token files of nanoGPT"
    described = {"tokenizer": tokenizer, "dtype": "uint16", "source": source, **counts}
    return described | {"id": f"{counts['train_tokens']} + {counts['val_tokens']} tokens"}


def missing_data(folder: Path, context: int) -> str | None:
    """One sentence on the fault in `folder`, or None. It reads no more than a million tokens;
    `sha256sum --check SHA256SUMS` compares the files whole."""
    folder = Path(folder)
    remedy = "prepare it once, before the job: python aux/prepare_data.py"
    try:
        vocabulary = read_vocabulary(folder)
        size, itemsize = vocabulary["tokenizer"]["size"], DTYPES[vocabulary["dtype"]].itemsize
        for split in ("train", "val"):
            path = folder / f"{split}.bin"
            if path.stat().st_size != vocabulary[f"{split}_tokens"] * itemsize:
                what = f"{path} is not as long as vocabulary.json beside it says"
                return f"{what}; move the folder away and {remedy}"
    except OSError as error:
        return f"no prepared text at {error.filename} ({error.strerror}); {remedy}"
    except (ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError) as error:
        what = "vocabulary.json or meta.pkl is not one that aux/prepare_data.py or nanoGPT wrote"
        return f"{folder}: {what} ({error!r}); {remedy}"

    split = min(("train", "val"), key=lambda split: vocabulary[f"{split}_tokens"])
    shortest = vocabulary[f"{split}_tokens"]
    if shortest <= context:
        what = f"the {shortest} tokens in {folder / split}.bin"
        return f"--context {context} is too long for {what}: {shortest - 1} would do"
    largest = int(read_tokens(folder, "val")[:1_000_000].to(torch.int32).max())
    if largest >= size:
        what = f"{folder / 'val.bin'} has token {largest}"
        return f"{what}, and the vocabulary ends at {size - 1}"
    return None


def read_tokens(folder: Path, split: str) -> torch.Tensor:
    """A split's tokens (n), in the file's dtype, as a view of the file: nothing is read yet."""
    vocabulary = read_vocabulary(folder)
    path, count = str(Path(folder) / f"{split}.bin"), vocabulary[f"{split}_tokens"]
    return torch.from_file(path, shared=False, size=count, dtype=DTYPES[vocabulary["dtype"]])


def windows(folder: Path, split: str, context: int) -> torch.Tensor:
    """Every stretch of context + 1 tokens of a split, (tokens - context, context + 1), as a view of
    the file.

    Indexing it with a tensor of starts reads a whole batch at once, some 50 times faster than
    stacking slices.
    """
    return read_tokens(folder, split).unfold(0, context + 1, 1)


def read(windows: torch.Tensor, starts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The windows that begin at `starts`, (n, context + 1) int64, on the way to `device`."""
    batch = windows[starts].to(torch.int64)
    if device.type == "cpu":
        return batch
    return batch.pin_memory().to(device, non_blocking=True)


def fixed_batches(
    windows: torch.Tensor, count: int, rows: int, data_rank: int, data_ranks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of the set to evaluate on: inputs and targets, (rows, context) int64.

    The set is the split in windows side by side, or `count` of them, evenly spread. An incomplete
    batch is filled up with targets that cross_entropy ignores. All ranks then have the same number
    of batches, because they must meet in the collectives, and all batches the same shape, because
    torch.compile takes time for each.
    """
    starts = torch.arange(0, len(windows), windows.size(1) - 1)
    if 0 < count < len(starts):
        starts = starts[torch.linspace(0, len(starts) - 1, count).long()]
    for part in starts.split(rows * data_ranks):
        mine = part[data_rank * rows :][:rows]
        filled = torch.cat((mine, part[:1].expand(rows - len(mine))))
        batch = windows[filled].to(torch.int64)
        targets = batch[:, 1:].clone()
        targets[len(mine) :] = IGNORED
        yield batch[:, :-1], targets


def describe(folder: Path) -> str:
    """A description of `folder` for the log."""
    found = read_vocabulary(folder)
    unit, size = unit_of(found["tokenizer"]), found["tokenizer"]["size"]
    return f"{found['source']}, {found['train_tokens']} {unit} of {size} kinds, in {folder}"


def unit_of(tokenizer: dict) -> str:
    """What a number in the files stands for: characters, bytes or tokens."""
    return tokenizer["name"] if tokenizer["name"] in ("characters", "bytes") else "tokens"


def text_functions(tokenizer: dict, file: Path | None) -> tuple[Callable, Callable]:
    """Two functions: text to a list of numbers, and back. `file` is the tokenizer.json, if it is a
    Hugging Face tokenizer. Raises ValueError with a sentence."""
    if tokenizer["name"] == "bytes":
        return (
            lambda text: list(text.encode()),
            lambda numbers: bytes(numbers).decode(errors="replace"),
        )

    if tokenizer["name"] == "characters":
        letters = tokenizer["characters"]
        numbers_of = {letter: number for number, letter in enumerate(letters)}

        def encode(text: str) -> list[int]:
            if unknown := set(text) - numbers_of.keys():
                raise ValueError(f"{sorted(unknown)} are not among the {len(letters)} characters")
            return [numbers_of[letter] for letter in text]

        return encode, lambda numbers: "".join(letters[number] for number in numbers)

    known = hugging_face_tokenizer(file)
    return lambda text: known.encode(text, add_special_tokens=False).ids, known.decode


def hugging_face_tokenizer(file: Path | None):
    """A tokenizers.Tokenizer. Raises ValueError with a sentence."""
    if file is None:
        raise ValueError("this needs the tokenizer.json that made the tokens: --tokenizer FILE")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("this needs the package tokenizers: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower one
        raise ValueError(f"{file} is not a Hugging Face tokenizer's file: {error}") from None
