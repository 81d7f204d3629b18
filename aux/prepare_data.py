#!/usr/bin/env python3
"""Bring the data sets to this machine: once, before the job, never from inside it.

    python aux/prepare_data.py                                  # both; synthetic without internet
    python aux/prepare_data.py mnist --data-dir /scratch/mnist
    python aux/prepare_data.py --synthetic                      # without a download
    python aux/prepare_data.py text --input a.txt b.txt         # your own text, into data/text
    python aux/prepare_data.py text --input a.txt --tokenizer tokenizer.json

Data that are already there stay. SHA256SUMS beside them is for `sha256sum --check`.
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torchvision import datasets
from torchvision.datasets.utils import download_url

from draw_digits import draw_digits

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import mnist
from resilience import checksums
from token_files import hugging_face_tokenizer, unit_of

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SYNTHETIC_TEXT = "Python documentation (synthetic)"
SHAKESPEARE_MD5 = "6fb458f1232090904fb40fe944165e91"


class DownloadError(Exception):
    """There is no download. The text says why, and what to do."""


@contextmanager
def unfinished(*paths: Path) -> Iterator[list[Path]]:
    """Other names for the files, which get their own if all are written."""
    names = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield names
        for name, path in zip(names, paths, strict=True):
            os.replace(name, path)
    finally:
        for name in names:
            name.unlink(missing_ok=True)


def write(path: Path, content: bytes):
    """Writes the file whole or not at all. Raises OSError."""
    with unfinished(path) as [name]:
        name.write_bytes(content)


def sums_of(files: dict[str, Path]) -> bytes:
    """The content of SHA256SUMS for files by name, wherever they are now."""
    lines = [f"{checksums.sha256(path)}  {name}\n" for name, path in files.items()]
    return "".join(lines).encode()


# --- MNIST ---


def idx(content: bytes, *shape: int) -> bytes:
    """An IDX file of bytes, MNIST's format: a header with the shape, then the content."""
    header = bytes([0, 0, 8, len(shape)])
    return header + b"".join(size.to_bytes(4, "big") for size in shape) + content


def draw_mnist(train: int = 60_000, test: int = 10_000) -> dict[str, bytes]:
    """The four files of synthetic digits, whose labels are 0, 1, ..., 9, 0, 1, ... in turn."""
    # On a busy machine several threads wait for each other, and take ten times as long as one.
    torch.set_num_threads(1)
    files = {}
    for seed, (split, count) in enumerate({"train": train, "t10k": test}.items()):
        files[f"{split}-images-idx3-ubyte"] = idx(draw_digits(count, seed), count, 28, 28)
        files[f"{split}-labels-idx1-ubyte"] = idx(bytes(i % 10 for i in range(count)), count)
    return files


def prepare_mnist(folder: Path, synthetic: bool) -> str:
    """Fill `folder` as torchvision.datasets.MNIST does. Returns one line that describes it."""
    raw = folder / "MNIST/raw"
    there = mnist.describe(folder) if (raw / "t10k-labels-idx1-ubyte").exists() else ""
    drawn = there.startswith("SYNTHETIC")
    if synthetic and there and not drawn:
        sys.exit(f"there is {there}: give another --data-dir")
    if drawn and not synthetic:
        raise DownloadError(f"there are {there}: move them away to download MNIST")
    if not synthetic:
        download_mnist(folder)
    elif not drawn:
        for name, content in draw_mnist().items():
            write(raw / name, content)

    train_set, test_set = mnist.load(folder)
    if not (raw / "SHA256SUMS").exists():
        files = {path.name: path for path in sorted(raw.glob("*-ubyte"))}
        write(raw / "SHA256SUMS", sums_of(files))
    counts = f"{len(train_set):,} training and {len(test_set):,} test images"
    return f"{counts}: {mnist.describe(folder)}"


def download_mnist(folder: Path):
    try:
        datasets.MNIST(folder, download=True)
    except RuntimeError as error:
        # Otherwise the files are there, and mnist.load says what is wrong with them.
        if str(error).startswith("Error downloading"):
            reason = str(error).strip().splitlines()[-1]
            hint = f"bring its four .gz files into {folder}/MNIST/raw by hand, or use --synthetic"
            raise DownloadError(f"cannot download MNIST ({reason}): {hint}") from None


# --- text ---


