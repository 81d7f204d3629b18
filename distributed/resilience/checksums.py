"""SHA256SUMS, which aux/prepare_data.py writes beside the data: the form that `sha256sum --check SHA256SUMS` reads."""

import hashlib
from pathlib import Path


def damaged(folder: Path) -> str | None:
    """One sentence on the first file in `folder` whose checksum is not the one in SHA256SUMS, or None.

    Where there is no SHA256SUMS, as beside files of your own, there is nothing to compare.
    """
    sums = folder / "SHA256SUMS"
    if not sums.exists():
        return None
    try:
        for expected, name in (line.split(maxsplit=1) for line in sums.read_text().splitlines()):
            if sha256(folder / name) != expected:
                return f"{folder / name} is damaged: it is not the file that SHA256SUMS beside it tells of"
    except (OSError, ValueError) as error:
        return f"the files cannot be compared with {sums} ({error})"
    return None


def sha256(path: Path) -> str:
    """The checksum of a file of any size, in hexadecimal. Raises OSError."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            checksum.update(part)
    return checksum.hexdigest()
