#!/usr/bin/env python3
"""Bring the data sets to this machine: once, before the job, never from inside it.

    python aux/prepare_data.py                                  # both; synthetic without internet
    python aux/prepare_data.py mnist --data-dir /scratch/mnist
    python aux/prepare_data.py --synthetic                      # without a download
    python aux/prepare_data.py text --input a.txt b.txt         # your own text, into data/text
    python aux/prepare_data.py text --input a.txt --tokenizer tokenizer.json
    python aux/prepare_data.py chat --input a.jsonl --tokenizer qwen --context 1024
    python aux/prepare_data.py images                           # JPEGs, drawn here

A line of a.jsonl is {"messages": [{"role": "user", "content": "..."}, ...]}, and qwen the folder of
a Hugging Face model, whose chat template turns it into tokens. They are packed for --context.

Data that are already there stay. SHA256SUMS beside them is for `sha256sum --check`.
"""

import argparse
import functools
import hashlib
import json
import math
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision import datasets
from torchvision.datasets.utils import download_url

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import mnist
from token_files import (
    ENDS,
    hugging_face_tokenizer,
    printable,
    read_vocabulary,
    text_functions,
    unit_of,
)

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
SHAKESPEARE += "/input.txt"
SHAKESPEARE_MD5 = "6fb458f1232090904fb40fe944165e91"
SYNTHETIC_TEXT = "Python documentation (synthetic)"
DATA_SETS = ["mnist", "shakespeare", "text", "chat", "images"]
LAST_OF_MNIST = "t10k-labels-idx1-ubyte"  # also the last one that torchvision downloads


class DownloadError(Exception):
    """There is no download. The text says why, and what to do."""


@contextmanager
def written_whole(folder: Path, last: str) -> Iterator[Path]:
    """A temporary folder, whose files move into `folder` once all are written. `last` is the file
    that shows that all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
        yield Path(temporary)
        for path in sorted(Path(temporary).iterdir(), key=lambda path: path.name == last):
            path.replace(folder / path.name)


def sha256(path: Path) -> str:
    """The checksum of a file of any size, in hexadecimal. Raises OSError."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            checksum.update(part)
    return checksum.hexdigest()


def sums_of(*paths: Path) -> bytes:
    """The content of SHA256SUMS for these files."""
    return "".join(f"{sha256(path)}  {path.name}\n" for path in paths).encode()


# --- MNIST ---


def idx(content: bytes, *shape: int) -> bytes:
    """An IDX file of bytes, MNIST's format: a header with the shape, then the content."""
    header = bytes([0, 0, 8, len(shape)])
    return header + b"".join(size.to_bytes(4, "big") for size in shape) + content


# How the digits are written, in one or two ways each: strokes of control points "xy" that a smooth
# curve goes through, x from 0 (left) to 6, y from 0 (top) to 8. A corner is the end of one stroke
# and the beginning of the next.
GLYPHS = [
    ["30 11 04 17 38 57 64 51 30"],
    ["30 33 35 38", "22 40, 40 43 45 48"],
    ["02 21 40 52 44 08, 08 38 68", "02 30 52 35 17 07 26 47 68"],
    ["11 30 51 43 24, 24 44 66 38 07"],
    ["40 22 05, 05 35 65, 42 45 48", "10 02 14 44, 60 54 58"],
    ["60 30 10, 10 04, 04 33 65 57 28 07"],
    ["50 22 05 17 38 56 44 24 06"],
    ["00 30 60, 60 34 28", "00 30 60, 60 44 38, 14 34 54"],
    ["34 12 11 30 51 52 34 06 17 38 57 66 34"],
    ["62 50 21 03 25 44 62, 62 55 48", "62 40 11 13 34 53 62, 62 64 57 38 07"],
]


