"""Every flag and every variable that the documents name exists. Sources are read as text; no
script is run."""

import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from conftest import REPOSITORY

DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True
).stdout.split()
FLAG = r"--[a-zA-Z][\w-]*"

# Slurm's programs are asked for their flags. Here is what they leave out, what Pyxis adds, and
# flags of other programs.
SLURM = ("sbatch", "srun", "salloc", "squeue", "sinfo", "scancel", "sacct", "scontrol", "sacctmgr")
OTHERS = {
    "apptainer": ("--bind", "--nv", "--pwd"),
    "docker": (
        "--file",
        "--gpus",
        "--ipc",
        "--no-cache",
        "--platform",
        "--profile",
        "--rm",
        "--volume",
        "--volumes",
    ),
    "enroot": ("--mount", "--root", "--rw"),
    "git": ("--no-index",),
    "sacct": ("--jobs",),
    "sbatch": ("--kill-on-invalid-dep", "--open-mode", "--test-only"),
    "srun": ("--container-image", "--container-mounts", "--container-workdir"),
}
PLACEHOLDERS = {"--its", "--option"}  # in `my_script.py --its arguments` and `--option=value`


def pieces(text: str) -> list[str]:
    """A page in pieces, each a command or a sentence: the lines of blocks, the spans, the lines
    without spans. No diffs: they show files, and another test compares them."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        found += block.replace("\\\n", " ").splitlines() if language != "diff" else []
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found += [*re.findall(r"`([^`]+)`", prose), *re.sub(r"`[^`]+`", "", prose).splitlines()]
    return [" ".join(piece.split()) for piece in found]


# --- flags ---


@cache
def flags_of_program(name: str) -> set[str]:
    known = set(OTHERS.get(name, ()))
    if name in SLURM:
        said = subprocess.run([name, "--help"], capture_output=True, text=True)
        known.update(re.findall(FLAG, said.stdout + said.stderr))
    if name == "torchrun":
        source = (
            Path(find_spec("torch").origin).parent / "distributed/run.py"
        )  # found, and not imported
        known.update(re.findall(rf'^ +"({FLAG})"', source.read_text(), re.M))
    return known


def with_imports(script: Path) -> set[Path]:
    """A script, and the files of this repository that it imports, and that these import."""
    found, left = set(), [script]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for module, names in re.findall(
            r"^ *(?:from ([\w.]+) )?import ([\w, .]+)", path.read_text(), re.M
        ):
            names = [name.split(" as ")[0] for name in names.split(", ")]
            names = [module, *(f"{module}.{name}" for name in names)] if module else names
            for folder in (path.parent, REPOSITORY / "distributed", REPOSITORY / "aux"):
                files = [folder / f"{name.strip().replace('.', '/')}.py" for name in names]
                left += [file for file in files if file.is_file()]
    return found


@cache
def flags_of_script(path: str) -> set[str]:
    """Of a Python script: the arguments that it adds to its parser. Of a shell script: all that
    stand in it."""
    if path.endswith(".sh"):
        return set(re.findall(FLAG, (REPOSITORY / path).read_text()))
    text = "".join(file.read_text() for file in with_imports(REPOSITORY / path))
    known = set(re.findall(rf'add_argument\(\s*(?:"-\w", )?"({FLAG})"', text))
    switches = set(re.findall(rf'add_argument\("({FLAG})", action=BooleanOptionalAction', text))
    if path == "aux/submit.py":  # it hands sbatch's over
        known |= flags_of_program("sbatch")
    return known | {flag.replace("--", "--no-", 1) for flag in switches} | {"--help"}


SCRIPTS = [path for path in TRACKED if path.endswith((".py", ".sh"))]
NAMES = {Path(path).name: path for path in SCRIPTS} | {path: path for path in SCRIPTS}


def owner(word: str) -> set[str] | None:
    """What may follow this word, if it is a program, in this repository or of others."""
    if word in SLURM or word in OTHERS or word == "torchrun":
        return flags_of_program(word)
    if word == "#SBATCH":
        return flags_of_program("sbatch")
    path = NAMES.get(word.removeprefix("./").removeprefix("/data/"))
    return flags_of_script(path) if path else None


@cache
def all_flags() -> set[str]:
    """For a flag that stands alone, or behind the name of a script that is not ours."""
    return set().union(
        *map(flags_of_program, [*SLURM, *OTHERS, "torchrun"]), *map(flags_of_script, SCRIPTS)
    )


def unknown_flags(text: str) -> list[str]:
    """A flag belongs to the program before it. Where the next program begins, the flags of the
    first one end."""
    found = []
    for piece in pieces(text):
        known = None
        for word in re.findall(r"[^\s\"'()|;&,]+", piece):
            flag = re.match(FLAG, word)
            if flag and flag[0] not in PLACEHOLDERS | (all_flags() if known is None else known):
                found.append(f"{flag[0]} in `{piece}`")
            elif not flag and re.search(r"\.(py|sh|slurm)$|^[a-z#]+$", word, re.I):
                known = (
                    owner(word) if word.endswith((".py", ".sh", ".slurm")) else owner(word) or known
                )
    return found


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Without a configuration, Slurm's programs do not even print their help."""
    if not all(map(shutil.which, SLURM)):
        pytest.skip("Slurm is not installed here")
    lines = [
        "ClusterName=none",
        "SlurmctldHost=localhost",
        "NodeName=localhost",
        "PartitionName=p Nodes=ALL",
    ]
    (tmp_path / "slurm.conf").write_text("\n".join([*lines, "AuthType=auth/none", ""]))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_flags_exist(path, slurm):
    assert unknown_flags(path.read_text()) == []


