"""Words that shells would change, what jobs get, and copies of the files that a reader copies."""

import re
import shutil
from pathlib import Path

from slurm import LAUNCHERS, REPOSITORY, Job

VARIABLES, STRANGER = "tests/scripts/variables.py", "tests/scripts/stranger.py"
NASTY = ["a b", "it's", 'say "x"', "*", "$HOME", "", "line\nbreak", "--flag=v", "; touch canary"]
NASTY += ["`touch canary`", "\\", "$(touch canary)", "--"]


def assert_five_variables(ranks: list[dict], sizes: list[int]):
    """Ranks 0..n-1, local ranks from 0 on each node, and one size, address and port for all."""
    count = sum(sizes)
    assert [rank["rank"] for rank in ranks] == list(range(count))
    assert {rank["world_size"] for rank in ranks} == {count}
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank["host"], []).append(rank["local_rank"])
        assert rank["signals"] == ["SIG_DFL", "SIG_DFL"], "nobody has them ignored"
    assert all(rank["local_world_size"] == len(nodes[rank["host"]]) for rank in ranks)
    assert sorted(map(len, nodes.values())) == sorted(sizes)
    assert all(local_ranks == list(range(len(local_ranks))) for local_ranks in nodes.values())
    assert len({(rank["master_addr"], rank["master_port"]) for rank in ranks}) == 1
    assert ranks[0]["master_addr"] == ranks[0]["host"]
    assert int(ranks[0]["master_port"]) == 61000 + int(ranks[0]["job"]) % 4536


def in_all_ways(
    cluster, tmp_path, *script: object, size: tuple | list = (), **options
) -> dict[str, Job]:
    """A job by every launcher, all at once, of two nodes x two ranks or of another `size`."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        command = [f"--output={tmp_path}/{way}-%j", *size, launcher, *script]
        submitted[way] = cluster.submit(*command, **options)
    return {way: cluster.wait(number) for way, number in submitted.items()}


# In the order of env.sh's fields, without the job's id
NOTHING = "1 N/A N/A 0 N/A N/A N/A"
# The table of docs/appendix_launchers.md
ROW = re.compile(r"^\| (\w+) \| .+ \| (`env\.sh`, .+) \|$", re.M)
THREE_FILES = {
    launcher: re.findall(r"`([^`]+)`", cell)
    for launcher, cell in ROW.findall((REPOSITORY / "docs/appendix_launchers.md").read_text())
}


def copy_file(name: str, folder: Path):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPOSITORY / name, folder / name)
