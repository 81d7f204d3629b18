"""SHA256SUMS, which aux/prepare_data.py writes beside the data, as `sha256sum --check` reads it."""

import hashlib
from pathlib import Path


def damaged(folder: Path) -> str | None:
    """One sentence on the first file whose checksum is not the one in SHA256SUMS, or None.

    If there is no SHA256SUMS, as beside files of your own, there is nothing to compare. It reads
    the files whole, so only local rank 0 calls it for its node, and the other ranks compare sizes.
    Files above 1 GiB are left to `sha256sum --check`, so that no job waits for them.
    """
    try:
        for name, expected in listed(folder).items():
            if (folder / name).stat().st_size > 1 << 30:
                continue
            if sha256(folder / name) != expected:
                what = "it is not the file that SHA256SUMS beside it describes"
                return f"{folder / name} is damaged: {what}"
    except (OSError, ValueError) as error:
        return f"the files cannot be compared with {folder / 'SHA256SUMS'} ({error})"
    return None


def of(path: Path) -> str:
    """A file's checksum: from SHA256SUMS, in which damaged() has found no fault, or by reading.

    Raises OSError or ValueError.
    """
    return listed(path.parent).get(path.name) or sha256(path)


def listed(folder: Path) -> dict[str, str]:
    """The checksums in SHA256SUMS by file name, if it is there. Raises OSError or ValueError."""
    sums = folder / "SHA256SUMS"
    lines = sums.read_text().splitlines() if sums.exists() else []
    return {name: checksum for checksum, name in (line.split(maxsplit=1) for line in lines)}


def sha256(path: Path) -> str:
    """The checksum of a file of any size, in hexadecimal. Raises OSError."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            checksum.update(part)
    return checksum.hexdigest()