# --- variables ---

# Nothing here sets or reads these, or they are no variables.
OF_OTHERS = {
    *("BASH_ENV", "CUDA_LAUNCH_BLOCKING", "ENROOT_DATA_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *(
        "NCCL_DEBUG_SUBSYS",
        "NCCL_IB_DISABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
    ),
    *("HF_HOME", "WANDB_API_KEY"),  # which a reader may want in a container
    *(
        "OUT_OF_MEMORY",
        "TMP_DISK",
        "AVAIL_FE",
        "SIG_DFL",
    ),  # a state and columns of Slurm's, a constant of Python's
    *("BATCH_SIZE", "EPOCHS"),  # of launchers that others have
    *("VARIABLE", "LAUNCHER_JOBID"),  # in `VARIABLE=value sbatch ...` and in the name of a log
}
NAME = r"[A-Z][A-Z0-9_]+"
FORMS = (rf"\$[({{]?({NAME})", rf"\b({NAME}) ?[?:+]?=", rf"[\"']({NAME})[\"']", rf"^ *({NAME}):")


@cache
def variables_of_sources() -> set[str]:
    """What a file that is no document and no test sets or reads, or has as a string: the keys of
    os.environ."""
    files = [
        path
        for path in TRACKED
        if not path.endswith((".md", ".svg", ".json")) and not path.startswith("tests/")
    ]
    source = "\n".join((REPOSITORY / path).read_text() for path in files)
    loops = " ".join(re.findall(r"^ *for \w+ in ([^;]+); do", source, re.M)).split()
    return {name for form in FORMS for name in re.findall(form, source, re.M)} | set(loops)


def unknown_variables(text: str) -> list[str]:
    """Of the words with an underscore in them, and those before a `=` or behind a `$`."""
    found = []
    for piece in pieces(text):
        names = re.findall(
            rf"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b{NAME}(?==)|(?<=\$){NAME}|(?<=\${{){NAME}", piece
        )
        found += [
            f"{name} in `{piece}`"
            for name in names
            if name not in OF_OTHERS | variables_of_sources()
        ]
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_variables_exist(path):
    assert unknown_variables(path.read_text()) == []


# --- the test of the tests ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`sbatch --nodes=2 launch_slurm_to_torch.sh distributed/train_ddp.py --epochs 1`", []),
        ("`sbatch --epochs=2 launch_slurm_to_torch.sh distributed/train_ddp.py`", ["--epochs"]),
        ("`python distributed/train_ddp.py --epochs 1 --nodes=2`", ["--nodes"]),
        (
            "`train_ddp.py --checkpoint-every 5`, `train_preemptible.py --checkpoint-every 5`",
            ["--checkpoint-every"],
        ),
        ("`train_fsdp.py --no-compile --no-tensorboard`", ["--no-tensorboard"]),
        ("```bash\n./torchrun.sh distributed/train_tp.py \\\n    --epoch 1\n```\n", ["--epoch"]),
        ("```\n#SBATCH --node=2\n```\n", ["--node"]),
        ("```diff\n+    --no-such-flag\n```\n", []),
        ("with `--batch-sizes 5` and --eposch", ["--batch-sizes", "--eposch"]),
        ("`torchrun --nproc_per_node=2 --nproc=2`, `docker build --tags`", ["--nproc", "--tags"]),
    ],
)
def test_a_wrong_flag_is_found(text, found, slurm):
    assert [line.split(" in `")[0] for line in unknown_flags(text)] == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`NCCL_DEBUG=INFO sbatch --nodes=2`, MASTER_ADDR, `$NPROC_PER_NODE`, SLURM_JOB_ID", []),
        ("`DEBUGGING=1 sbatch`, MASTER_ADRESS, `$NPROCS`, `${SLURM_PROC_ID}`", None),
        ("`make data DATADIR=/data`", ["DATADIR"]),
        ("A GPU, a CPU, `COMPLETED`, `sacct --jobs=JOBID`", []),
    ],
)
def test_a_wrong_variable_is_found(text, found):
    found = ["MASTER_ADRESS", "DEBUGGING", "NPROCS", "SLURM_PROC_ID"] if found is None else found
    assert sorted(line.split(" in `")[0] for line in unknown_variables(text)) == sorted(found)