def draw_digits(count: int, seed: int) -> bytes:
    """Returns `count` images of 28 x 28 bytes, one after the other, white on black: the digits 0,
    1, ..., 9, 0, 1, ... A linear model gets 85 % of them right, the ConvNet of train_ddp.py over
    98 % after one epoch.

    Every image has its own handwriting: jittered control points, rotation, slant, size, bend,
    position, pen and noise.
    """
    ways = [[stroke.split() for stroke in way.split(",")] for ways in GLYPHS for way in ways]
    firsts = torch.tensor([sum(map(len, GLYPHS[:digit])) for digit in range(10)])
    numbers = torch.tensor([len(ways) for ways in GLYPHS])
    # All ways as one tensor: control points, and for each span between two of them the four points
    # that shape it.
    points, spans = torch.zeros(len(ways), 16, 2), torch.zeros(len(ways), 16, 4, dtype=torch.long)
    for way, strokes in enumerate(ways):
        xy = [(float(x), float(y)) for stroke in strokes for x, y in stroke]
        four, first = [], 0
        for stroke in strokes:
            last = first + len(stroke) - 1
            four += [[max(i - 1, first), i, i + 1, min(i + 2, last)] for i in range(first, last)]
            first = last + 1
        points[way, : len(xy)] = torch.tensor(xy) - torch.tensor([3, 4])
        spans[way, : len(four)] = torch.tensor(four)
    t = torch.linspace(0, 1, 6)  # six points, so five short pieces per span
    weights = [2 * t**2 - t - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2]
    catmull_rom = torch.stack(weights) / 2
    grid = torch.arange(28.0) - 13.5  # pixel centres, from the middle of the image
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(1000, *shape, generator=generator)

    images = []
    for _ in range(0, count, 1000):
        labels = torch.arange(1000) % 10
        way = firsts[labels] + (between(0, 1) * numbers[labels]).long()
        control = points[way] + 0.33 * torch.randn(1000, 16, 2, generator=generator)
        # Image, span, four points, (x, y).
        curve = control[torch.arange(1000)[:, None, None], spans[way]]
        curve = torch.einsum("nsfc,fp->nspc", curve, catmull_rom)
        angle, slant = between(-0.28, 0.28), between(-0.45, 0.25)
        high, wide = between(1.7, 2.4), between(0.8, 1.2)
        cos, sin = angle.cos(), angle.sin()
        # Pixels per unit of x and of y.
        right = torch.stack([cos, sin], 1) * (wide * high)[:, None]
        down = torch.stack([-sin - slant * cos, cos - slant * sin], 1) * high[:, None]
        curve = curve @ torch.stack([right, down], 1)[:, None]
        wave = curve.flip(-1) / 5 + between(0, 2 * math.pi, 1, 1, 2)
        curve = curve + between(-1.2, 1.2, 1, 1, 2) * wave.sin() + between(-2.5, 2.5, 1, 1, 2)
        # Ink is a sum of round spots along the curve, each a product of a function of x and one of
        # y, so an image is one matrix product. Excess ink is cut off, which makes a flat stroke
        # with a soft edge.
        pen, pressure = between(0.8, 1.3, 1), between(1.0, 2.5, 1, 1)
        length = curve.diff(dim=2).norm(dim=-1).flatten(1)
        amount = (length / (pen * math.sqrt(2 * math.pi)))[..., None]
        # Image, piece, (x, y), 1.
        spots = ((curve[:, :, 1:] + curve[:, :, :-1]) / 2).flatten(1, 2)[..., None]
        spots = torch.exp(-(((spots - grid) / pen[..., None, None]) ** 2) / 2)
        ink = (spots[:, :, 1] * amount).transpose(1, 2) @ spots[:, :, 0]  # image, row, column
        ink = (ink * pressure).clamp(max=1) * between(0.7, 1, 1, 1)
        ink = ink + 0.06 * torch.randn(ink.shape, generator=generator)
        images.append((ink * 255).clamp(0, 255).to(torch.uint8))
    return torch.cat(images)[:count].numpy().tobytes()


