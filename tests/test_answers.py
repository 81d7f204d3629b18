"""examples/answers.py: the page's list of prompts on the cluster, a checkpoint, and a Hugging Face
model on two ranks, one of which is killed. And lm_eval."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import work_list
from models import python
from pages import bash, steps
from slurm import (
    LAUNCHERS,
    NAMESPACES,
    REPOSITORY,
    environment,
    one_rank_a_node,
    ranks,
    run,
    wait_for,
)

PAGE = REPOSITORY / "docs/other_jobs.md"


def answers(folder: Path) -> list[dict[str, str]]:
    """`cat *.jsonl`."""
    lines = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module")
def small(text, tmp_path_factory) -> Path:
    """A checkpoint of a model whose tokens are characters."""
    folder = tmp_path_factory.mktemp("small")
    train = ["distributed/train_fsdp.py", "--data-dir", text, "--steps", 1, "--device", "cpu"]
    done = ranks(0, *train, "--num-hidden-layers", 1, "--checkpoint-dir", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "step_1"


def answer(checkpoint: Path, folder: Path, *options: object, **variables):
    (folder / "prompts").write_text("".join(f"The {letter}\n" for letter in "abcdefghij"))
    command = ["examples/answers.py", checkpoint, folder / "prompts", folder / "answers"]
    command += ["--checkpoint", "--length", 40, "--part", 2]
    return ranks(0, *command, *options, **variables)


@pytest.mark.long
def test_answers_end(small, tmp_path):
    """They begin behind the prompt, and end before the token that ends a text."""
    ends = shutil.copytree(small, tmp_path / "step_1") / "about.json"
    about, found = json.loads(ends.read_text()), []
    for folder in (tmp_path / "endless", tmp_path / "words"):
        folder.mkdir()
        done = answer(ends.parent, folder)
        assert done.returncode == 0, done.stderr
        assert f"10 answers of {ends.parent}\n" in done.stdout
        found.append([line["answer"] for line in answers(folder / "answers")])
        about["config"]["eos_token_id"] = [about["tokenizer"]["characters"].index(" ")]
        ends.write_text(json.dumps(about))
    endless, words = found
    assert [len(text) for text in endless] == [40] * 10
    assert words == [text.split(" ")[0] for text in endless] != endless


@pytest.mark.long
def test_another_checkpoint(small, tmp_path):
    """Does not go on with a list; and a run is no checkpoint, because it may get newer ones."""
    assert answer(small, tmp_path).returncode == 0
    before = answers(tmp_path / "answers")
    (tmp_path / "answers/000000004.jsonl").unlink()
    newer = shutil.copytree(small, tmp_path / "run/step_2")
    for checkpoint, options, said in (
        (newer, [], f"its model is {small}, 40 tokens, not {newer}, 40 tokens."),
        (small, ["--length", 9], f"its model is {small}, 40 tokens, not {small}, 9 tokens."),
        (newer.parent, [], f"{newer.parent} is no checkpoint. In this folder are: step_2\n"),
    ):
        done = answer(checkpoint, tmp_path, *options)
        assert done.returncode == 1 and said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and len(answers(tmp_path / "answers")) == 8
    assert answer(small, tmp_path).returncode == 0
    assert answers(tmp_path / "answers") == before


@pytest.mark.long
def test_prompts_that_kill(small, tmp_path):
    """Are named in a sentence, when all others have answers."""
    (tmp_path / "answers").mkdir()
    for number in (1, 2, 3):
        begun = work_list.begun_file(tmp_path / "answers", 4, number)
        begun.touch()
        os.utime(begun, (0, 0))
    done = answer(small, tmp_path)
    assert done.returncode == 1 and len(answers(tmp_path / "answers")) == 8
    assert done.stderr.startswith(f"{tmp_path}/answers has no answers to the items 4 to 5 (the fi")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_prompts_without_an_answer(small, tmp_path):
    """A character that the model does not know is said in its line, and an empty line is none."""
    (tmp_path / "prompts").write_text("The a\n\n \nThe \u00e9\n")
    command = ["examples/answers.py", small, tmp_path / "prompts", tmp_path / "answers"]
    done = ranks(0, *command, "--checkpoint", "--length", 5)
    assert done.returncode == 0, done.stderr
    known, unknown = answers(tmp_path / "answers")
    assert known.keys() == {"prompt", "answer"} and len(known["answer"]) == 5
    assert unknown["prompt"] == "The \u00e9" and unknown["error"].startswith(
        "['\u00e9'] are not among"
    )


@pytest.mark.long
def test_granted_gpus_that_torch_does_not_see(small, tmp_path):
    done = answer(small, tmp_path, SLURM_GPUS_ON_NODE=2)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith("Slurm granted GPUs, but torch sees none"), done.stderr
    assert answer(small, tmp_path, "--device", "cpu", SLURM_GPUS_ON_NODE=2).returncode == 0


@pytest.fixture
def model(clone, tmp_path) -> Path:
    """A checkpoint in the place of the page's, with a token for each byte."""
    prepare = [sys.executable, "aux/prepare_data.py", "text", "--tokenizer", "bytes"]
    prepare += ["--input", *sorted(clone.glob("docs/*.md")), "--data-dir", tmp_path / "data"]
    assert run(*prepare, cwd=clone).returncode == 0
    train = ["distributed/train_fsdp.py", "--data-dir", tmp_path / "data", "--steps", 2]
    train += ["--checkpoint-dir", clone / "checkpoints/text", "--device", "cpu"]
    done = ranks(0, *train, cwd=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    return (clone / "checkpoints/text/step_2").rename(clone / "checkpoints/text/step_100")


@pytest.mark.matrix
def test_prompts_on_the_cluster(clone, model, cluster, tmp_path):
    """The page's block, by torchrun. Then the list twice in one, by srun: stopped, requeued and
    continued. Every answer is there once, in the order of the list."""
    [block] = [text for language, text, _ in steps(PAGE) if "--checkpoint" in text]
    counted = bash(block, clone, (NAMESPACES, "exec"), **cluster.environment)
    prompts = (clone / "prompts.txt").read_text().splitlines()
    numbers = re.findall(r"^ *(\d+) (?:prompts.txt|answers.jsonl)$", counted, re.M)
    assert numbers == [str(len(prompts))] * 2, counted
    expected = [json.loads(line) for line in (clone / "answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in expected] == prompts
    assert all(len(answer["answer"]) > 10 for answer in expected)

    (tmp_path / "prompts").write_text("\n".join(prompts + prompts) + "\n")
    folder = tmp_path / "answers"
    command = [f"--output={tmp_path}/log", f"--chdir={clone}", *one_rank_a_node("srun")]
    command += [LAUNCHERS["srun"], "examples/answers.py", model, tmp_path / "prompts", folder]
    options = ["--checkpoint", "--part", 1, "--length", 20]
    number = cluster.submit(*command, *options, cwd=clone)
    wait_for(lambda: len(answers(folder)) > 10, 120)
    cluster.exec("scancel", "--signal=TERM", number)
    wait_for(lambda: cluster.show(number)["Restarts"] == "1", 60)
    assert len(answers(folder)) < len(prompts) * 2, "there is something to continue"
    for begun in folder.glob(".*.begun"):
        begun.unlink()
    cluster.start_again(number, 60)
    job = cluster.wait(number, timeout=240)
    assert job.state == "COMPLETED", job
    assert job.log.count("Requeued: it resumes by itself") == 1
    found = answers(folder)
    assert found[: len(prompts)] == expected
    assert [answer["prompt"] for answer in found] == prompts + prompts


@pytest.mark.matrix
def test_a_model_from_the_hub(packages, qwen, tmp_path):
    """By the chat template, and without it in front of them, and with a tokenizer that has no
    token for padding. One process is asked to stop, and one is killed."""
    qwen = shutil.copytree(qwen, tmp_path / "model")
    for path in qwen.glob("*token*.json"):
        if "pad_token" in (config := json.loads(path.read_text())):
            path.write_text(json.dumps({key: config[key] for key in config if key != "pad_token"}))
    prompts = [f"prompt {number}" for number in range(200)]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts) + "\n")
    folder = tmp_path / "answers"
    command = [sys.executable, "examples/answers.py", qwen, tmp_path / "prompts.txt", folder]
    command += ["--part", "10"]
    env = environment(**packages, OMP_NUM_THREADS=1)

    def start():
        return subprocess.Popen(command, cwd=REPOSITORY, env=env)

    stopped = start()
    wait_for(lambda: answers(folder), 120)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(timeout=60) == 0
    assert len(answers(folder)) < 200 and not list(folder.glob(".*.begun"))
    before = len(answers(folder))
    killed, other = start(), start()
    wait_for(lambda: len(answers(folder)) > before, 120)
    killed.kill()
    killed.wait()
    for begun in folder.glob(".*.begun"):
        begun.unlink()
    assert other.wait(timeout=120) == 0
    found = answers(folder)
    assert [line["prompt"] for line in found] == prompts
    expected = json.loads(python(packages, "tests/scripts/one_answer.py", qwen).splitlines()[-1])
    assert found[7]["answer"] == expected


@pytest.mark.long
@pytest.mark.matrix
def test_a_folder_that_is_not_from_the_hub(packages, small, tmp_path):
    """A checkpoint is read only if the reader says that it is one: its index is a pickle."""
    done = ranks(0, "examples/answers.py", small, "README.md", tmp_path, **packages)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    said = "no model from the hub (one of train_fsdp.py needs --checkpoint): "
    assert said in done.stderr, done.stderr


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


@pytest.mark.matrix
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
