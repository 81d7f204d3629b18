"""SHA256SUMS, which aux/prepare_data.py writes beside the data: the form that `sha256sum --check SHA256SUMS` reads."""

import hashlib
from pathlib import Path


def damaged(folder: Path) -> str | None:
    """A sentence on the first file in `folder` that is not the one SHA256SUMS tells of, or None.

    Where there is no SHA256SUMS, as beside files of your own, there is nothing to compare.
    """
    sums = folder / "SHA256SUMS"
    if not sums.exists():
        return None
    try:
        for expected, name in (line.split(maxsplit=1) for line in sums.read_text().splitlines()):
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    return f"{folder / name} is damaged: it is not the file that SHA256SUMS beside it tells of"
    except (OSError, ValueError) as error:
        return f"the files cannot be compared with {sums} ({error})"
    return None