def draw_mnist(train: int = 60_000, test: int = 10_000) -> dict[str, bytes]:
    """The four files of synthetic digits by name. Their labels are 0, 1, ..., 9, 0, 1, ..."""
    # On a busy machine several threads wait for each other, and take ten times as long as one.
    torch.set_num_threads(1)
    files = {}
    for seed, (split, count) in enumerate({"train": train, "t10k": test}.items()):
        files[f"{split}-images-idx3-ubyte"] = idx(draw_digits(count, seed), count, 28, 28)
        files[f"{split}-labels-idx1-ubyte"] = idx(bytes(i % 10 for i in range(count)), count)
    return files


def prepare_mnist(folder: Path, synthetic: bool) -> str:
    """Fills `folder` as torchvision.datasets.MNIST does. Returns one line that describes it.

    Raises DownloadError, or OSError.
    """
    raw = folder / "MNIST/raw"
    there = mnist.describe(folder) if (raw / LAST_OF_MNIST).exists() else ""
    drawn = there.startswith("SYNTHETIC")
    if synthetic and there and not drawn:
        sys.exit(f"there is {there}: give another --data-dir")
    if drawn and not synthetic:
        raise DownloadError(f"there are {there}: move them away to download MNIST")
    if not synthetic:
        download_mnist(folder)
    elif not drawn:
        with written_whole(raw, LAST_OF_MNIST) as new:
            for name, content in draw_mnist().items():
                (new / name).write_bytes(content)

    train_set, test_set = mnist.load(folder)
    if not (raw / "SHA256SUMS").exists():
        with written_whole(raw, "SHA256SUMS") as new:
            (new / "SHA256SUMS").write_bytes(sums_of(*sorted(raw.glob("*-ubyte"))))
    counts = f"{len(train_set):,} training and {len(test_set):,} test images"
    return f"{counts}: {mnist.describe(folder)}"


def download_mnist(folder: Path):
    """Leaves what is there: torchvision compares the archives with its own checksums."""
    try:
        datasets.MNIST(folder, download=True)
    except (RuntimeError, TimeoutError) as error:
        # With any other error the files are there, and mnist.load says what is wrong with them.
        if isinstance(error, TimeoutError) or str(error).startswith("Error downloading"):
            reason = str(error).strip().splitlines()[-1]
            hint = f"bring its four .gz files into {folder}/MNIST/raw by hand, or use --synthetic"
            raise DownloadError(f"cannot download MNIST ({reason}): {hint}") from None


# --- images ---


def draw_images(folder: Path, train: int = 5_000, test: int = 1_000):
    """JPEGs of 400 x 400 pixels in a folder for each of ten classes, such as train/7/17.jpg. They
    are synthetic digits, each in two colours of its own."""
    torch.set_num_threads(1)
    for seed, (split, count) in enumerate({"train": train, "test": test}.items()):
        pixels = draw_digits(count, seed)
        for i in range(count):
            path = folder / split / str(i % 10) / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            digit = Image.frombytes("L", (28, 28), pixels[784 * i : 784 * (i + 1)])
            # Bright on dark, in colours that say nothing of the class.
            dark, bright = f"hsl({37 * i % 360}, 60%, 20%)", f"hsl({53 * i % 360}, 60%, 75%)"
            ImageOps.colorize(digit.resize((400, 400)), dark, bright).save(path)


def prepare_images(folder: Path) -> str:
    """Makes `folder` as a whole. Returns one line that describes it. Raises OSError."""
    if folder.exists():
        sys.exit(f"{folder} is left as it is: give another --data-dir")
    with written_whole(folder.parent, folder.name) as new:
        draw_images(new / folder.name)
    return f"SYNTHETIC photographs in ten classes: digits in colour, in {folder}"


# --- text ---