def pieces(path: Path, characters: int = 1 << 22) -> Iterator[str]:
    """The text of a UTF-8 file of any size, in pieces that end with a line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while piece := file.read(characters):
                yield piece + file.readline()
    except UnicodeDecodeError as error:
        sys.exit(f"{path.name} is not UTF-8 text: {error.reason}")


def encoder(tokenizer: str, files: list[Path]) -> tuple[dict, Callable, list[int]]:
    """A tokenizer's entry in vocabulary.json, a function from text to numbers, and the numbers that
    end a file."""
    if tokenizer == "characters":
        found = set()
        for path in files:
            for piece in pieces(path):
                found.update(piece)
        characters = sorted(found)
        number = {character: i for i, character in enumerate(characters)}
        described = {"name": "characters", "size": len(characters), "characters": characters}
        return described, lambda piece: [number[character] for character in piece], []
    if tokenizer == "bytes":
        return {"name": "bytes", "size": 256}, lambda piece: list(piece.encode()), []
    try:
        known = hugging_face_tokenizer(Path(tokenizer))
    except ValueError as error:
        sys.exit(str(error))
    described = {"name": "tokenizer.json", "size": known.get_vocab_size()}
    end = known.token_to_id("<|endoftext|>")
    return (
        described,
        lambda piece: known.encode(piece, add_special_tokens=False).ids,
        [] if end is None else [end],
    )


def write_tokens(folder: Path, source: str, files: list[Path], tokenizer: str, identity: str):
    """The token files of a text: its first 90 % in train.bin, the rest in val.bin."""
    described, encode, end = encoder(tokenizer, files)
    kinds = {"uint8": 1 << 8, "uint16": 1 << 16, "uint32": 1 << 31}
    dtype = next(name for name, numbers in kinds.items() if described["size"] <= numbers)
    itemsize = np.dtype(dtype).itemsize
    # vocabulary.json, without which they are another program's, is the last to get its name.
    names = ["train.bin", "val.bin", "SHA256SUMS", "vocabulary.json"]
    if described["name"] == "tokenizer.json":
        names.insert(0, "tokenizer.json")
    with unfinished(*(folder / name for name in names)) as [*copies, train, val, sums, vocabulary]:
        with train.open("w+b") as file, val.open("wb") as rest:
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

        for copy in copies:
            shutil.copyfile(tokenizer, copy)
        sums.write_bytes(sums_of({"train.bin": train, "val.bin": val}))
        said = {"tokenizer": described, "dtype": dtype, "source": source, "id": identity}
        said |= {"train_tokens": cut, "val_tokens": count - cut}
        vocabulary.write_bytes(json.dumps(said).encode())
        (folder / "vocabulary.json").unlink(missing_ok=True)


def prepare_text(folder: Path, synthetic: bool, files: list[Path], tokenizer: str) -> str:
    """Fill `folder` with token files. Returns one line that describes them."""
    described = folder / "vocabulary.json"
    held = json.loads(described.read_text()) if described.exists() else {}
    source = ", ".join(path.name for path in files) or "Tiny Shakespeare"
    if synthetic:
        source = SYNTHETIC_TEXT
    if not held and (folder / "train.bin").exists():
        held = {"source": "token files of another program"}
    if held and held["source"] not in (source, SYNTHETIC_TEXT):
        hint = "give another --data-dir"
        sys.exit(f"{folder} is left as it is, because it holds {held['source']}: {hint}")
    if not files:
        files = [folder / "input.txt"]
        if synthetic:
            # English prose that comes with every Python.
            from pydoc_data.topics import topics

            write(files[0], "\n".join(topics[key] for key in sorted(topics)).encode())
        elif held.get("source") != source:
            download_shakespeare(folder)

    # Written again if the text or the tokenizer has changed
    parts = [checksums.sha256(path) for path in (Path(tokenizer), *files) if path.is_file()]
    identity = hashlib.sha256(" ".join([Path(tokenizer).name, *parts]).encode()).hexdigest()
    if held.get("id") != identity:
        write_tokens(folder, source, files, tokenizer, identity)
        held = json.loads(described.read_text())

    unit, size = unit_of(held["tokenizer"]), held["tokenizer"]["size"]
    counts = f"{held['train_tokens']:,} training and {held['val_tokens']:,} validation {unit}"
    return f"{counts}, {size:,} different ones: {held['source']}, in {folder}"


def download_shakespeare(folder: Path):
    try:
        download_url(SHAKESPEARE, folder, md5=SHAKESPEARE_MD5)
    except (RuntimeError, OSError) as error:
        hint = f"bring {SHAKESPEARE} to {folder} by hand, or use --synthetic"
        raise DownloadError(f"cannot download the text ({error}): {hint}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("dataset", nargs="?", choices=["mnist", "shakespeare", "text", "all"], default="all")
    add("--data-dir", type=Path, help="default: data/mnist, data/shakespeare or data/text")
    add("--synthetic", action="store_true", help="make data here, without internet")
    add("--input", type=Path, nargs="+", metavar="FILE", default=[], help="text: UTF-8 files")
    help = "text: characters (the default), bytes, or the tokenizer.json of a Hugging Face model"
    add("--tokenizer", default="characters", metavar="NAME", help=help)
    args = parser.parse_args()
    if (args.dataset == "text") != bool(args.input):
        parser.error("your own text takes both: text --input FILE")
    if args.dataset != "text" and args.tokenizer != "characters":
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
        return prepare_text(folder, synthetic, args.input, args.tokenizer)

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
