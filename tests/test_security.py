"""SECURITY.md: no shell is given a string, no secret is told, what is downloaded runs no code."""

import ast
import json
import pickle
import re
from pathlib import Path

import torch

from copies import in_all_ways
from models import random_model
from slurm import LAUNCHERS, REPOSITORY, TRACKED, ranks

SECRET = "canary-3f1d9c"  # no part of any other text


NAME = """$(touch canary); `touch canary` '"x"""


def test_no_secret_is_told_and_no_name_runs(cluster, tmp_path):
    """By all launchers at once: neither log, script nor command line has a secret, and the job's
    name is a word."""
    secrets = {"SECRET_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    size = ["--nodes=1", "--gpus-per-node=1", "--ntasks-per-node=1", f"--job-name={NAME}"]
    command = ["tests/scripts/find_secret.py"]
    for way, job in in_all_ways(cluster, tmp_path, *command, size=size, env=secrets).items():
        assert job.state == "COMPLETED" and "LOOKED" in job.log, job.log
        assert job.log.startswith(f"{NAME}: 1 ranks on node-"), job.log
        assert SECRET not in job.log and "LEAK" not in job.log, job.log
        script = cluster.exec("scontrol", "write", "batch_script", job.id, "-").stdout
        assert script.strip() == (REPOSITORY / LAUNCHERS[way]).read_text().strip()
    assert not (REPOSITORY / "canary").exists()


RUNS_TEXT = ("eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads")


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
                assert called not in RUNS_TEXT, path
                keywords = {x.arg: ast.unparse(x.value) for x in node.keywords} if called else {}
                assert keywords.get("shell", "False") == "False", path
                assert called != "torch.load" or keywords.get("weights_only") == "True", path


class Evil:
    """A weight whose pickle makes a file."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def test_a_checkpoint_from_a_stranger_runs_no_code(tiny, tmp_path):
    """It is refused."""
    canary, path = tmp_path / "canary", tmp_path / "checkpoint.pt"
    torch.save({"epochs_done": 1, "model": Evil(canary)}, path)
    torch.load(path, weights_only=False)
    assert canary.exists(), "it would run code"
    canary.unlink()
    train = ["distributed/train_ddp.py", "--data-dir", tiny]
    done = ranks(0, *train, "--checkpoint-dir", tmp_path)
    assert done.returncode == 1 and not canary.exists(), done.stdout + done.stderr
    assert "Weights only load failed" in done.stderr, done.stderr


def test_a_config_from_a_stranger_sets_no_option(text, tmp_path):
    """With the folder to write to it would load the pickle there, or replace what is there."""
    qwen, canary = tmp_path / "qwen", tmp_path / "canary"
    random_model(qwen, num_hidden_layers=1)
    (qwen / "run/step_1").mkdir(parents=True)
    (qwen / "run/step_1/.metadata").write_bytes(pickle.dumps(Evil(canary)))
    config = json.loads((qwen / "config.json").read_text())
    options = {"checkpoint_dir": str(qwen / "run"), "resume": True, "steps": 0, "seed": None}
    (qwen / "config.json").write_text(json.dumps(config | options))
    before = sorted(qwen.rglob("*"))
    train = [REPOSITORY / "distributed/train_fsdp.py", "--init-from", qwen, "--data-dir", text]
    train += ["--context", 16, "--batch-size", 4, "--steps", 1, "--device", "cpu"]
    done = ranks(0, *train, cwd=tmp_path, RUN="mine")
    assert not canary.exists() and sorted(qwen.rglob("*")) == before, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step=1/1" in done.stdout and "checkpoint in checkpoints/mine" in done.stdout


def test_each_row_has_its_tests():
    """What is read from outside, what it can do, and tests of today."""
    page = (REPOSITORY / ".github/SECURITY.md").read_text()
    table = page.split("|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(table) > 10 and page.count("|---|---|---|\n") == 1
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").glob("test_*.py"))
    for row in table:
        named = row.split("|")[3].replace("`", "").split(",")
        for name in named:
            assert re.search(rf"^def {name.strip()}\(", tests, re.M), f"no test of that name: {row}"
