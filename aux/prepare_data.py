#!/usr/bin/env python3
"""Bring the data sets to this machine: once, before the job, never from inside it.

    python aux/prepare_data.py                                  # both; synthetic without internet
    python aux/prepare_data.py mnist --data-dir /scratch/mnist
    python aux/prepare_data.py shakespeare --input novel.txt    # any UTF-8 text
    python aux/prepare_data.py --synthetic                      # digits and text made here

What is there already stays. SHA256SUMS beside the data is for `sha256sum --check`.
"""

import argparse
import array
import hashlib
import json
import os
import socket
import sys
from pathlib import Path

from torchvision import datasets
from torchvision.datasets.utils import download_url

from draw_digits import draw_digits

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import mnist

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SYNTHETIC_TEXT = "Python documentation (synthetic)"
SHAKESPEARE_MD5 = "6fb458f1232090904fb40fe944165e91"


class DownloadError(Exception):
    """The network failed. The text says how, and what to do."""


def write(files: dict[Path, bytes]):
    """Write the files in order, each whole or not at all. Raises OSError."""
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def checksums(files: dict[Path, bytes]) -> bytes:
    lines = [
        f"{hashlib.sha256(content).hexdigest()}  {path.name}\n" for path, content in files.items()
    ]
    return "".join(lines).encode()


# --- MNIST ---


def idx(content: bytes, *shape: int) -> bytes:
    """An IDX file of bytes, MNIST's format: a header with the shape, then the content."""
    header = bytes([0, 0, 8, len(shape)])
    return header + b"".join(size.to_bytes(4, "big") for size in shape) + content


def draw_mnist() -> dict[str, bytes]:
    """The four files with drawn digits, whose labels are 0, 1, ..., 9, 0, 1, ... in turn."""
    files = {}
    for seed, (split, count) in enumerate({"train": 60_000, "t10k": 10_000}.items()):
        files[f"{split}-labels-idx1-ubyte"] = idx(bytes(i % 10 for i in range(count)), count)
        files[f"{split}-images-idx3-ubyte"] = idx(draw_digits(count, seed), count, 28, 28)
    return files


def prepare_mnist(folder: Path, synthetic: bool) -> str:
    """Fill `folder` as torchvision.datasets.MNIST does. Returns one line on what is there."""
    raw = folder / "MNIST" / "raw"
    there = mnist.describe(folder) if (raw / "t10k-labels-idx1-ubyte").exists() else ""
    if synthetic and not there:
        files = {raw / name: content for name, content in draw_mnist().items()}
        write(files | {raw / "SHA256SUMS": checksums(files)})
    elif synthetic and not there.startswith("SYNTHETIC"):
        sys.exit(f"there is {there}: give another --data-dir")
    elif not synthetic and there.startswith("SYNTHETIC"):
        raise DownloadError(f"there are {there}: move them away to download MNIST")
    elif not synthetic:
        download_mnist(folder, raw)

    try:
        train_set, test_set = mnist.load(folder)
    except ValueError as error:
        sys.exit(str(error))
    counts = f"{len(train_set):,} training and {len(test_set):,} test images"
    return f"{counts}: {mnist.describe(folder)}"


def download_mnist(folder: Path, raw: Path):
    try:
        datasets.MNIST(folder, download=True)
    except RuntimeError as error:
        if not str(error).startswith("Error downloading"):
            # The files are there, and mnist.load says what is wrong with them.
            return
        reason = str(error).strip().splitlines()[-1]
        hint = f"bring its four .gz files into {raw} by hand, or use --synthetic"
        raise DownloadError(f"cannot download MNIST ({reason}): {hint}") from None
    if not (raw / "SHA256SUMS").exists():
        files = {path: path.read_bytes() for path in sorted(raw.glob("*-ubyte"))}
        write({raw / "SHA256SUMS": checksums(files)})


# --- Tiny Shakespeare, or another text ---


