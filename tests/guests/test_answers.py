"""answers.py: a Hugging Face model over a list, on two ranks, one of which is killed."""

import json
import subprocess
import sys

import pytest
from test_transformers import qwen  # noqa: F401  a fixture

from conftest import REPOSITORY, environment, wait_for

pytestmark = pytest.mark.matrix


def test_answers(packages, qwen, tmp_path):  # noqa: F811
    prompts = [f"prompt {number}" for number in range(200)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    folder = tmp_path / "answers"
    command = [sys.executable, "tests/guests/answers.py", qwen, tmp_path / "prompts.txt", folder]
    env = environment(**packages, LOCAL_RANK=0, OMP_NUM_THREADS=1)
    killed, other = (subprocess.Popen(command, cwd=REPOSITORY, env=env) for _ in range(2))
    wait_for(lambda: folder.is_dir() and list(folder.glob("*.jsonl")), 120)
    killed.kill()
    killed.wait()
    for begun in folder.glob(".*.begun"):
        begun.unlink()
    assert other.wait(timeout=120) == 0
    text = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
    answers = [json.loads(line) for line in text.splitlines()]
    pairs = zip(answers, prompts, strict=True)
    assert all(answer.startswith(prompt) for answer, prompt in pairs), answers[:3]
