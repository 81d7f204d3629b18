"""Text as token files: train.bin and val.bin, memory-mapped, and windows of them.

    dataset = token_files.TokenDataset("data/shakespeare", context=64, batch_size=12)
    inputs, targets, count = dataset.batch(step, rank, ranks, device)   # (12 / ranks, 64) int64

Each file holds one number per token (uint8, or uint16 or uint32 in little-endian order).
vocabulary.json beside them, which aux/prepare_data.py writes, says how many numbers there are and
how to turn them into text. Documents stand one after the other, a window cuts them at any place,
and attention sees all of a window.

Conversations also have train.mask and val.mask, a byte per token: 1 if the model is to learn to
write it. They are packed into the windows of one context, and none is cut that fits into one.
"""

import itertools
import json
import math
import mmap
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from heartbeat import fail, plain

IGNORED = -100  # cross_entropy's ignore_index
LARGEST = 100_000_000  # bytes of JSON to read, as in Hugging Face's own reader of safetensors
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # of Qwen and GPT-2, Llama 3 and Llama 2
# torch can index int32 but not uint32, and no vocabulary needs the sign bit.
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.int32}


def read_vocabulary(folder: Path) -> dict:
    """The content of vocabulary.json: dtype, source, train_tokens, val_tokens, id (of the data),
    and under "tokenizer" its name ("characters", "bytes" or "tokenizer.json"), its size and, for
    "characters", these in order. Conversations have the context that they are packed for, under
    "packed". Raises OSError or ValueError.
    """
    vocabulary = read_object(Path(folder) / "vocabulary.json")
    kinds = {"dtype": str, "source": str, "id": str, "train_tokens": int, "val_tokens": int}
    kinds |= {"packed": int} if "packed" in vocabulary else {}
    check_kinds(vocabulary, **kinds, tokenizer=dict)
    tokenizer = vocabulary["tokenizer"]
    check_kinds(tokenizer, name=str, size=int)
    if vocabulary["dtype"] not in DTYPES:
        raise ValueError(f"its dtype is {vocabulary['dtype']}, not one of {[*DTYPES]}")
    if not 0 < tokenizer["size"] <= 1 << 31:
        raise ValueError(f"its size is {tokenizer['size']}")
    if tokenizer["name"] == "characters":
        check_kinds(tokenizer, characters=list)
        characters = [x for x in tokenizer["characters"] if isinstance(x, str) and len(x) == 1]
        if len(characters) != tokenizer["size"]:
            raise ValueError(f"it has {len(characters)} characters, not {tokenizer['size']}")
    return vocabulary


def check_kinds(values: dict, **kinds: type):
    """Raises ValueError if one of these values is missing, or of another kind."""
    for name, kind in kinds.items():
        # True is no number here.
        if type(values.get(name)) is not kind:
            raise ValueError(f"its {name} is {values.get(name)!r}, not of type {kind.__name__}")


def read_object(path: Path) -> dict:
    """The content of a JSON file from anywhere. Raises OSError or ValueError."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path.name} has more than {LARGEST:,} bytes")
    return json_object(path.read_bytes())


def json_object(text: bytes) -> dict:
    """An object in JSON. Raises ValueError if it is none, or too deep to read."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is too deep") from None
    if not isinstance(found, dict):
        raise ValueError("its JSON is no object")
    return found


def printable(text: object) -> str:
    """What a stranger's file says, cut short."""
    return plain(str(text)[:300])


def missing_data(folder: Path, context: int) -> str | None:
    """One sentence on the fault in `folder`, or None. It reads no more than a million tokens;
    `sha256sum --check SHA256SUMS` compares the files whole."""
    folder = Path(folder)
    remedy = "prepare it once, before the job: python aux/prepare_data.py"
    try:
        vocabulary = read_vocabulary(folder)
        size, itemsize = vocabulary["tokenizer"]["size"], DTYPES[vocabulary["dtype"]].itemsize
        sizes = {"bin": itemsize} | ({"mask": 1} if "packed" in vocabulary else {})
        for split, kind in itertools.product(("train", "val"), sizes):
            path = folder / f"{split}.{kind}"
            if path.stat().st_size != vocabulary[f"{split}_tokens"] * sizes[kind]:
                what = f"{path} is not as long as vocabulary.json beside it says"
                return f"{what}; move the folder away and {remedy}"
    except OSError as error:
        return f"no prepared text at {error.filename} ({error.strerror}); {remedy}"
    except ValueError as error:
        what = "vocabulary.json is not one that aux/prepare_data.py wrote"
        return f"{folder}: {what} ({printable(error)}); {remedy}"

    split = min(("train", "val"), key=lambda split: vocabulary[f"{split}_tokens"])
    shortest = vocabulary[f"{split}_tokens"]
    if shortest <= context:
        what = f"the {shortest} tokens in {folder / split}.bin"
        return f"--context {context} is too long for {what}: {shortest - 1} would do"
    if vocabulary.get("packed", context) != context:
        what = f"the conversations in {folder} are packed for --context {vocabulary['packed']}"
        return f"{what}, not {context}"
    largest = int(read_tokens(folder, "val")[:1_000_000].to(torch.int32).max())
    if largest >= size:
        what = f"{folder / 'val.bin'} has token {largest}"
        return f"{what}, and the vocabulary ends at {size - 1}"
    return None


