"""A Hugging Face model over a list, on two ranks, one of which is killed; and lm_eval."""

import json
import re
import subprocess
import sys

import pytest

from models import python
from slurm import REPOSITORY, environment, ranks, wait_for

pytestmark = pytest.mark.matrix


# What the model of argv's folder answers by its template, without a work list
ANSWER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
known = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
question = [{"role": "user", "content": "prompt 7"}]
inputs = known.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt",
    return_dict=True)
written = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].size(1) :]
print(json.dumps(known.decode(written, skip_special_tokens=True)))
"""


def test_answers(packages, qwen, tmp_path):
    """By the chat template, and without it in front of them."""
    prompts = [f"prompt {number}" for number in range(200)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    folder = tmp_path / "answers"
    command = [sys.executable, "examples/answers.py", qwen, tmp_path / "prompts.txt", folder]
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
    assert len(answers) == len(prompts)
    assert answers[7] == json.loads(python(packages, "-c", ANSWER, qwen).splitlines()[-1])


def test_granted_gpus_that_torch_does_not_see(packages, qwen, tmp_path):
    command = ["examples/answers.py", qwen, "/nowhere", tmp_path]
    done = ranks(0, *command, SLURM_GPUS_ON_NODE=2, **packages)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("Slurm granted GPUs, but torch sees none"), done.stderr


TASK = """task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/sums.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: ["2", "3", "4"]
metric_list:
  - metric: acc
"""


def test_lm_eval(packages, qwen, cluster, tmp_path):
    """The page's command runs, on two ranks as on one, and prints one table. On CPUs each rank asks
    all questions, so how they are divided on GPUs is not seen here."""
    questions = [{"question": f"{number} of", "answer": number % 3} for number in range(50)]
    lines = "".join(f"{json.dumps(question)}\n" for question in questions)
    (tmp_path / "sums.jsonl").write_text(lines)
    (tmp_path / "sums.yaml").write_text(TASK.format(folder=tmp_path))
    page = (REPOSITORY / "docs/other_jobs.md").read_text()
    [command] = re.findall(r"^sbatch (.* -m lm_eval .*\\\n.*) results$", page, re.M)
    task = f"sums --include_path {tmp_path}"
    for old, new in (("\\\n", ""), ("MODEL", str(qwen)), ("hellaswag", task)):
        command = command.replace(old, new)
    found = []
    for gpus in (2, 1):
        options = [f"--output={tmp_path}/%j", f"--gpus-per-node={gpus}", *command.split()]
        env = packages | {"HF_HOME": tmp_path}
        ended = cluster.sbatch(*options, tmp_path / "results", env=env, timeout=300)
        assert ended.state == "COMPLETED", ended.log
        found.append(re.findall(r"^\|sums .*\|acc .*\| +(0\.\d+)\|±", ended.log, re.M))
    assert len(found[0]) == 1 and found[0] == found[1], found
