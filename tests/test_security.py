"""SECURITY.md: no shell is given a string, no secret is told, a .pt file cannot run code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, run

TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True
).stdout.split()
SECRET = "canary-3f1d9c"  # no part of any other text


def canaries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("canary*"))


@pytest.mark.parametrize("way", cells([(way,) for way in LAUNCHERS], ("torchrun",)))
def test_no_secret_in_log_script_or_command_line(way, cluster, tmp_path):
    secrets = {"SECRET_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    size = ["--nodes=1", "--gpus-per-node=1", *(["--ntasks-per-node=1"] if way == "srun" else [])]
    command = [f"--output={tmp_path}/log", LAUNCHERS[way], "tests/scripts/find_secret.py"]
    job = cluster.sbatch(*size, *command, env=secrets)
    assert job.state == "COMPLETED" and "LOOKED" in job.log, job.log
    assert SECRET not in job.log and "LEAK" not in job.log, job.log
    script = cluster.exec("scontrol", "write", "batch_script", job.id, "-").stdout
    assert script.strip() == (REPOSITORY / LAUNCHERS[way]).read_text().strip()


def test_no_shell_is_given_a_string():
    """No eval, no sh -c of something put together; Python starts programs by a list of words."""
    for path in TRACKED:
        text = (REPOSITORY / path).read_text(errors="replace")
        if path.endswith(".sh"):
            code = re.sub(r"(^|\s)#.*", "", text)
            assert not re.search(r"(^|[;&|({\s])eval\s", code), path
            # Nothing is expanded in single quotes, and arguments stay words.
            fixed = re.sub(r"\bbash -c '[^']*'", "", code)
            assert not re.search(r"\b(ba)?sh( --\w+)* -\w*c\b", fixed), path
        if path.endswith(".py") and not path.startswith("tests/"):
            for node in ast.walk(ast.parse(text)):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                assert called not in (
                    "eval",
                    "exec",
                    "os.system",
                    "os.popen",
                    "pickle.load",
                    "pickle.loads",
                ), path
                keywords = {x.arg: ast.unparse(x.value) for x in node.keywords} if called else {}
                assert keywords.get("shell", "False") == "False", path
                assert called != "torch.load" or keywords.get("weights_only") == "True", path


TRAIN = ["distributed/train_preemptible.py", "distributed/train_ddp.py", "local/train_single.py"]


@pytest.mark.parametrize("script", cells([(script,) for script in TRAIN], (TRAIN[0],)))
def test_a_checkpoint_from_a_stranger_runs_no_code(script, tiny, tmp_path):
    """It is refused; train_preemptible.py says so in a sentence."""
    name = "checkpoint_step_1.pt" if "preemptible" in script else "checkpoint_epoch_1.pt"
    make = "import torch, os, sys\nclass Evil:\n    def __reduce__(self):\n"
    make += "        return os.system, (f'touch {sys.argv[1]}/canary',)\n"
    make += "torch.save({'epoch': 1, 'model': Evil()}, sys.argv[1] + '/' + sys.argv[2])"
    assert run(sys.executable, "-c", make, tmp_path, name).returncode == 0
    control = f"import torch; torch.load('{tmp_path}/{name}', weights_only=False)"
    assert run(sys.executable, "-c", control).returncode == 0 and canaries(tmp_path) == ["canary"]
    (tmp_path / "canary").unlink()
    done = run(sys.executable, script, "--data-dir", tiny, "--resume", "--checkpoint-dir", tmp_path)
    assert done.returncode == 1 and canaries(tmp_path) == [], done.stdout + done.stderr
    if "preemptible" in script:
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert f"{name} is not damaged, but cannot be loaded: " in done.stderr, done.stderr
    else:
        assert "Weights only load failed" in done.stderr, done.stderr