def pieces(path: Path, characters: int = 1 << 22) -> Iterator[str]:
    """The text of a UTF-8 file of any size, in pieces that end with a line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(characters):
                yield piece + file.readline()
    except UnicodeDecodeError as error:
        sys.exit(f"{path.name} is not UTF-8 text: {error.reason}")


def describe_tokenizer(name: str, files: list[Path]) -> tuple[dict, list[int]]:
    """The tokenizer's entry in vocabulary.json, and the numbers that end a file."""
    if name == "bytes":
        return {"name": name, "size": 256}, []
    if name == "characters":
        characters = sorted({c for path in files for piece in pieces(path) for c in set(piece)})
        return {"name": name, "size": len(characters), "characters": characters}, []
    known = hugging_face_tokenizer(Path(name))
    end = [number for number in map(known.token_to_id, ENDS) if number is not None]
    return {"name": "tokenizer.json", "size": size_of(known)}, end[:1]


def size_of(known) -> int:
    """How many numbers a tokenizer may write. Some are left out in its vocabulary, so these are not
    as many as its tokens."""
    return max(known.get_vocab().values()) + 1


def dtype_of(size: int) -> str:
    """The smallest type for so many kinds of tokens."""
    kinds = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 31}
    if size > kinds["uint32"]:
        sys.exit(f"the tokenizer has token {size - 1:,}, and torch counts to {(1 << 31) - 1:,}")
    return next(name for name, numbers in kinds.items() if size <= numbers)


def describe(new: Path, folder: Path, said: dict):
    """Adds what describes the token files in `new`, before all of them move into `folder`."""
    (new / "SHA256SUMS").write_bytes(sums_of(*sorted([*new.glob("*.bin"), *new.glob("*.mask")])))
    (new / "vocabulary.json").write_bytes(json.dumps(said).encode())
    (folder / "vocabulary.json").unlink(missing_ok=True)


def write_tokens(folder: Path, source: str, files: list[Path], tokenizer: str, identity: str):
    """The token files of a text: its first 90 % in train.bin, the rest in val.bin."""
    described, end = describe_tokenizer(tokenizer, files)
    encode, _ = text_functions(described, Path(tokenizer))
    dtype = dtype_of(described["size"])
    itemsize = np.dtype(dtype).itemsize
    with written_whole(folder, "vocabulary.json") as new:
        with (new / "train.bin").open("w+b") as file, (new / "val.bin").open("wb") as rest:
            for path in files:
                for piece in pieces(path):
                    file.write(np.array(encode(piece), dtype))
                file.write(np.array(end, dtype))
            count = file.tell() // itemsize
            if count < 1000:
                sys.exit(f"{source} has {count:,} tokens, and at least 1,000 are needed")
            cut = count * 9 // 10
            file.seek(cut * itemsize)
            shutil.copyfileobj(file, rest, 1 << 24)
            file.truncate(cut * itemsize)

        if described["name"] == "tokenizer.json":
            shutil.copyfile(tokenizer, new / "tokenizer.json")
        said = {"tokenizer": described, "dtype": dtype, "source": source, "id": identity}
        describe(new, folder, said | {"train_tokens": cut, "val_tokens": count - cut})


