"""Hugging Face's GPT-2 and tokenizers: in, out, and the same numbers as transformers."""

import functools
import re
import sys

import pytest
import torch

from conftest import environment, run

pytestmark = pytest.mark.matrix

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32, "vocab_size": 256}
FLAGS = "--steps 3 --batch-size 8 --context 16 --learning-rate 0.001 --warmup-steps 0 --log-every 1"
FLAGS += " --eval-windows 8 --device cpu"


def python(packages, *command: object, ranks: int = 1):
    start = [] if ranks == 1 else ["distributed/spawn_ranks.py"]
    env = environment(**packages, NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1)
    done = run(sys.executable, *start, *command, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(packages, tmp_path_factory):
    """A text in bytes, which is GPT-2's smallest vocabulary."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "input.txt").write_text("".join(f"{i} is less than {i + 1}.\n" for i in range(2000)))
    command = ["aux/prepare_data.py", "text", "--input", folder / "input.txt"]
    python(packages, *command, "--tokenizer", "bytes", "--data-dir", folder)
    return folder


# Biases and norms of a fresh model are 0 and 1, which any mistake would survive.
SAVE = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(**{sizes}, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
for weight in model.parameters():
    weight.data += 0.1 * torch.randn_like(weight)
model.save_pretrained(sys.argv[1])
"""
LOSS = """
import sys
sys.path.insert(0, "distributed")
import torch, token_files, zlib
from transformers import GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
windows = token_files.windows(sys.argv[2], "train", 16)
generator = torch.Generator().manual_seed(zlib.crc32(b"(0, 0)"))
batch = windows[torch.randint(len(windows), (8,), generator=generator)].long()
with torch.no_grad():
    print(model(batch, labels=batch).loss.item())
"""
GREEDY = """
import sys, torch
from transformers import GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
prompt = torch.tensor([list(b"12 is")])
written = model.generate(prompt, do_sample=False, max_new_tokens=11, pad_token_id=0)[0].tolist()
print(bytes(written).decode(errors="replace"))
"""
# As many as the context takes: transformers does not shift it.
LIKELIEST = ["--prompt", "12 is", "--length", 11, "--temperature", 0]


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step=\S+ loss=(\S+)", log, re.M)]


def test_gpt2_in_and_out(packages, text, tmp_path):
    """The first loss is transformers', on one rank and however it is split; the file of a sharded
    checkpoint makes transformers write what sample.py writes."""
    saved = tmp_path / "gpt2"
    python(packages, "-c", SAVE.replace("{sizes}", repr(SIZES)), saved)
    expected = float(python(packages, "-c", LOSS, saved, text))
    found = {}
    for name, script, ranks, *flags in (
        ("alone", "train_fsdp.py", 1),
        ("fsdp", "train_fsdp.py", 2),
        ("tp", "train_tp.py", 2, "--sequence-parallel"),
        ("tp x data", "train_tp.py", 4),
    ):
        command = [f"distributed/{script}", *FLAGS.split(), "--init-from", saved, *flags]
        folder = tmp_path / name
        where = ["--data-dir", text, "--checkpoint-dir", folder]
        found[name] = losses(python(packages, *command, *where, ranks=ranks))
    assert found["alone"][0] == pytest.approx(expected, abs=1e-4)
    assert found["alone"][2] < found["alone"][0]
    for name in found:
        assert found[name] == pytest.approx(found["alone"], abs=1e-5), found

    python(packages, "distributed/sample.py", tmp_path / "tp", "--export", tmp_path / "out")
    ours = python(packages, "distributed/sample.py", tmp_path / "tp", *LIKELIEST)
    theirs = python(packages, "-c", GREEDY, tmp_path / "out")
    assert ours.split("\n", 1)[1] == theirs
    # And in again, as it was
    again = torch.load(tmp_path / "out/model.pt", weights_only=True)
    assert again["tokenizer"] == {"name": "bytes", "size": 256}
    assert again["sizes"]["gpt2"] and again["model"]["blocks.0.mlp.up.bias"].shape == (128,)


def test_a_model_without_biases_goes_out(packages, text, tmp_path):
    flags = ["--layers", 2, "--heads", 4, "--width", 32, "--checkpoint-dir", tmp_path]
    python(packages, "distributed/train_fsdp.py", *FLAGS.split(), *flags, "--data-dir", text)
    python(packages, "distributed/sample.py", tmp_path, "--export", tmp_path / "out")
    ours = python(packages, "distributed/sample.py", tmp_path, *LIKELIEST)
    theirs = python(packages, "-c", GREEDY, tmp_path / "out")
    assert ours.split("\n", 1)[1] == theirs


def test_a_hugging_face_tokenizer(packages, text, tmp_path):
    make = f"""
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
made.train(["{text}/input.txt"], trainer)
made.save("{tmp_path}/tokenizer.json")
"""
    python(packages, "-c", make)
    file = tmp_path / "tokenizer.json"
    data = ["--data-dir", tmp_path / "data"]
    prepare = functools.partial(python, packages, "aux/prepare_data.py", "text", *data)
    said = prepare("--input", text / "input.txt", "--tokenizer", file)
    [count] = re.findall(r"^([\d,]+) training and [\d,]+ validation tokens, 4\d\d diff", said)
    count = int(count.replace(",", ""))
    assert count < (text / "train.bin").stat().st_size / 2

    flags = ["--layers", 1, "--heads", 4, "--width", 32, "--checkpoint-dir", tmp_path]
    python(packages, "distributed/train_fsdp.py", *FLAGS.split(), *flags, *data)
    flags = ["--prompt", "7 is less", "--length", 3, "--tokenizer", file]
    assert "7 is less" in python(packages, "distributed/sample.py", tmp_path, *flags)
    done = run(sys.executable, "distributed/sample.py", tmp_path, env=environment(**packages))
    assert done.returncode == 1 and "--tokenizer FILE" in done.stderr
