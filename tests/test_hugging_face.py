"""Hugging Face's folders without their packages: in, out and in again.
test_transformers.py compares with transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import hugging_face
from conftest import ranks
from test_language_model import FLAGS, values
from transformer import SIZES, Transformer, new_config


def random_model(folder: Path, **changed: object) -> Transformer:
    """A model whose weights are all random numbers of bfloat16, in a folder."""
    small = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    model = Transformer(new_config(SIZES["cpu"] | small, 64, 256) | changed)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight).bfloat16().float()
    hugging_face.write(folder, model, dict(model.named_parameters()).__getitem__)
    return model


def read(folder: Path) -> Transformer:
    model = Transformer(hugging_face.read_config(folder))
    model.fill(hugging_face.open_weights(folder, model).__getitem__)
    return model


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
    for name in (*copied, "config.json", "a.bin", "hf_token.txt"):
        (other / name).write_text("theirs")
    (other / "tokenizers").mkdir()
    weights = dict(model.named_parameters())
    hugging_face.write(tmp_path / "out", model, weights.__getitem__, other)
    (tmp_path / "out/consolidated.safetensors").write_text("not read")
    found = {path.name for path in (tmp_path / "out").iterdir()} - {"consolidated.safetensors"}
    assert len([name for name in found if name.endswith(".safetensors")]) == files
    assert copied < found and len(found) == files + 5 + (files > 1)
    again = read(tmp_path / "out")
    assert again.config == hugging_face.read_config(tmp_path / "out") and len(weights) == 25
    assert all(torch.equal(weights[name], x) for name, x in again.named_parameters())
    assert not list(tmp_path.glob(".*"))


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


@pytest.mark.parametrize("damage", ["cut", "away", "pointer"])
def test_a_damaged_folder_is_a_sentence(damage, tmp_path):
    random_model(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    if damage == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SystemExit, match="model cannot be read: "):
        read(tmp_path / "model")


@pytest.mark.parametrize(("how", "count"), [("fsdp", 2), ("tensor", 2), ("both", 4)])
def test_a_rank_reads_its_part_only(how, count, tmp_path, monkeypatch):
    """And never has the memory for a whole copy."""
    monkeypatch.setattr(hugging_face, "FILE_SIZE", 20 << 20)
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 5}
    random_model(tmp_path / "model", **sizes, torch_dtype="bfloat16")
    done = ranks(count, "tests/scripts/read_rows.py", tmp_path / "model", how)
    assert done.returncode == 0, done.stderr


TUNED = [("train_fsdp.py", 2), ("train_tp.py --sequence-parallel", 2), ("train_tp.py", 4)]


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
        command = ["distributed/sample.py", folder, "--export", folder / "exported"]
        assert ranks(0, *command).returncode == 0
        written = (folder / "model/model.safetensors").read_bytes()
        assert written == (folder / "exported/model.safetensors").read_bytes()
        again = ranks(0, *command)
        assert again.returncode == 1 and "exported exists: choose another folder" in again.stderr
    assert list(found[0][1]) == [0, 6, 12] and found[0][1][12] < found[0][1][0]
    for one in found[1:]:
        assert one == [pytest.approx(values, rel=2e-6) for values in found[0]]
    shutil.move(tmp_path / "0/model", tmp_path / "next")
    flags[-1] = tmp_path / "next"
    done = ranks(0, "distributed/train_fsdp.py", *flags, "--checkpoint-dir", tmp_path / "again")
    assert values(done.stdout, "val_loss")[0] == found[0][1][12]
    more = ["--hidden-size", 64, "--checkpoint-dir", tmp_path / "smaller"]
    done = ranks(0, "distributed/train_fsdp.py", *flags, *more)
    assert done.returncode == 1 and "weight is (256, 128), not (256, 64)" in done.stderr


TRAINING = ("--context", "--batch-size", "--steps", "--warmup-steps", "--learning-rate")
TRAINING += ("--precision", "--log-every", "--eval-every", "--eval-windows", "--device")
