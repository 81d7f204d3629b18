"""hugging_face.py: folders in, out and in again, without Hugging Face's packages and with them.
test_transformer.py compares the numbers."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import hugging_face
from models import FLAGS, TP, python, random_model, values
from slurm import environment, ranks, run
from transformer import Transformer


def read(folder: Path) -> Transformer:
    model = Transformer(hugging_face.read_config(folder))
    model.load_weights(hugging_face.open_weights(folder, model).__getitem__)
    return model


MIXTURE = {"model_type": "qwen3_moe", "norm_topk_prob": True, "output_router_logits": True}
MIXTURE |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTURE |= {"router_aux_loss_coef": 0.01}


def test_experts_out_and_in_again(tmp_path, monkeypatch):
    """The files have them one by one, and the model stacks them. In 2025 transformers wrote another
    name for how many there are."""
    monkeypatch.setattr(hugging_face, "FILE_SIZE", 300_000)
    model = random_model(tmp_path / "out", **MIXTURE)
    again, weights = read(tmp_path / "out"), dict(model.named_parameters())
    assert all(torch.equal(weights[name], x) for name, x in again.named_parameters())
    file_of = json.loads((tmp_path / "out" / hugging_face.INDEX).read_text())["weight_map"]
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    found = hugging_face.open_file(tmp_path / "out" / file_of[name])[name]
    assert torch.equal(found, weights["model.layers.1.mlp.experts.gate_up_proj"][5, 64:])
    config = json.loads((tmp_path / "out/config.json").read_text())
    config["num_local_experts"] = config.pop("num_experts")
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert read(tmp_path / "out").config["num_experts"] == 6


def test_a_stack_is_narrowed_as_a_tensor_is():
    """Also to nothing, for a rank that has no expert."""
    parts = [torch.randn(3, 5) for _ in range(8)]
    stack, whole = hugging_face.Stack(parts, 4), torch.cat(parts).view(4, 6, 5)
    for first in range(5):
        for size in range(5 - first):
            assert torch.equal(stack.narrow(0, first, size), whole.narrow(0, first, size))


REFUSED_EXPERTS = [
    ({"num_experts": 0}, "its num_experts is 0, and no model has that"),
    ({"num_experts_per_tok": 7}, "its num_experts_per_tok is more than its num_experts"),
    ({"moe_intermediate_size": None}, "its config.json has no moe_intermediate_size"),
    ({"norm_topk_prob": 1}, "its norm_topk_prob is 1"),
    ({"router_aux_loss_coef": "1"}, "its router_aux_loss_coef is 1, and no model has that"),
    ({"decoder_sparse_step": 2}, "transformer.py knows no decoder_sparse_step 2, only 1"),
    ({"mlp_only_layers": [0]}, "transformer.py knows no mlp_only_layers [0], only []"),
    ({"num_experts": 5}, "experts.5.down_proj.weight is (128, 64), not none"),
    ({"num_experts": 7}, "experts.6.down_proj.weight is none, not (128, 64)"),
    ({"moe_intermediate_size": 32}, "experts.0.down_proj.weight is (128, 64), not (128, 32)"),
    ({"model_type": "qwen3"}, "transformer.py knows no num_experts 6, only 0"),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED_EXPERTS)
def test_other_experts_are_a_sentence(changed, sentence, tmp_path):
    random_model(tmp_path / "model", **MIXTURE)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | changed))
    with pytest.raises(SystemExit) as ended:
        read(tmp_path / "model")
    assert sentence in ended.value.code


@pytest.mark.parametrize("files", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_out_and_in_again(files, dtype, tmp_path, monkeypatch):
    """In one file or several, whose names the index says, among others that are none of it; with
    the tokenizer that lies in another folder; and the second time in the place of the first."""
    size = {"float32": 2_070_016 // 4, "bfloat16": 1_035_008 // 4}[dtype]
    monkeypatch.setattr(hugging_face, "FILE_SIZE", size if files > 1 else 1 << 30)
    model = random_model(tmp_path / "out", torch_dtype=dtype)
    other = tmp_path / "other"
    other.mkdir()
    copied = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "generation_config.json"}
    copied |= {"tokenizer.model", "chat_template.jinja"}
    for name in (*copied, "config.json", "a.bin", "hf_token.txt", "tokenizer_class.py"):
        (other / name).write_text("theirs")
    (other / "tokenizers").mkdir()
    weights = dict(model.named_parameters())
    hugging_face.write(tmp_path / "out", model, weights.__getitem__, other)
    (tmp_path / "out/consolidated.safetensors").write_text("not read")
    found = {path.name for path in (tmp_path / "out").iterdir()} - {"consolidated.safetensors"}
    numbered = {f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)}
    names = numbered if files > 1 else {"model.safetensors"}
    assert {name for name in found if name.endswith(".safetensors")} == names
    assert copied < found and len(found) == files + 7 + (files > 1)
    again = read(tmp_path / "out")
    assert again.config == hugging_face.read_config(tmp_path / "out") and len(weights) == 25
    assert all(torch.equal(weights[name], x) for name, x in again.named_parameters())
    assert not list(tmp_path.glob(".*"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
REFUSED = [
    ({"model_type": "qwen2"}, "transformer.py knows no model_type qwen2, only qwen3"),
    ({"attention_bias": True}, "knows no attention_bias True"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "knows no use_sliding_window True"),
    ({"model_type": "mistral", "sliding_window": 4096}, "knows no sliding_window 4096"),
    ({"num_experts": 128}, "knows no num_experts 128"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "knows no rope_type yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "knows no rope_type linear"),
    ({"quantization_config": {"quant_method": "fp8"}}, "knows no quantization_config"),
    ({"torch_dtype": "auto"}, "knows no torch_dtype auto, only float32"),
    ({"hidden_act": "gelu"}, "knows no hidden_act gelu, only silu"),
    ({"rms_norm_eps": None}, "its config.json has no rms_norm_eps"),
    ({"model_type": "\x1b]52;c;AAAA\x07"}, "knows no model_type ?]52;c;AAAA?,"),
    ({"rope_parameters": [8]}, "its rope_parameters are [8]"),
    ({"rope_parameters": {"rope_theta": 0}}, "its rope_theta is 0, and no model has that"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "knows no partial_rotary_factor 0.5"),
    ({"rope_scaling": LLAMA3 | {"factor": None}}, "its config.json has no factor"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "is not below its high_freq_factor"),
    ({"rope_scaling": LLAMA3}, None),
    ({"rope_theta": "1e6"}, "its rope_theta is 1e6, and no model has that"),
    ({"mlp_bias": True}, "knows no mlp_bias True, only False"),
    ({"partial_rotary_factor": 0.5}, "knows no partial_rotary_factor 0.5, only 1.0"),
    ({"attn_logit_softcapping": 50.0}, "knows no attn_logit_softcapping 50.0, only None"),
    ({"query_pre_attn_scalar": 256}, "knows no query_pre_attn_scalar 256, only None"),
    ({"dtype": "float64"}, "knows no dtype float64, only float32"),
    ({"model_type": "mistral", "attention_bias": None, "partial_rotary_factor": 1.0}, "k_norm"),
    ({"dtype": "float16", "use_sliding_window": None, "mlp_bias": False}, None),
    ({"rms_norm_eps": math.nan}, "its rms_norm_eps is nan"),
    ({"num_attention_heads": 0}, "its num_attention_heads is 0"),
    ({"num_attention_heads": 3}, "its num_attention_heads must be a multiple of "),
    ({"num_key_value_heads": -2}, "its num_key_value_heads is -2"),
    ({"head_dim": 33}, "and its head_dim even"),
    ({"hidden_size": [128]}, "its hidden_size is [128]"),
    ({"vocab_size": "256"}, "its vocab_size is 256, and"),
    ({"vocab_size": True}, "its vocab_size is True"),
    ({"intermediate_size": 1 << 62}, "its intermediate_size is 4611686018427387904"),
    ({"max_position_embeddings": 64.5}, "its max_position_embeddings is 64.5"),
    ({"tie_word_embeddings": "no"}, "its tie_word_embeddings is no"),
    ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is none, not (128,)"),
    ({"num_hidden_layers": 1}, "layers.1.input_layernorm.weight is (128,), not none"),
    ({"intermediate_size": 380}, "mlp.down_proj.weight is (128, 384), not (128, 380)"),
    ({"tie_word_embeddings": True}, None),  # a head in the file that is not used
    ({"use_sliding_window": False, "sliding_window": 4096}, None),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED)
def test_another_model_is_a_sentence(changed, sentence, tmp_path):
    random_model(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | changed))
    if sentence is None:
        read(tmp_path / "model")
        return
    with pytest.raises(SystemExit) as ended:
        read(tmp_path / "model")
    assert sentence in ended.value.code and ended.value.code.startswith(str(tmp_path / "model"))


@pytest.mark.parametrize("text", ["5", "[]", "[" * 100_000, '{"a":' * 100_000, "\xff", "{"])
def test_a_config_that_is_none_is_a_sentence(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(SystemExit, match="is no Qwen3 or Llama to start from: "):
        hugging_face.read_config(tmp_path)


def test_null_is_the_default(tmp_path):
    """As many pairs of keys and values as heads, which share the channels out."""
    model = random_model(tmp_path / "model", num_key_value_heads=4)
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"))
    config = json.loads((tmp_path / "model/config.json").read_text()) | nulls
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    assert read(tmp_path / "model").config == model.config


DAMAGED = {
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"more",
    "away": None,
    "empty": lambda content: b"",
    "pointer": lambda content: b"version https://git-lfs.github.com/spec/v1\n",
    "header is a number": lambda content: b"\1\0\0\0\0\0\0\0" + b"5",
    "header is deep": lambda content: b"\0\0\1\0\0\0\0\0" + b"[" * 0x10000,
}
SENTENCES = {"cut": "is cut short", "longer": "is longer than its header says", "away": "No such"}
SENTENCES |= {"empty": "is no safetensors file", "pointer": "but perhaps git-lfs's pointer"}
SENTENCES |= {"header is a number": "is no object", "header is deep": "is too deep"}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_folder_is_a_sentence(damage, tmp_path):
    random_model(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage != "away":
        path.write_bytes(DAMAGED[damage](content))
    with pytest.raises(SystemExit, match=f"model cannot be read: .*{SENTENCES[damage]}"):
        read(tmp_path / "model")


# Of the entry of q_norm in the second layer, 32 numbers in float32, and what is said of it.
HEADERS = [
    (lambda begin, end: {"data_offsets": [-1000, -872]}, "at [-1000, -872], and its shape and"),
    (lambda begin, end: {"data_offsets": [begin - 128, begin]}, "and its shape and dtype need"),
    (lambda begin, end: {"data_offsets": [begin, end - 4]}, "and its shape and dtype need"),
    (lambda begin, end: {"data_offsets": [1 << 70, 2 << 70]}, "and its shape and dtype need"),
    (lambda begin, end: {"data_offsets": "all"}, "TypeError: "),
    (lambda begin, end: {"dtype": "BF16"}, "and its shape and dtype need"),
    (lambda begin, end: {"dtype": "F8_E4M3"}, "q_norm.weight in F8_E4M3, not in ['F32', "),
    (lambda begin, end: {"dtype": ["F32"]}, "TypeError: "),
    (lambda begin, end: {"shape": [-4, -8]}, "of shape [-4, -8]"),
    (lambda begin, end: {"shape": [32.0]}, "of shape [32.0]"),
    (lambda begin, end: {"shape": [1 << 40, "ab"]}, "of shape [1099511627776, 'ab']"),
    (lambda begin, end: {"shape": [4, 8]}, "q_norm.weight is (4, 8), not (32,)"),
]


@pytest.mark.parametrize(("change", "sentence"), HEADERS)
def test_a_header_is_compared_with_the_file(change, sentence, tmp_path):
    """And wrong numbers are never read."""
    random_model(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    entry = header["model.layers.1.self_attn.q_norm.weight"]
    entry |= change(*entry["data_offsets"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[length:])
    with pytest.raises(SystemExit) as ended:
        read(tmp_path / "model")
    assert sentence in ended.value.code and len(ended.value.code) < 600


@pytest.mark.parametrize("name", ["tokenizer_extra.json", "config.json", "model.safetensors"])
def test_a_link_to_a_file_of_mine_is_not_followed(name, tmp_path):
    """A folder that git or tar brings may have links, and a run publishes what they lead to."""
    model = random_model(tmp_path / "model")
    secret, link = tmp_path / "secret", tmp_path / "model" / name
    secret.write_bytes(link.read_bytes() if link.exists() else b"mine")
    link.unlink(missing_ok=True)
    link.symlink_to("../secret")
    with pytest.raises(SystemExit, match=f"the link {name} leads out of it: put a copy in its "):
        read(tmp_path / "model")
    if name == "tokenizer_extra.json":
        weights = dict(model.named_parameters()).__getitem__
        with pytest.raises(ValueError, match=f"the link {name} leads out of it"):
            hugging_face.write(tmp_path / "out", model, weights, tmp_path / "model")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["../secret/model.safetensors", "{}/secret/model.safetensors"])
def test_an_index_leads_to_no_other_folder(place, tmp_path):
    random_model(tmp_path / "secret")
    shutil.copytree(tmp_path / "secret", tmp_path / "model")
    index = {"weight_map": {"lm_head.weight": place.format(tmp_path)}}
    (tmp_path / "model" / hugging_face.INDEX).write_text(json.dumps(index))
    with pytest.raises(SystemExit, match=r"the link model.safetensors leads out of it"):
        read(tmp_path / "model")


def test_hugging_face_s_cache(tmp_path):
    """Its snapshots are links to its blobs, and the folder may be reached by a link, too."""
    hub = tmp_path / "hub/models--a--b"
    model = random_model(hub / "snapshots/123", rms_norm_eps=1e-5)
    (hub / "snapshots/123/tokenizer.json").write_text("{}")
    (hub / "blobs").mkdir()
    for number, path in enumerate(sorted((hub / "snapshots/123").iterdir())):
        path.rename(hub / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    (tmp_path / "qwen").symlink_to(hub / "snapshots/123")
    weights = dict(model.named_parameters())
    for folder in (hub / "snapshots/123", tmp_path / "qwen"):
        assert all(torch.equal(weights[name], x) for name, x in read(folder).named_parameters())
        hugging_face.write(tmp_path / "out", model, weights.__getitem__, folder)
        copy = tmp_path / "out/tokenizer.json"
        assert copy.read_text() == "{}" and not copy.is_symlink()


PARTS = [("fsdp", 2, {}), ("tensor", 2, {}), ("both", 4, {})]
PARTS += [("fsdp", 2, MIXTURE | {"moe_intermediate_size": 1024})]


@pytest.mark.parametrize(("how", "count", "experts"), PARTS)
def test_a_rank_reads_its_part_only(how, count, experts, tmp_path, monkeypatch):
    """And never has the memory for a whole copy."""
    monkeypatch.setattr(hugging_face, "FILE_SIZE", 20 << 20)
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 5}
    random_model(tmp_path / "model", **sizes, **experts, torch_dtype="bfloat16")
    done = ranks(count, "tests/scripts/read_rows.py", tmp_path / "model", how)
    assert done.returncode == 0, done.stderr


TUNED = [("train_fsdp.py", 2), (f"{TP} --sequence-parallel", 2), (TP, 4)]


@pytest.mark.long
def test_fine_tuned(text, tmp_path):
    """However it is split: the losses of one rank from the first on, and a folder with the weights
    of the last checkpoint, from which a run can start again. It leaves what was there alone."""
    random_model(tmp_path / "model", rms_norm_eps=1e-5)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    shape = [x for x in zip(FLAGS[::2], FLAGS[1::2], strict=True) if x[0] in TRAINING]
    flags = [*sum(shape, ()), "--data-dir", text, "--init-from", tmp_path / "model"]
    found = []
    for number, (command, count) in enumerate([("train_fsdp.py", 0), *TUNED]):
        script, *more = command.split()
        folder = tmp_path / str(number)
        done = ranks(count, f"distributed/{script}", *flags, *more, "--checkpoint-dir", folder)
        assert done.returncode == 0, done.stderr
        found.append([values(done.stdout, name) for name in ("loss", "val_loss")])
        assert (folder / "model/tokenizer.json").read_text() == "{}"
        command = ["aux/sample.py", folder, "--export", folder / "exported"]
        assert ranks(0, *command).returncode == 0
        written = (folder / "model/model.safetensors").read_bytes()
        assert written == (folder / "exported/model.safetensors").read_bytes()
        again = ranks(0, *command)
        assert again.returncode == 1 and "exported exists: choose another folder" in again.stderr
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "tokenizer.json").symlink_to("../model/tokenizer.json")
    command = ["aux/sample.py", folder, "--export", tmp_path / "no"]
    done = ranks(0, *command, "--tokenizer", linked / "tokenizer.json")
    assert done.stderr.startswith(f"{linked}: the link tokenizer.json leads out of it")
    assert done.returncode == 1 and not list(tmp_path.glob("*no*"))
    assert list(found[0][1]) == [0, 6, 12] and found[0][1][12] < found[0][1][0]
    for one in found[1:]:
        assert one == [pytest.approx(values, rel=2e-6) for values in found[0]]
    shutil.move(tmp_path / "0/model", tmp_path / "next")
    flags[-1] = tmp_path / "next"
    done = ranks(0, "distributed/train_fsdp.py", *flags, "--checkpoint-dir", tmp_path / "again")
    assert values(done.stdout, "val_loss")[0] == found[0][1][12]
    more = ["--hidden-size", 64, "--checkpoint-dir", tmp_path / "smaller"]
    done = ranks(0, "distributed/train_fsdp.py", *flags, *more)
    assert (
        done.returncode == 1
        and "has hidden_size 128, so --hidden-size must be the same" in done.stderr
    )


TRAINING = ("--context", "--batch-size", "--steps", "--warmup-steps", "--learning-rate")
TRAINING += ("--precision", "--log-every", "--eval-every", "--eval-windows", "--device")


# Rank 1 gets a signal when the fine-tuned model is there.
ASKED = """
import os, runpy, signal, sys; sys.path.insert(0, "distributed")
import hugging_face
write = hugging_face.write
def asked(*arguments, **options):
    write(*arguments, **options)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
