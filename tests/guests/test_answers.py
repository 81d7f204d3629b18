"""answers.py: a Hugging Face model over a list, on two ranks, one of which is killed."""

import json
import subprocess
import sys

import pytest

from conftest import REPOSITORY, environment, run, wait_for

pytestmark = pytest.mark.matrix

MAKE = """
import sys, tokenizers, transformers
bpe = tokenizers.ByteLevelBPETokenizer()
bpe.train_from_iterator(["a model over a long list"], vocab_size=300, special_tokens=["<end>"])
options = {"eos_token": "<end>", "pad_token": "<end>", "tokenizer_object": bpe._tokenizer}
transformers.PreTrainedTokenizerFast(**options).save_pretrained(sys.argv[1])
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
config = transformers.Qwen3Config(**sizes, **heads, eos_token_id=0, pad_token_id=0)
transformers.Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
"""


def test_answers(packages, tmp_path):
    made = run(sys.executable, "-c", MAKE, tmp_path / "model", env=environment(**packages))
    assert made.returncode == 0, made.stderr
    prompts = [f"prompt {number}" for number in range(200)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    folder = tmp_path / "answers"
    script = ["tests/guests/answers.py", tmp_path / "model", tmp_path / "prompts.txt", folder]
    command = [sys.executable, *map(str, script)]
    env = environment(**packages, LOCAL_RANK=0, OMP_NUM_THREADS=1)
    options = {"cwd": REPOSITORY, "env": env}
    killed, other = (subprocess.Popen(command, **options) for _ in range(2))
    wait_for(lambda: folder.is_dir() and list(folder.glob("*.jsonl")), 120)
    killed.kill()
    killed.wait()
    for begun in folder.glob(".*.begun"):
        begun.unlink()
    assert other.wait(timeout=120) == 0
    text = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
    answers = [json.loads(line) for line in text.splitlines()]
    assert len(answers) == 200
    pairs = zip(answers, prompts, strict=True)
    assert all(answer.startswith(prompt) for answer, prompt in pairs), answers[:3]