def encode(data: bytes, source: str) -> dict[str, bytes]:
    """The files for a UTF-8 text: token ids of the first 90 %, of the rest, and the vocabulary.

    An id is the character's place in "characters", in one byte, or little-endian in two.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        sys.exit(f"{source} is not UTF-8 text: {error.reason} at byte {error.start:,}")
    characters = sorted(set(text))
    if len(text) < 1000:
        sys.exit(f"{source} has {len(text):,} characters, and at least 1,000 are needed")
    if len(characters) > 65_536:
        sys.exit(f"{source} has {len(characters):,} different characters, more than 65,536")

    ids = {character: i for i, character in enumerate(characters)}
    tokens = array.array("B" if len(characters) <= 256 else "H", (ids[letter] for letter in text))
    if sys.byteorder == "big":
        tokens.byteswap()
    cut = len(text) * 9 // 10
    vocabulary = {
        "characters": characters,
        "dtype": f"uint{8 * tokens.itemsize}",
        "source": source,
        "train_tokens": cut,
        "val_tokens": len(text) - cut,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return {
        "train.bin": tokens[:cut].tobytes(),
        "val.bin": tokens[cut:].tobytes(),
        "vocabulary.json": json.dumps(vocabulary).encode(),
    }


def prepare_text(folder: Path, synthetic: bool, own: Path | None) -> str:
    """Fill `folder` with token files. Returns one line on what is there."""
    if own:
        data, source = own.read_bytes(), own.name
    elif synthetic:
        # English prose that comes with every Python.
        from pydoc_data.topics import topics

        data, source = "\n".join(topics[key] for key in sorted(topics)).encode(), SYNTHETIC_TEXT
    else:
        data, source = None, "Tiny Shakespeare"

    there = folder / "vocabulary.json"
    held = json.loads(there.read_text()) if there.exists() else {"source": source, "sha256": ""}
    if held["source"] not in (source, SYNTHETIC_TEXT):
        hint = "give another --data-dir"
        sys.exit(f"{folder} is left as it is, because it holds {held['source']}: {hint}")
    if data is None and not (there.exists() and held["source"] == source):
        try:
            download_url(SHAKESPEARE, folder, md5=SHAKESPEARE_MD5)
        except (RuntimeError, OSError) as error:
            hint = f"bring {SHAKESPEARE} to {folder} by hand, or use --synthetic"
            raise DownloadError(f"cannot download the text ({error}): {hint}") from None
        data = (folder / "input.txt").read_bytes()
    if data is not None and hashlib.sha256(data).hexdigest() != held["sha256"]:
        files = {folder / name: content for name, content in encode(data, source).items()}
        there.unlink(missing_ok=True)
        write({folder / "SHA256SUMS": checksums(files)} | files)
    held = json.loads(there.read_text())
    counts = f"{held['train_tokens']:,} training and {held['val_tokens']:,} validation characters"
    return f"{counts}, {len(held['characters'])} different ones: {held['source']}, in {folder}"


def prepare(name: str, folder: Path, synthetic: bool, own: Path | None) -> str:
    if name == "mnist":
        return prepare_mnist(folder, synthetic)
    return prepare_text(folder, synthetic, own)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "dataset", nargs="?", choices=["mnist", "shakespeare", "all"], default="all"
    )
    parser.add_argument("--data-dir", type=Path, help="default: data/mnist, data/shakespeare")
    parser.add_argument("--synthetic", action="store_true", help="make data here, without internet")
    parser.add_argument(
        "--input", type=Path, metavar="FILE", help="shakespeare: your own UTF-8 text"
    )
    args = parser.parse_args()
    if args.input and (args.dataset != "shakespeare" or args.synthetic):
        parser.error("--input is for the data set shakespeare, without --synthetic")
    if args.data_dir and args.dataset == "all":
        parser.error("--data-dir is for one data set: name mnist or shakespeare, too")

    # A node without a way out would otherwise wait for minutes.
    socket.setdefaulttimeout(15)
    for name in ("mnist", "shakespeare"):
        if args.dataset not in (name, "all"):
            continue
        folder = args.data_dir or Path("data", name)

        try:
            print(prepare(name, folder, args.synthetic, args.input))
        except DownloadError as error:
            if args.dataset != "all":
                sys.exit(str(error))
            print(f"{error}. SYNTHETIC data are made instead", flush=True)
            print(prepare(name, folder, True, None))
        except OSError as error:
            sys.exit(f"cannot read or write {error.filename}: {error.strerror}")


if __name__ == "__main__":
    main()
