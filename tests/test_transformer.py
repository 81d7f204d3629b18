"""The model beside Hugging Face's: the same numbers from the same folders, and a fine-tuned one
that transformers reads, chat template and all."""

import json
import re
import shutil
import sys

import pytest

from models import python
from slurm import environment, run

pytestmark = pytest.mark.matrix

FLAGS = "--batch-size 8 --context 128 --learning-rate 0.003 --warmup-steps 5 --log-every 10"
FLAGS += " --eval-windows 8 --device cpu --weight-decay 0"


# Into a folder in several files, into ours, and out again. Norms of a fresh model are 1, which a
# mistake would survive.
COMPARE = """
import json, sys
from pathlib import Path
sys.path.insert(0, "distributed")
import torch, hugging_face
from transformer import Transformer
from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig,
    MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM)
sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3)
sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
scaled = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0)
scaled |= dict(high_freq_factor=4.0, original_max_position_embeddings=64)
families = {
    "qwen3 tied": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, rope_theta=1e6)),
    "llama 3.1": LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=scaled)),
    "llama 2": LlamaForCausalLM(LlamaConfig(**sizes | {"num_key_value_heads": 4})),
    "mistral": MistralForCausalLM(MistralConfig(**sizes, sliding_window=None)),
}
torch.manual_seed(0)
hugging_face.FILE_SIZE = 100_000
def far(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()
def compare(theirs, folder):
    for weight in theirs.parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.2)
    theirs.save_pretrained(folder / "in", max_shard_size="200KB")
    ours = Transformer(hugging_face.read_config(folder / "in"))
    ours.load_weights(hugging_face.open_weights(folder / "in", ours).__getitem__)
    found = {"files": len(list((folder / "in").glob("*.safetensors")))}
    mine = dict(ours.named_parameters())
    hugging_face.write(folder / "out", ours, mine.__getitem__)
    again, said = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    found["said"] = [*said["missing_keys"], *said["unexpected_keys"]]
    tokens, wanted = torch.randint(300, (2, 2, 200))
    logits = [model(tokens).logits for model in (theirs, again)] + [ours(tokens)]
    found["again"], found["logits"] = torch.equal(*logits[:2]), far(logits[0], logits[2])
    pairs = [(weight, mine[name]) for name, weight in theirs.named_parameters()]
    for its in (logits[0], logits[2]):
        torch.nn.functional.cross_entropy(its.flatten(0, 1), wanted.flatten()).backward()
    found["gradients"] = max(far(a.grad, b.grad) for a, b in pairs)
    for model in (theirs, ours):
        # Without eps Adam would step as far for rounding noise as for a large gradient.
        torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3).step()
    found["step"] = max(far(a.detach(), b.detach()) for a, b in pairs)
    prompt = tokens[:1, :20]
    options = dict(do_sample=False, max_new_tokens=60, attention_mask=torch.ones_like(prompt))
    text = theirs.generate(prompt, **options, eos_token_id=999)
    found["text"] = torch.equal(text, ours.generate(prompt, 60, 300, temperature=0))
    return found
print(json.dumps({name: compare(x, Path(sys.argv[1], name)) for name, x in families.items()}))
"""


def test_equal_to_transformers(packages, tmp_path):
    """The logits of a folder that was in and out again bit for bit, all else nearly."""
    families = json.loads(python(packages, "-c", COMPARE, tmp_path).splitlines()[-1])
    assert len(families) == 5
    for name, found in families.items():
        assert found["files"] > 3 and found["said"] == [], name
        assert found["logits"] < 1e-5 and found["gradients"] < 3e-5 and found["step"] < 1e-5, found
        assert found["again"] and found["text"], name


# The loss over all windows of val.bin, what counts in them, and an answer to a question
CHAT = """
import sys; sys.path.insert(0, "distributed")
import torch, token_files
from transformers import AutoModelForCausalLM, AutoTokenizer
known = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
text = token_files.TokenDataset(sys.argv[2], 128, 1)
[(inputs, targets)] = text.eval_batches(8, 8, 0, 1)
with torch.no_grad():
    logits = model(inputs).logits
print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
print(repr(known.decode(targets[targets >= 0])))
question = [{"role": "user", "content": "What is 7?"}]
prompt = known.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt",
    return_dict=True)
written = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
print(repr(known.decode(written[prompt["input_ids"].size(1) :])))
"""
ANSWER = "<think></think>It is a number.<|im_end|>\n"


