#!/usr/bin/env python3
"""Bring the data sets to this machine: once, before the job, never from inside it.

    python aux/prepare_data.py                                  # both data sets; synthetic ones without internet
    python aux/prepare_data.py mnist --data-dir /scratch/mnist
    python aux/prepare_data.py shakespeare --input novel.txt    # any UTF-8 text instead of Tiny Shakespeare
    python aux/prepare_data.py --synthetic                      # digits and text made on this machine

What is there and right is left alone, so a second run costs nothing. A download that was cut off goes on where it
stopped (NAME.part); every file is checked before use and appears under its final name whole or not at all.
"""

import argparse
import array
import errno
import functools
import gzip
import hashlib
import http.client
import json
import math
import os
import signal
import socket
import sys
import time
import urllib.parse
import urllib.request
import zlib
from pathlib import Path

# Tried in this order; each ends in "/" and is followed by the file's name.
MNIST_MIRRORS = [
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
]
SHAKESPEARE_MIRRORS = ["https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"]
TIMEOUT = 15  # seconds: to reach a server, and again for each wait without a byte from it

# sha256 of the unpacked files: one sum judges a download, a .gz brought by hand and a file that is already in place.
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MNIST_COUNTS = {"train": 60_000, "t10k": 10_000}
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE, PYTHON_DOCUMENTATION = "Tiny Shakespeare", "Python documentation (synthetic)"