hugging_face.write = asked
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_signal_while_the_fine_tuned_model_is_written(text, tmp_path):
    """Is heard, because under torchrun the job would end as FAILED; the next start ends well."""
    random_model(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "asked.py").write_text(ASKED)
    command = ["distributed/train_fsdp.py", "--context", 16, "--batch-size", 2, "--steps", 1]
    command += ["--eval-windows", 2, "--precision", "fp32", "--device", "cpu", "--data-dir", text]
    command += ["--init-from", tmp_path / "model", "--checkpoint-dir", tmp_path / "out"]
    stopped = ranks(2, tmp_path / "asked.py", *command)
    assert stopped.stdout.endswith("\nStopped after step 1, saved\n"), stopped.stderr
    again = ranks(2, *command, "--resume")
    assert "\nFinished: step=1, " in again.stdout and again.returncode == 0, again.stderr
    assert (tmp_path / "out/model/model.safetensors").exists()


# --- with transformers and tokenizers ---

SMALL = "--batch-size 8 --context 128 --learning-rate 0.003 --warmup-steps 5 --log-every 10"
SMALL += " --eval-windows 8 --device cpu --weight-decay 0"


CHAT = "tests/scripts/chat.py"
ANSWER = "<think></think>It is a number.<|im_end|>\n"