def prepare_text(
    folder: Path, synthetic: bool, files: list[Path], tokenizer: str, packed: int | None = None
) -> str:
    """Fills `folder` with token files, or those of conversations that are `packed` for a context.
    Returns one line that describes them.

    Raises DownloadError, or OSError.
    """
    described, held = folder / "vocabulary.json", {}
    if described.exists():
        try:
            held = read_vocabulary(folder)
        except ValueError as error:
            what = f"{described} is not one that prepare_data.py wrote ({printable(error)})"
            sys.exit(f"{what}: move {folder} away, or give another --data-dir")
    elif (folder / "train.bin").exists():
        held = {"source": "token files of another program"}
    source = ", ".join(path.name for path in files) or "Tiny Shakespeare"
    if synthetic:
        source = SYNTHETIC_TEXT
    if held and held["source"] not in (source, SYNTHETIC_TEXT):
        hint = "give another --data-dir"
        sys.exit(f"{folder} is left as it is, because it holds {held['source']}: {hint}")
    if not files:
        files = [folder / "input.txt"]
        if synthetic:
            # English prose that comes with every Python.
            from pydoc_data.topics import topics

            with written_whole(folder, "input.txt") as new:
                prose = "\n".join(topics[key] for key in sorted(topics))
                (new / "input.txt").write_bytes(prose.encode())
        else:
            download_shakespeare(folder)

    # Written again if the text or the tokenizer has changed.
    made_by = [Path(tokenizer)]
    if packed:
        made_by = [*sorted(made_by[0].glob("*token*")), *made_by[0].glob("chat_template*")]
    parts = [sha256(path) for path in (*made_by, *files) if path.is_file()]
    named = [f"chat {packed}" if packed else Path(tokenizer).name, *parts]
    identity = hashlib.sha256(" ".join(named).encode()).hexdigest()
    if held.get("id") != identity:
        if packed:
            write_chat(folder, source, files, Path(tokenizer), packed, identity)
        else:
            write_tokens(folder, source, files, tokenizer, identity)
        held = json.loads(described.read_text())

    unit, size = unit_of(held["tokenizer"]), held["tokenizer"]["size"]
    counts = f"{held['train_tokens']:,} training and {held['val_tokens']:,} validation {unit}"
    return f"{counts}, {size:,} different ones: {held['source']}, in {folder}"


# --- conversations ---