def read_tokens(folder: Path, split: str) -> torch.Tensor:
    """A split's tokens (n), in the file's dtype, as a view of the file: nothing is read yet."""
    vocabulary = read_vocabulary(folder)
    path, count = Path(folder) / f"{split}.bin", vocabulary[f"{split}_tokens"]
    return numbers(mapped(path), DTYPES[vocabulary["dtype"]], count)


def mapped(path: Path) -> mmap.mmap:
    """A file to read only, so it may be larger than the memory. Raises OSError or ValueError."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def numbers(memory: mmap.mmap, dtype: torch.dtype, count: int, first: int = 0) -> torch.Tensor:
    """So many numbers (count) from byte `first` on, as a view. Raises ValueError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=first)


class TokenDataset:
    """The token files of a folder in windows of `context` tokens and the next one, of which a step
    takes `batch_size`. Ends with a sentence if they cannot be used."""

    def __init__(self, folder: Path, context: int, batch_size: int, seed: int = 0):
        if fault := missing_data(folder, context):
            fail(fault)
        self.folder, self.vocabulary = Path(folder), read_vocabulary(folder)
        self.vocab_size = self.vocabulary["tokenizer"]["size"]
        self.context, self.batch_size, self.seed = context, batch_size, seed
        self.packed = "packed" in self.vocabulary
        # Every stretch of context + 1 tokens, as views of the files. Indexing them with a tensor of
        # starts reads a whole batch at once, some 50 times faster than stacking slices.
        self.tokens, self.masks = {}, {}
        for split in ("train", "val"):
            tokens = read_tokens(folder, split)
            self.tokens[split] = tokens.unfold(0, context + 1, 1)
            if self.packed:
                mask = numbers(mapped(self.folder / f"{split}.mask"), torch.uint8, len(tokens))
                self.masks[split] = mask.unfold(0, context + 1, 1)
        places = len(self.tokens["train"])
        self.per_epoch = math.ceil(places / context) if self.packed else max(1, places // context)

    @property
    def metadata(self) -> dict:
        """With other values, a step has other windows."""
        its = {"context": self.context, "batch_size": self.batch_size, "seed": self.seed}
        return its | {"data": self.vocabulary["id"], "tokenizer": self.vocabulary["tokenizer"]}

    def __str__(self) -> str:
        tokenizer, count = self.vocabulary["tokenizer"], self.vocabulary["train_tokens"]
        unit = f"{count} {unit_of(tokenizer)} of {tokenizer['size']} kinds"
        steps = f"an epoch is {self.per_epoch / self.batch_size:.1f} steps"
        return f"{printable(self.vocabulary['source'])}, {unit}, in {self.folder}; {steps}"

    def batch(
        self, step: int, rank: int, ranks: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """A rank's part of a step's windows: inputs and targets, (batch_size / ranks, context)
        int64, on the way to `device`; and how many targets count in the whole step. Steps count
        from 1.

        Each window comes once an epoch, in an order that follows from the seed and the step. So a
        step has the same windows on any number of ranks, and after any stop.
        """
        first = (step - 1) * self.batch_size
        starts = self.starts(torch.arange(first, first + self.batch_size))
        count = self.batch_size * self.context
        if self.packed:
            count = max(1, int(self.masks["train"][starts][:, 1:].sum()))
        inputs, targets = self.read("train", starts.chunk(ranks)[rank])
        if device.type != "cpu":
            inputs = inputs.contiguous().pin_memory().to(device, non_blocking=True)
            targets = targets.contiguous().pin_memory().to(device, non_blocking=True)
        return inputs, targets, count

    def starts(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where the windows of these numbers begin (n), if all windows of all epochs are numbered
        in the order in which they come. Each epoch cuts a text at other places."""
        starts, epochs = torch.empty_like(numbers), numbers // self.per_epoch
        for epoch in epochs.unique().tolist():
            seed = zlib.crc32(repr((self.seed, epoch)).encode())
            mine = epochs == epoch
            starts[mine] = self.context * shuffled(
                numbers[mine] % self.per_epoch, self.per_epoch, seed
            )
            if not self.packed:
                starts[mine] += seed % min(self.context, len(self.tokens["train"]))
        return starts

    def read(self, split: str, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of the windows that begin at `starts`, (n, context) int64."""
        windows = self.tokens[split][starts].to(torch.int64)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        if self.packed:
            targets = targets.masked_fill(self.masks[split][starts][:, 1:] == 0, IGNORED)
        return inputs, targets

    def eval_batches(
        self, count: int, micro_batch_size: int, rank: int, ranks: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of the set to evaluate on: inputs and targets,
        (micro_batch_size, context) int64.

        The set is val.bin in windows side by side, or `count` of them, evenly spread. An incomplete
        batch is filled up with targets that cross_entropy ignores. All ranks then have the same
        number of batches, because they must meet in the collectives, and all batches the same
        shape, because torch.compile takes time for each.
        """
        windows = math.ceil(len(self.tokens["val"]) / self.context)
        count = min(count, windows) if count > 0 else windows
        # In whole numbers, because float32 rounds those above 16 million.
        chosen = torch.arange(count) * (windows - 1) // max(1, count - 1)
        for part in (self.context * chosen).split(micro_batch_size * ranks):
            mine = part[rank * micro_batch_size :][:micro_batch_size]
            filler = part[:1].expand(micro_batch_size - len(mine))
            inputs, targets = self.read("val", torch.cat((mine, filler)))
            targets = targets.clone()
            targets[len(mine) :] = IGNORED
            yield inputs, targets


def shuffled(places: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Where `places` (n) int64, all below `count`, stand in a permutation of range(count), which
    is not stored: a Feistel network of four rounds, walked until it is below `count` again (Black
    and Rogaway 2002, Ciphers with Arbitrary Finite Domains)."""
    half = max(1, math.ceil((count - 1).bit_length() / 2))  # bits of each half of a number
    keys = torch.randint(1 << 31, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    found, outside = places.clone(), torch.ones_like(places, dtype=torch.bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & ((1 << half) - 1)
        for key in keys:
            # Any function of `right` will do. This one mixes 31 bits, so no product overflows.
            mixed = (right ^ key) * 0x7FEB352D & 0x7FFFFFFF
            mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0x7FFFFFFF
            mixed = mixed ^ mixed >> 16
            left, right = right, left ^ (mixed & ((1 << half) - 1))
        found[outside] = left << half | right
        outside = found >= count
    return found


def unit_of(tokenizer: dict) -> str:
    """What a number in the files stands for: characters, bytes or tokens."""
    return tokenizer["name"] if tokenizer["name"] in ("characters", "bytes") else "tokens"


def text_functions(tokenizer: dict, file: Path | None) -> tuple[Callable, Callable]:
    """Two functions: text to a list of numbers, and back. `file` is the tokenizer.json, if it is a
    Hugging Face tokenizer. Ends with a sentence if it is none. The first function raises
    ValueError for a character or token that is not known."""
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

    def encode(text: str) -> list[int]:
        numbers = known.encode(text, add_special_tokens=False).ids
        if max(numbers, default=0) >= tokenizer["size"]:
            what = f"{file} has token {max(numbers)}, and the vocabulary ends"
            raise ValueError(f"{what} at {tokenizer['size'] - 1}: it is another one's tokenizer")
        return numbers

    return encode, known.decode


def end_tokens(config: dict, file: Path | None) -> list[int]:
    """The tokens with which a text ends: those in the original's config.json, and those that
    prepare_data.py puts between texts. `file` is the tokenizer.json, if there is one."""
    ends = config.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if file:
        ends = ends + [hugging_face_tokenizer(file).token_to_id(end) for end in ENDS]
    return [end for end in ends if end is not None]


def hugging_face_tokenizer(file: Path | None):
    """A tokenizers.Tokenizer. Ends with a sentence if there is none."""
    if file is None:
        sys.exit("this needs the tokenizer.json that made the tokens: --tokenizer FILE")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        sys.exit("this needs the package tokenizers: pip install tokenizers")
    try:
        known = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower one
        sys.exit(f"{file} is not a Hugging Face tokenizer's file: {printable(error)}")
    # A fine-tuning may have left its own limits in the file, which would cut a corpus short.
    known.no_truncation()
    known.no_padding()
    return known
