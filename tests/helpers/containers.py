"""Jobs in containers: a folder of their own with its site's settings."""

import re
from dataclasses import dataclass
from pathlib import Path

from pages import copy_of_repository
from slurm import REPOSITORY, environment

STAND_INS = REPOSITORY / "tests/scripts/stand-ins"


@dataclass
class Site:
    """A folder for images, one of them, and what is mounted: a Python with torch."""

    folder: Path
    image: Path
    torch: str

    @property
    def environment(self) -> dict[str, str]:
        path = f"{STAND_INS / 'bin'}:{environment()['PATH']}"
        containers = str(self.folder / "containers")
        return {"PATH": path, "ENROOT_STAND_IN": str(self.folder), "ENROOT_DATA_PATH": containers}

    def clone(self, name: str, **settings: object) -> Path:
        """A copy of the repository with the settings edited in run_script.sh, as a user would."""
        clone = copy_of_repository(self.folder / name)
        text = (clone / "run_script.sh").read_text()
        for setting, value in ({"IMAGE": self.image, "MOUNTS": self.torch} | settings).items():
            line = rf"^export CONTAINER_{setting}=\S*"
            text, count = re.subn(line, f"export CONTAINER_{setting}={value}", text, flags=re.M)
            assert count == 1
        (clone / "run_script.sh").write_text(text)
        return clone


def documented(runtime: str, clone: Path) -> Path:
    """The clone, its run_script.sh edited as docs/containers.md says."""
    page = (clone / "docs/containers.md").read_text()
    [lines] = re.findall(rf"^```\n((?:    .*\n)*?.*{runtime}(?:.*\n)*?)```$", page, re.M)
    script = (clone / "run_script.sh").read_text()
    line = r"^    .*\./aux/launch/enroot\.sh .*\n"
    script, count = re.subn(line, lambda _: lines, script, flags=re.M)
    assert count == 1
    (clone / "run_script.sh").write_text(script)
    return clone