def write_atomically(files: dict[Path, bytes], outdated: Path | None = None) -> None:
    """Write all `files` or none: under temporary names beside them, flushed to disk, and only then renamed, in order.

    `outdated`, a file that would vouch for a mix of old and new, is removed just before the first is renamed.
    Raises OSError (full disk, no permission, conflicting folder).
    """
    temporary = {path: path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():  # os.replace would find out too late
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            with temporary[path].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if outdated:
            outdated.unlink(missing_ok=True)
        for path in files:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            if path.exists():
                path.unlink()


# --- download ---------------------------------------------------------------------------------------------------------


class DownloadError(Exception):
    """The network failed; the text says how. Not an OSError: a full disk is no network fault."""


def connect(url: str, start: int) -> http.client.HTTPResponse:
    """Ask for `url` from byte `start` on; a reply of status 200, not 206, is the whole file. Raises DownloadError."""

    def too_late(*_):
        raise DownloadError(f"no answer within {TIMEOUT} s")

    # urlopen's timeout holds for each of a server's addresses in turn, which on a node without a way out takes minutes.
    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(TIMEOUT)
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except (OSError, http.client.HTTPException) as error:
        if start and getattr(error, "code", 0) == 416:  # the file is not longer than what is here: begin anew
            return connect(url, 0)
        raise DownloadError(str(error)) from error
    finally:
        signal.alarm(0)


def download(url: str, part: Path) -> None:
    """Append to `part` what it lacks of the file at `url`, as far as it comes. Raises DownloadError."""
    start = part.stat().st_size if part.exists() else 0
    reply = connect(url, start)
    here = start if reply.status == 206 else 0
    whole = here + int(reply.headers["Content-Length"] or 0)
    print(f"{url}: {whole:,} bytes" + (f", of which {here:,} are here" if here else ""), flush=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    live, shown = sys.stdout.isatty(), time.monotonic()
    with reply, part.open("ab" if here else "wb") as file:
        chunk = None
        while chunk != b"":
            try:
                chunk = reply.read1(1 << 16)
            except (OSError, http.client.HTTPException) as error:
                raise DownloadError(f"{error} after {here:,} of {whole:,} bytes") from error
            here += file.write(chunk)
            if time.monotonic() - shown > (0.1 if live else 10) or (live and not chunk):
                shown = time.monotonic()
                print(f"  {here / 1e6:.1f} of {whole / 1e6:.1f} MB", end="\r" if live and chunk else "\n", flush=True)
    if here < whole:
        raise DownloadError(f"connection closed after {here:,} of {whole:,} bytes")


def unpacked(path: Path, sha256: str) -> bytes | None:
    """Return the content of `path` (of a .gz: what is in it), or None if it is not there or its sha256 is another."""
    content = path.read_bytes() if path.exists() else b""
    try:
        content = gzip.decompress(content) if ".gz" in path.suffixes else content
    except (OSError, EOFError, zlib.error):
        return None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None


def fetch(name: str, sha256: str, mirrors: list[str], folder: Path) -> bytes:
    """Return the file `name`, unpacked and checked: from `folder` if it was brought there by hand, else from a mirror.

    A download grows in `folder`/NAME.part, which the caller removes. Raises DownloadError if all mirrors fail.
    """
    by_hand, part = folder / name, folder / f"{name}.part"
    for path in (by_hand, part):  # the second: whole, but that run was ended before it was used
        if content := unpacked(path, sha256):
            return content
    if by_hand.exists():
        raise DownloadError(f"the checksum of {by_hand} is wrong")
    troubles = []
    for mirror in mirrors:
        before = -1
        while (start := part.stat().st_size if part.exists() else 0) > before:  # the last try brought something
            before = start
            try:
                download(mirror + name, part)
                if content := unpacked(part, sha256):
                    return content
                part.unlink()
                before, trouble = (
                    -1 if start else 0,
                    DownloadError("wrong checksum"),
                )  # -1: was only the old beginning wrong?
            except DownloadError as error:
                trouble = error
        troubles.append(f"{urllib.parse.urlsplit(mirror).hostname}: {trouble}")
        reason = getattr(trouble.__cause__, "reason", None)
        if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_AGAIN:
            break  # no name server answers: asking for the next mirror would only take as long again
    raise DownloadError("; ".join(troubles))


def fetch_all(wanted: dict[str, str], mirrors: list[str], folder: Path) -> dict[str, bytes]:
    """Return the contents of the files `wanted` {name: sha256}. Raises DownloadError with a sentence for people."""
    try:
        return {name: fetch(name, sha256, mirrors, folder) for name, sha256 in wanted.items()}
    except DownloadError as error:
        by_hand = f"bring {', '.join(wanted)} from {mirrors[0]} into the folder {folder} by hand"
        raise DownloadError(f"cannot download ({error}): {by_hand}, or use --synthetic") from None


# --- MNIST ------------------------------------------------------------------------------------------------------------


def synthetic_labels(count: int) -> bytes:
    """Return the label file of `count` drawn digits: 0, 1, ..., 9, 0, 1, ... in turn.

    This order is the mark of a synthetic set, here and for the training scripts: no real set has it.
    """
    return (0x801).to_bytes(4, "big") + count.to_bytes(4, "big") + bytes(i % 10 for i in range(count))


def checksums(files: dict[Path, bytes]) -> bytes:
    """Return what a file SHA256SUMS beside `files` holds: resilience/checksums.py and sha256sum --check read it."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {path.name}\n" for path, content in files.items()).encode()


def inspect_mnist(raw: Path) -> dict[str, str]:
    """Return what each of the four files in `raw` is: missing, MNIST, broken, synthetic or other (valid IDX)."""
    kinds, sums = {}, (raw / "SHA256SUMS").read_text() if (raw / "SHA256SUMS").exists() else ""
    for name, sha256 in reversed(MNIST_SHA256.items()):  # labels first: they tell whether the images are drawn ones
        content = (raw / name).read_bytes() if (raw / name).exists() else None
        split, kind, _ = name.split("-", 2)
        count, words = MNIST_COUNTS[split], 4 if kind == "images" else 2
        header = [int.from_bytes((content or b"")[4 * i : 4 * i + 4], "big") for i in range(words)]
        found = hashlib.sha256(content or b"").hexdigest()
        if content is None:
            kinds[name] = "missing"
        elif found == sha256:
            kinds[name] = "MNIST"
        elif header[0] != 0x800 + words - 1 or len(content) != 4 * words + math.prod(header[1:]):
            kinds[name] = "broken"
        elif content == synthetic_labels(count):
            kinds[name] = "synthetic"
        else:
            drawn = kinds.get(f"{split}-labels-idx1-ubyte") == "synthetic" and header[1:] == [count, 28, 28]
            damaged = f"  {name}\n" in sums and found not in sums
            kinds[name] = "other" if not drawn else "broken" if damaged else "synthetic"
    return kinds


def prepare_mnist(folder: Path, synthetic: bool) -> str:
    """Put the four IDX files where torchvision looks for them, `folder`/MNIST/raw; return one line on what is there.

    What can be had again (broken or drawn files) is replaced; real digits, MNIST's or others, end the program instead.
    """
    raw, kinds = folder / "MNIST" / "raw", inspect_mnist(folder / "MNIST" / "raw")
    lacking = [name for name in MNIST_SHA256 if kinds[name] != ("synthetic" if synthetic else "MNIST")]
    for name in lacking:
        if kinds[name] in ("MNIST", "other"):
            what = "MNIST itself" if kinds[name] == "MNIST" else "valid, but not MNIST's: your own data?"
            sys.exit(f"{raw / name} is left as it is ({what}): move {folder} away, or give another --data-dir")
    for name in lacking:
        if kinds[name] != "missing":
            what = "damaged" if kinds[name] == "broken" else "a synthetic one"
            print(f"{raw / name} is {what} and will be replaced")
    # Labels are drawn before images and downloaded after them: at any moment, drawn images can be told by their labels.
    files = {}
    if lacking and synthetic:
        from figures.draw_digits import draw_digits  # here: it needs torch, and a download does not

        for seed, (split, count) in enumerate(MNIST_COUNTS.items()):
            header = b"".join(number.to_bytes(4, "big") for number in (0x803, count, 28, 28))
            files[raw / f"{split}-labels-idx1-ubyte"] = synthetic_labels(count)
            files[raw / f"{split}-images-idx3-ubyte"] = header + draw_digits(count, seed)
    elif lacking:
        contents = fetch_all({f"{name}.gz": MNIST_SHA256[name] for name in lacking}, MNIST_MIRRORS, raw)
        files = {raw / name: contents[f"{name}.gz"] for name in lacking}
    if lacking:
        four = {raw / name: files.get(raw / name) or (raw / name).read_bytes() for name in MNIST_SHA256}
        write_atomically(files | {raw / "SHA256SUMS": checksums(four)}, outdated=raw / "SHA256SUMS")
        for name in lacking:
            (raw / f"{name}.gz.part").unlink(missing_ok=True)
    source = "synthetic digits" if synthetic else "MNIST, checksums right"
    return f"{raw}: 60,000 training and 10,000 test images, {source}, {'written' if lacking else 'already there'}"


# --- Tiny Shakespeare, or another text --------------------------------------------------------------------------------


def inspect_text(folder: Path) -> dict | None:
    """Return `folder`/vocabulary.json if it and the two token files beside it fit together, else None."""
    try:
        vocabulary = json.loads((folder / "vocabulary.json").read_bytes())
        for split in ("train", "val"):
            size = vocabulary[f"{split}_tokens"] * {"uint8": 1, "uint16": 2}[vocabulary["dtype"]]
            if (folder / f"{split}.bin").stat().st_size != size:
                return None
        return vocabulary if {"source", "sha256", "characters"} <= set(vocabulary) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def encode(data: bytes, source: str) -> tuple[dict, bytes, bytes]:
    """Return the vocabulary of the UTF-8 text `data` and its token ids, little-endian: the first 90 % and the rest."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        sys.exit(f"{source} is not UTF-8 text ({error.reason} at byte {error.start:,})")
    characters = sorted(set(text))
    if len(text) < 1000:
        sys.exit(f"{source} is too short: {len(text):,} characters, at least 1,000 are needed")
    if len(characters) > 65_536:
        sys.exit(f"{source} has {len(characters):,} different characters, at most 65,536 fit into two-byte token ids")
    ids, cut = {character: i for i, character in enumerate(characters)}, len(text) * 9 // 10
    tokens = array.array("B" if len(characters) <= 256 else "H", map(ids.__getitem__, text))
    if sys.byteorder == "big":
        tokens.byteswap()
    vocabulary = {"characters": characters, "dtype": f"uint{8 * tokens.itemsize}", "source": source}
    vocabulary |= {"train_tokens": cut, "val_tokens": len(text) - cut, "sha256": hashlib.sha256(data).hexdigest()}
    return vocabulary, tokens[:cut].tobytes(), tokens[cut:].tobytes()


def prepare_shakespeare(folder: Path, synthetic: bool, text: Path | None) -> str:
    """Write train.bin, val.bin (token ids) and vocabulary.json into `folder`; return one line on what is there.

    An id is a character's place in "characters". A set made from a text of your own is replaced by that text only.
    """
    source, data, sha256 = SHAKESPEARE, None, SHAKESPEARE_SHA256
    if synthetic:
        from pydoc_data.topics import topics  # English prose that comes with every Python

        source, data = PYTHON_DOCUMENTATION, "\n".join(topics[key] for key in sorted(topics)).encode()
    elif text:
        source, data = text.name, text.read_bytes()
    if data is not None:
        sha256 = hashlib.sha256(data).hexdigest()
        source = SHAKESPEARE if sha256 == SHAKESPEARE_SHA256 else source
    vocabulary, state = inspect_text(folder), "already there"
    if vocabulary is None or vocabulary["sha256"] != sha256:
        if vocabulary and vocabulary["source"] not in (PYTHON_DOCUMENTATION, source):
            sys.exit(f"{folder} holds {vocabulary['source']}, which stays: move it away, or give another --data-dir")
        if vocabulary or (folder / "train.bin").exists():
            print(f"{folder} holds {vocabulary['source'] if vocabulary else 'an incomplete set'}: it will be replaced")
        if data is None:
            data = fetch_all({"input.txt": sha256}, SHAKESPEARE_MIRRORS, folder)["input.txt"]
        vocabulary, train, val = encode(data, source)
        last, state = folder / "vocabulary.json", "written"  # the last file says that the set is complete
        files = {folder / "train.bin": train, folder / "val.bin": val, last: json.dumps(vocabulary).encode()}
        write_atomically({folder / "SHA256SUMS": checksums(files)} | files, last)
        (folder / "input.txt.part").unlink(missing_ok=True)
    counts = f"{vocabulary['train_tokens']:,} training and {vocabulary['val_tokens']:,} validation characters"
    return f"{folder}: {counts}, {len(vocabulary['characters']):,} different ones, {vocabulary['source']}, {state}"


def prepare(name: str, args: argparse.Namespace) -> None:
    """Print what is there now. Who asks for all data sets, and cannot download, gets synthetic ones."""
    folder = args.data_dir or Path("data", name)
    function = prepare_mnist if name == "mnist" else functools.partial(prepare_shakespeare, text=args.input)
    try:
        print(function(folder, args.synthetic))
    except DownloadError as error:
        if args.dataset != "all":
            raise
        print(f"{name}: {error}. SYNTHETIC data are made instead", flush=True)
        print(function(folder, True))


def main(arguments: list[str] | None = None) -> None:
    """Prepare what was asked for; every failure is one sentence on stderr and a status other than 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", choices=["mnist", "shakespeare", "all"], default="all")
    parser.add_argument("--data-dir", type=Path, help="where to (default: data/mnist, data/shakespeare)")
    parser.add_argument("--synthetic", action="store_true", help="make the data here instead of downloading it")
    parser.add_argument("--input", type=Path, metavar="FILE", help="shakespeare: a UTF-8 text file to use instead")
    parser.error = lambda message: sys.exit(f"prepare_data.py: {message!r} (--help lists the arguments)")
    args = parser.parse_args(arguments)
    if args.input and (args.dataset != "shakespeare" or args.synthetic):
        sys.exit("--input is for the data set shakespeare, without --synthetic")
    if args.data_dir and args.dataset == "all":
        sys.exit("--data-dir is for one data set: name mnist or shakespeare too")
    try:
        for name in ("mnist", "shakespeare"):
            if args.dataset in (name, "all"):
                prepare(name, args)
    except DownloadError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"cannot read or write {error.filename or args.data_dir or 'data'}: {error.strerror or error}")
    except ImportError as error:
        sys.exit(f"--synthetic needs the Python module {error.name}, which is not installed here")
    except KeyboardInterrupt:
        print("interrupted: what was downloaded is kept, and the next run goes on from there", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