def answers(messages: list[dict], template: Callable) -> list[list[tuple[str, bool]]]:
    """The texts to learn from, each as its parts, and whether the model is to write a part.

    `template` makes a text of messages. Where it shows earlier answers in another way than the last
    one, as Qwen3's does, each answer is a text of its own, behind all that came before it. Raises
    ValueError with a sentence.
    """
    texts = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template(messages[:number], add_generation_prompt=True)
        whole = template(messages[: number + 1], add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError("its chat template does not put an answer behind its prompt")
        answer = whole[len(prompt) :]
        before = "".join(part for part, _ in texts[-1]) if texts else ""
        if texts and prompt.startswith(before):
            texts[-1] += [(prompt[len(before) :], False), (answer, True)]
        else:
            texts.append([(prompt, False), (answer, True)])
    return texts


def pack(texts: list[np.ndarray], context: int, end: int) -> np.ndarray:
    """Texts (tokens, 2) one after the other, in whole windows of `context` and one token more. One
    that does not fit into what is left of a window begins the next one."""
    parts, count = [], 0
    for text in texts:
        left = -count % context
        # A text that is longer than a window is cut anyway.
        if left < len(text) <= context:
            parts.append(np.tile([end, 0], (left, 1)))
            count += left
        parts.append(text)
        count += len(text)
    parts.append(np.tile([end, 0], ((1 - count) % context, 1)))
    return np.concatenate(parts)


def write_chat(
    folder: Path, source: str, files: list[Path], like: Path, context: int, identity: str
):
    """The token files and masks of conversations: every tenth in val, the others in train."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        sys.exit("this needs the package transformers: pip install transformers")
    try:
        # Not the code that some models bring with them.
        known = AutoTokenizer.from_pretrained(like, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        sys.exit(f"{like} has no tokenizer that transformers can read: {printable(error)}")
    template = functools.partial(known.apply_chat_template, tokenize=False)
    splits = {"train": [], "val": []}
    lines = (line for path in files for line in path.open(encoding="utf-8"))
    for number, line in enumerate(lines, start=1):
        try:
            texts = answers(json.loads(line)["messages"], template)
        except Exception as error:  # a chat template raises its own
            sys.exit(f"line {number} of {source} is no conversation: {printable(error)}")
        for parts in texts:
            # In parts, as in a chat, where the prompt is there before its answer.
            tokens = [
                (token, int(learnt))
                for part, learnt in parts
                for token in known(part, add_special_tokens=False).input_ids
            ]
            splits["train" if number % 10 else "val"].append(np.array(tokens, np.int32))
    if not splits["val"]:
        sys.exit(f"{source} has fewer than ten conversations with an answer")

    dtype = dtype_of(size_of(known))
    said = {"tokenizer": {"name": "tokenizer.json", "size": size_of(known)}, "dtype": dtype}
    said |= {"source": source, "id": identity, "packed": context}
    with written_whole(folder, "vocabulary.json") as new:
        for split, texts in splits.items():
            tokens = pack(texts, context, known.eos_token_id)
            tokens[:, 0].astype(dtype).tofile(new / f"{split}.bin")
            tokens[:, 1].astype(np.uint8).tofile(new / f"{split}.mask")
            said[f"{split}_tokens"] = len(tokens)
        shutil.copyfile(like / "tokenizer.json", new / "tokenizer.json")
        describe(new, folder, said)


def download_shakespeare(folder: Path):
    """Leaves input.txt if it is there and has the right checksum."""
    try:
        download_url(SHAKESPEARE, folder, md5=SHAKESPEARE_MD5)
    except (RuntimeError, OSError) as error:
        hint = f"bring {SHAKESPEARE} to {folder} by hand, or use --synthetic"
        raise DownloadError(f"cannot download the text ({error}): {hint}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("dataset", nargs="?", choices=[*DATA_SETS, "all"], default="all")
    help = "write into this folder (default: data/ and the data set's name)"
    add("--data-dir", type=Path, help=help)
    add("--synthetic", action="store_true", help="make the data here, without internet")
    help = "your own text in UTF-8, or conversations as JSON lines"
    add("--input", type=Path, nargs="+", metavar="FILE", default=[], help=help)
    help = "for your own text: characters (the default), bytes, or the path of a Hugging Face "
    help += "model's tokenizer.json; for conversations the model's folder"
    add("--tokenizer", default="characters", metavar="NAME", help=help)
    help = "tokens of a sequence, for conversations (default: 1024, as train_fsdp.py has it)"
    add("--context", type=int, default=1024, help=help)
    args = parser.parse_args()
    own = args.dataset in ("text", "chat")
    if own != bool(args.input):
        parser.error("your own text takes both: text --input FILE")
    if args.dataset == "chat" and not Path(args.tokenizer, "tokenizer.json").exists():
        parser.error("conversations take --tokenizer FOLDER, which has a tokenizer.json")
    if not own and args.tokenizer != "characters":
        parser.error("--tokenizer is for your own text: text --input FILE")
    if args.synthetic and args.input:
        parser.error("--synthetic takes no --input")
    if args.data_dir and args.dataset == "all":
        parser.error("--data-dir is for one data set: also name mnist or shakespeare")

    # A node without internet would otherwise wait for minutes.
    socket.setdefaulttimeout(15)

    def prepare(name: str, synthetic: bool) -> str:
        folder = args.data_dir or Path("data", name)
        if name == "mnist":
            return prepare_mnist(folder, synthetic)
        if name == "images":
            return prepare_images(folder)
        packed = args.context if name == "chat" else None
        return prepare_text(folder, synthetic, args.input, args.tokenizer, packed)

    names = ["mnist", "shakespeare"] if args.dataset == "all" else [args.dataset]
    for name in names:
        try:
            print(prepare(name, args.synthetic))
        except DownloadError as error:
            if args.dataset != "all":
                sys.exit(str(error))
            print(f"{error}. SYNTHETIC data are made instead", flush=True)
            print(prepare(name, True))
        except OSError as error:
            sys.exit(f"cannot read or write {error.filename or 'the data'}: {error.strerror}")


if __name__ == "__main__":
    main()