@pytest.mark.matrix
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

    loss, learnt, _ = python(packages, CHAT, qwen, tmp_path / "data").splitlines()
    assert eval(learnt).startswith(2 * ANSWER) and not eval(learnt).replace(ANSWER, "")
    flags = [*SMALL.split(), "--data-dir", tmp_path / "data", "--steps", 80]
    flags += ["--init-from", qwen, "--checkpoint-dir", tmp_path / "run"]
    log = python(packages, "distributed/train_fsdp.py", *flags, ranks=2)
    first, last = map(float, re.findall(r"^step=\d+/\d+ val_loss=(\S+)$", log, re.M))
    assert first == pytest.approx(float(loss), abs=2e-5)
    tuned = tmp_path / "run/model"
    loss, _, answer = python(packages, CHAT, tuned, tmp_path / "data").splitlines()
    # Its weights are rounded to bfloat16, as they were.
    assert last == pytest.approx(float(loss), rel=0.1) and last < 0.1
    assert eval(answer).startswith(ANSWER.removesuffix("\n")), answer


@pytest.mark.matrix
def test_a_hugging_face_tokenizer(packages, qwen, tmp_path):
    """sample.py needs it, and says so."""
    (tmp_path / "input.txt").write_text(
        "".join(f"{i} is less than {i + 1}.\n" for i in range(2000))
    )
    file, data = qwen / "tokenizer.json", ["--data-dir", tmp_path / "data"]
    command = ["aux/prepare_data.py", "text", *data, "--input", tmp_path / "input.txt"]
    python(packages, *command, "--tokenizer", file)
    flags = [*SMALL.split(), *data, "--steps", 3, "--checkpoint-dir", tmp_path / "run"]
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


@pytest.mark.matrix
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
