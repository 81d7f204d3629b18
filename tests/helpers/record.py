"""With RECORD set, as `make record` does, the tests that compare what a page shows with what its
commands print train on all of the data, and the page gets the fresh lines, the same ones as before.
"""

import contextlib
import os
import re
import socket
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDING = "RECORD" in os.environ
LOSS = r"loss=\d+\.\d{6}(?: test_accuracy=[\d.]+)?"
LOCK = threading.Lock()


def write(shown: str, parts: list[list[int]], output: str):
    """Puts these lines of the output in the place of the block `shown` of a page, with "..."
    between the parts. A new loss takes the old one's place on all pages, also in sentences."""
    lines = output.splitlines(keepends=True)
    fresh = "...\n".join("".join(lines[number] for number in part) for part in parts)
    fresh = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "vm", fresh)
    pairs = {f"\n{shown}```": f"\n{fresh}```"}
    for old, new in zip(re.findall(LOSS, shown), re.findall(LOSS, fresh), strict=True):
        pairs[old] = new
        pairs[old.split()[0].removeprefix("loss=")] = new.split()[0].removeprefix("loss=")
    pattern = "|".join(re.escape(old) for old in pairs)
    with LOCK:
        paths = REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")
        pages = {path: path.read_text() for path in paths}
        assert any(f"\n{shown}```" in text for text in pages.values()), f"on no page:\n{shown}"
        for path, text in pages.items():
            # All at once, so that no new loss is taken for another old one.
            written = re.sub(pattern, lambda found: pairs[found[0]], text)
            if written != text:
                path.write_text(written)


@contextlib.contextmanager
def stop_early(clone: Path, batches: int):
    """Meanwhile a training in this clone ends after so many batches, for a page that shows no more.
    In a test that does not record, the small data end before."""
    path = clone / "distributed/mnist.py"
    kept = path.read_text()
    text = kept.replace("import hashlib\n", "import hashlib\nimport os\nimport time\n")
    text = text.replace("\ndef collate", "\nfetched = [0]\n\n\ndef collate")
    # The other ranks may still be adding up.
    stop = f"    fetched[0] += 1\n    if fetched[0] > {batches}:\n"
    stop += "        time.sleep(2)\n        os._exit(0)\n"
    text = text.replace("    return batch\n", f"{stop}    return batch\n")
    assert stop in text
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(kept)