def test_fine_tuned_on_conversations(packages, qwen, tmp_path):
    """Only answers are learnt, each as the chat template shows it when it is the last."""
    lines = []
    for number in range(500):
        messages = []
        for digit in (number * 7 // 10 % 10, number // 3 % 10):
            messages += [{"role": "user", "content": f"What is {digit}?"}]
            messages += [{"role": "assistant", "content": "It is a number."}]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    command = ["aux/prepare_data.py", "chat", "--input", tmp_path / "chats.jsonl", "--context", 128]
    command += ["--tokenizer", qwen, "--data-dir", tmp_path / "data"]
    assert "259 different ones: chats.jsonl" in python(packages, *command)

    loss, learnt, _ = python(packages, "-c", CHAT, qwen, tmp_path / "data").splitlines()
    assert eval(learnt).startswith(2 * ANSWER) and not eval(learnt).replace(ANSWER, "")
    flags = [*FLAGS.split(), "--data-dir", tmp_path / "data", "--steps", 80]
    flags += ["--init-from", qwen, "--checkpoint-dir", tmp_path / "run"]
    log = python(packages, "distributed/train_fsdp.py", *flags, ranks=2)
    first, last = map(float, re.findall(r"^step=\d+/\d+ val_loss=(\S+)$", log, re.M))
    assert first == pytest.approx(float(loss), abs=2e-5)
    tuned = tmp_path / "run/model"
    loss, _, answer = python(packages, "-c", CHAT, tuned, tmp_path / "data").splitlines()
    # Its weights are rounded to bfloat16, as they were.
    assert last == pytest.approx(float(loss), rel=0.1) and last < 0.1
    assert eval(answer).startswith(ANSWER.removesuffix("\n")), answer


def test_a_hugging_face_tokenizer(packages, qwen, tmp_path):
    """sample.py needs it, and says so."""
    (tmp_path / "input.txt").write_text(
        "".join(f"{i} is less than {i + 1}.\n" for i in range(2000))
    )
    file, data = qwen / "tokenizer.json", ["--data-dir", tmp_path / "data"]
    command = ["aux/prepare_data.py", "text", *data, "--input", tmp_path / "input.txt"]
    python(packages, *command, "--tokenizer", file)
    flags = [*FLAGS.split(), *data, "--steps", 3, "--checkpoint-dir", tmp_path / "run"]
    python(packages, "distributed/train_fsdp.py", *flags)
    sample = ["aux/sample.py", tmp_path / "run"]
    more = ["--prompt", "To be", "--length", 3, "--tokenizer", file]
    assert "To be" in python(packages, *sample, *more)
    done = run(sys.executable, *sample, env=environment(**packages))
    assert done.returncode == 1 and "--tokenizer FILE" in done.stderr


EVIL = """
from pathlib import Path
Path({canary!r}).touch()
from transformers import PreTrainedTokenizerFast as Evil
"""
ESCAPE = "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}"


def test_a_downloaded_model_runs_no_code(packages, qwen, tmp_path):
    """Neither a class that it brings, nor a chat template that leaves its sandbox."""
    chat = {"role": "user", "content": "?"}, {"role": "assistant", "content": "No."}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 10)
    command = ["aux/prepare_data.py", "chat", "--input", tmp_path / "chats.jsonl", "--context", 64]
    command += ["--data-dir", tmp_path / "data"]
    model, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(qwen, model)
    (model / "evil.py").write_text(EVIL.format(canary=str(canary)))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    load = "import sys, transformers; transformers.AutoTokenizer.from_pretrained(sys.argv[1], "
    home = packages | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    python(home, "-c", load + "trust_remote_code=True)", model)
    assert canary.exists(), "it would run code"
    canary.unlink()
    # transformers takes a class of its own.
    python(home, *command, "--tokenizer", model)
    assert not canary.exists()
    (model / "tokenizer.json").write_text("{}")
    done = run(sys.executable, *command, "--tokenizer", model, env=environment(**home))
    assert f"{model} has no tokenizer that transformers can read: " in done.stderr, done.stderr
    assert done.returncode == 1 and not canary.exists()

    shutil.rmtree(model)
    shutil.copytree(qwen, model)
    (model / "chat_template.jinja").write_text(ESCAPE.replace("CANARY", str(canary)))
    done = run(sys.executable, *command, "--tokenizer", model, env=environment(**home))
    assert "line 1 of chats.jsonl is no conversation: " in done.stderr, done.stderr
    assert done.returncode == 1 and not canary.exists()
