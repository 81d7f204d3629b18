"""The language model: however it is split, its steps are the unsplit model's."""

import functools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
import token_files
from conftest import LAUNCHERS, cells, ranks
from transformer import Transformer, flops_per_token, new_config

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 96, "head_dim": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
CONTEXT, BATCH_SIZE, STEPS, WARMUP_STEPS = 16, 8, 12, 3
FLAGS = [x for name, value in SHAPE.items() for x in (f"--{name.replace('_', '-')}", str(value))]
FLAGS += f"--context {CONTEXT} --batch-size {BATCH_SIZE} --steps {STEPS}".split()
FLAGS += f"--warmup-steps {WARMUP_STEPS} --learning-rate 0.001 --precision fp32".split()
FLAGS += "--log-every 1 --eval-every 6 --eval-windows 50 --save-every 6 --device cpu".split()


def new_model(vocabulary: int = 128) -> Transformer:
    model = Transformer(new_config(SHAPE | {"tie_word_embeddings": True}, CONTEXT, vocabulary))
    for name, weight in model.named_parameters():
        weight.data = model.draw(name, seed=0)
    return model


def train(script: str, count: int, text: Path, folder: Path, *flags: object, **env: object):
    """A training on this machine, of so many ranks, or of one process."""
    command = [f"distributed/{script}", *FLAGS, "--data-dir", text, "--checkpoint-dir", folder]
    return ranks(count if count > 1 else 0, *command, *flags, **env)


def values(log: str, name: str = "loss") -> dict[int, float]:
    """The values of one name by step."""
    found = re.findall(rf"^step=(\d+)/\d+ (?:.* )?{name}=(\S+)", log, re.M)
    return {int(step): float(value) for step, value in found}


# --- equality ---


@pytest.fixture(scope="session")
def chat(text, tmp_path_factory) -> Path:
    """The text as if it were conversations: the model is to write some of it, and much less in some
    windows than in others."""
    folder = Path(shutil.copytree(text, tmp_path_factory.mktemp("chat") / "data"))
    said = json.loads((folder / "vocabulary.json").read_text()) | {"packed": CONTEXT}
    for split in ("train", "val"):
        count = said[f"{split}_tokens"]
        learnt = np.random.default_rng(0).random(count) < np.linspace(0, 300, count) % 1
        learnt.astype(np.uint8).tofile(folder / f"{split}.mask")
    (folder / "vocabulary.json").write_text(json.dumps(said))
    return folder


def train_dense(folder: Path, rate: float = 1e-3) -> tuple[list[float], list[float], dict]:
    """Losses, gradient norms and final weights of a plain loop: one process, no split, unfused
    AdamW."""
    data = np.fromfile(folder / "train.bin", np.uint8)
    mask = np.ones_like(data)
    if (folder / "train.mask").exists():
        mask = np.fromfile(folder / "train.mask", np.uint8)
    order = token_files.Text(folder, CONTEXT, BATCH_SIZE)
    model = new_model()
    options = {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": False, "foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses, norms = [], []
    for step in range(STEPS):
        starts = order.starts(torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)).tolist()
        both = [
            torch.tensor(np.stack([x[s : s + CONTEXT + 1] for s in starts])) for x in (data, mask)
        ]
        tokens, learnt = both[0].long(), both[1].bool()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits[learnt[:, 1:]], tokens[:, 1:][learnt[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([x.grad.square().sum() for x in model.parameters()]).sum().sqrt()
        for x in model.parameters():
            x.grad *= min(1.0, 1.0 / norm)
        [group] = optimizer.param_groups
        if step < WARMUP_STEPS:
            group["lr"] = rate * (step + 1) / (WARMUP_STEPS + 1)
        else:
            done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
            group["lr"] = rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, {name: x.detach() for name, x in model.named_parameters()}


@pytest.fixture(scope="session")
def dense(text) -> list[float]:
    return train_dense(text)[0]


@pytest.fixture(scope="session", params=["few", pytest.param("all", marks=pytest.mark.matrix)])
def splits(request, chat, tmp_path_factory) -> dict:
    """What tests/scripts/language_model.py finds of every split, on two and on four ranks, and
    of the dense loop."""
    folder = tmp_path_factory.mktemp("splits")
    losses, norms, weights = train_dense(chat)
    torch.save(weights, folder / "dense.pt")
    found = {"dense": {"losses": losses, "norms": norms}}
    for count in (2, 4):
        command = ["tests/scripts/language_model.py", chat, folder, request.param, *FLAGS]
        done = ranks(count, *command, timeout=240)
        assert done.returncode == 0, done.stderr
        found |= json.loads((folder / f"results_{count}.json").read_text())
    return found


def test_split_equals_dense(splits):
    """Of masked tokens, of which each rank has another number."""
    dense = splits["dense"]
    equal = {split for split in splits if split != "dense" and "bf16" not in split}
    assert len(equal) in (11, 18)
    for split in equal:
        found = splits[split]
        assert len(found["losses"]) == STEPS, split
        assert found["losses"] == pytest.approx(dense["losses"], abs=3e-6), split
        assert found["norms"] == pytest.approx(dense["norms"], rel=2e-6), split
        assert found["weights"] < 3e-6, split


def test_a_slightly_different_run_is_seen(dense, text):
    """With a learning rate 1 % higher the losses are off a thousand times as much as with any
    split."""
    others = train_dense(text, rate=1.01e-3)[0]
    assert max(abs(a - b) for a, b in zip(dense, others, strict=True)) > 1e-3


def test_tensor_parallel_by_hand():
    """A hundred steps, beside the same ones of the whole model."""
    done = ranks(2, "distributed/tensor_parallel_by_hand.py")
    assert done.returncode == 0, done.stderr
    losses = r"^step=\d+ loss_whole=(\S+) loss_split_over_2=(\S+)$"
    whole, split = zip(*re.findall(losses, done.stdout, re.M), strict=True)
    assert len(split) == 6
    assert list(map(float, split)) == pytest.approx(list(map(float, whole)), abs=1e-5)


def test_bfloat16_is_near(splits):
    """Autocast and FSDP's policy round other things; between the blocks all have bfloat16, and
    FSDP sums gradients in float32."""
    for split, found in splits.items():
        if "bf16" in split:
            assert found["losses"] == pytest.approx(splits["dense"]["losses"], abs=0.01), split
            assert found["types"] == ["torch.bfloat16"], split
            assert found["reduced"] == ([] if split == "tp 2, bf16" else ["torch.float32"]), split
    assert splits["fsdp 2, bf16"] and splits["fsdp 2"]["types"] == ["torch.float32"]


def test_memory_falls_with_the_ranks(splits):
    """Each rank has its part of everything; tensor parallelism leaves norms whole:
    (2 L + 1) C + 2 L D."""
    width, layers, size = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], SHAPE["head_dim"]
    everything = sum(part["parameters"] for part in splits["fsdp 2"]["held"])
    replicated = 4 * ((2 * layers + 1) * width + 2 * layers * size)
    parts_of = {"fsdp 2": 2, "fsdp 4": 4, "hybrid 2x2": 2, "tp 2": 2, "tp 4": 4, "tp 2 x data 2": 4}
    for split in parts_of.keys() & splits.keys():
        parts = parts_of[split]
        promised = everything / parts
        if split in ("tp 2", "tp 4"):
            promised = (everything - replicated) / parts + replicated
        elif split == "tp 2 x data 2":  # fully_shard splits what the group has whole
            promised = ((everything - replicated) / 2 + replicated) / 2
        for rank in splits[split]["held"]:
            assert rank["parameters"] == promised, split
            assert rank["optimizer"] == 2 * rank["parameters"], split


def test_collectives_are_few(splits):
    """Of a whole step: forward, backward and the gradient's norm (1)."""
    layers = SHAPE["num_hidden_layers"]
    counts = {split: found.get("collectives", {}) for split, found in splits.items()}
    count = {split: sum(found.values()) for split, found in counts.items()}
    assert {"tp 2", "fsdp 2"} <= count.keys()
    # Embedding; head; maximum and two sums of the loss; the norms of all heads at once.
    expected = {"tp": 4 * layers + 5 + 1 + 1}
    # Forward and backward; the last block's and the root's stay.
    gathered = 2 * (layers + 1) - 2
    expected["fsdp"] = gathered + (layers + 1) + 1
    for split in {"tp 2", "tp 4", "fsdp 2", "fsdp 4"} & count.keys():
        assert count[split] == expected[split.split()[0]], split
    once, accumulated = (counts[f"hybrid 2x2{more}"] for more in ("", ", accumulation 2"))
    assert once["allreduce_"] == accumulated["allreduce_"], "between the copies once a step"
    assert counts["ddp 2"]["ddp"] == counts["ddp 2, accumulation 2"]["ddp"] > 0
    # A pair for each all-reduce; all norms' gradients at once.
    assert count["tp 2, sequence"] == 8 * layers + 7 + 1 + 1


# --- the scripts ---


TP = ("train_tp.py", "--sequence-parallel", "--deterministic")
RUNS = {
    "fsdp 2": (2, "train_fsdp.py"),
    "fsdp 4": (4, "train_fsdp.py"),
    "tp 2": (2, *TP),
    "tp 2 x data 2": (4, *TP, "--tensor-parallel", 2),
}


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory):
    """Folder and log of an uninterrupted run, made once, with checkpoints after 6 and 12 steps."""

    @functools.cache
    def folder_and_log(name: str) -> tuple[Path, str]:
        count, script, *flags = RUNS[name]
        folder = tmp_path_factory.mktemp("trained")
        done = train(script, count, text, folder, *flags)
        assert done.returncode == 0, done.stderr
        assert checkpoint.steps(folder) == [12, 6]
        return folder, done.stdout

    return folder_and_log


PAIRS = [("fsdp 2", "tp 2"), ("fsdp 4", "tp 2 x data 2")]


@pytest.mark.parametrize(("fsdp", "tp"), cells(PAIRS, PAIRS[0]))
def test_scripts_agree(fsdp, tp, trained, dense):
    expected = pytest.approx(dense[0], abs=3e-6)
    logs = [trained(fsdp)[1], trained(tp)[1]]
    assert [list(values(log).values()) == expected for log in logs] == [True, True]
    first, second = (values(log, "val_loss") for log in logs)
    assert list(first) == [6, 12]
    assert first == pytest.approx(second, abs=3e-6)


def copied(trained, saved: str, folder: Path) -> Path:
    """The checkpoint after step 6 in a new folder."""
    shutil.copytree(trained(saved)[0] / "step_6", folder / "step_6")
    return folder


OTHER_SPLITS = [
    ("fsdp 2", "train_tp.py --sequence-parallel", 2),
    ("tp 2", "train_fsdp.py", 1),
    ("fsdp 4", "train_fsdp.py", 1),
    ("fsdp 4", "train_fsdp.py --shard 1", 2),
    ("fsdp 4", "train_tp.py --sequence-parallel", 2),
    ("tp 2 x data 2", "train_fsdp.py", 2),
]


@pytest.mark.parametrize(("saved", "command", "count"), cells(OTHER_SPLITS, *OTHER_SPLITS[:2]))
def test_resume_under_another_split(trained, text, tmp_path, saved, command, count):
    script, *flags = command.split()
    folder = copied(trained, saved, tmp_path)
    done = train(script, count, text, folder, "--resume", *flags)
    assert done.returncode == 0 and "Resumed after step 6\n" in done.stdout, done.stderr
    for name, first in (("loss", 7), ("val_loss", 6)):
        expected = values(trained(saved)[1], name).items()
        rest = {step: value for step, value in expected if step >= first}
        assert values(done.stdout, name) == pytest.approx(rest, abs=3e-6)


def test_the_command_line_holds_after_a_resume(trained, text, tmp_path):
    """By a requeued job, which is not told to resume."""
    flags = ["--learning-rate", 0.002, "--steps", 15, "--precision", "bf16"]
    folder = copied(trained, "fsdp 2", tmp_path)
    done = train("train_fsdp.py", 1, text, folder, *flags, SLURM_RESTART_COUNT=1)
    assert "\nResumed after step 6\n" in done.stdout and "Precision: bf16" in done.stdout
    rate = 0.002 * (0.55 + 0.45 * math.cos(math.pi * (6 - WARMUP_STEPS) / (15 - WARMUP_STEPS)))
    assert values(done.stdout, "learning_rate")[7] == pytest.approx(rate, rel=1e-3)
    assert values(done.stdout)[7] == pytest.approx(values(trained("fsdp 2")[1])[7], abs=0.01)


def test_one_rank_is_asked_to_stop(text, tmp_path):
    """All save when they next agree, and evaluate when they resume, for which Slurm may not leave
    time before. With dropout, losses and weights are those of an uninterrupted run."""
    logs = []
    for folder, options in (("whole", {}), ("out", {"TERM_AT": 3}), ("out", {})):
        command = ["tests/scripts/slowly.py", 0, "distributed/train_fsdp.py"]
        command += [*FLAGS, "--data-dir", text, "--checkpoint-dir", tmp_path / folder]
        command += ["--dropout", 0.2, "--steps", 14, "--eval-every", 5, "--resume"]
        done = ranks(2, *command, **options)
        assert done.returncode == 0, done.stderr
        logs.append(done.stdout)
    whole, stopped, resumed = logs
    assert stopped.endswith("\nStopped after step 10, saved\n")
    assert list(values(stopped, "val_loss")) == [5] and "\nResumed after step 10\n" in resumed
    for name in ("loss", "val_loss"):
        assert values(stopped, name) | values(resumed, name) == values(whole, name)
    models = []
    for folder in ("whole", "out"):
        dcp_to_torch_save(tmp_path / folder / "step_14", tmp_path / "model.pt")
        models.append(torch.load(tmp_path / "model.pt", weights_only=False)["model"])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


CHANGED = [("--seed 1", "seed 0, not 1"), ("--batch-size 4", "batch_size 8, not 4")]
CHANGED += [("--width 64", "sizes {"), ("--layers 3", "sizes {")]


@pytest.mark.parametrize(("flags", "sentence"), cells(CHANGED, CHANGED[0]))
def test_what_would_change_the_run_is_refused(trained, text, tmp_path, flags, sentence):
    folder = copied(trained, "fsdp 2", tmp_path)
    done = train("train_fsdp.py", 1, text, folder, "--resume", *flags.split())
    assert done.returncode == 1 and done.stderr.count(f"step_6 has {sentence}") == 1, done.stderr
    about = json.loads((folder / "step_6/about.json").read_text())
    assert set(about) == {"sizes", "batch_size", "seed", "data", "tokenizer"}
    assert set(about["sizes"]) == {*SIZES, "vocabulary"}


# Of a run as it is: what it asks of others, in a line of its own.
WATCHED = """
import faulthandler, runpy, sys; sys.path.insert(0, "distributed")
import torch.distributed as dist, transformer
set_timer, pending, init = faulthandler.dump_traceback_later, [], dist.init_process_group
def timer(seconds, exit): pending.append((seconds, exit))
faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = timer, pending.clear
def begin(*args, **options):
    assert pending == [(300, True)]
    print(f"timeout {options['timeout']}\\n", end="", flush=True)
    init(*args, **options)
dist.init_process_group = begin
transformer.peak_flops = lambda device: 1e9
end = dist.destroy_process_group
def ended():
    print(f"pending {pending}\\n", end="", flush=True)
    end()
dist.destroy_process_group = ended
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["train_fsdp.py", "train_tp.py"])
def test_what_the_log_says(dense, text, tmp_path, script):
    """The mean over the steps since the last line and over the ranks; mfu of all of them; the
    loss of five evenly spread windows, which fill no batch; and no timer that ends the run."""
    (tmp_path / "watched.py").write_text(WATCHED)
    flags = [
        *FLAGS,
        "--log-every",
        4,
        "--eval-every",
        10,
        "--eval-windows",
        5,
        "--steps",
        10,
        "--keep",
        1,
    ]
    flags += ["--data-dir", text, "--checkpoint-dir", tmp_path / "out", "--learning-rate", 0.001]
    done = ranks(2, tmp_path / "watched.py", f"distributed/{script}", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pending []\n") == done.stdout.count("timeout 0:30:00\n") == 2
    vocabulary = token_files.read_vocabulary(text)["tokenizer"]["size"]
    model = Transformer(vocabulary, **SIZES)
    losses = dense[0]
    # A run of ten steps has another learning rate after its warm-up.
    assert values(done.stdout)[4] == pytest.approx(sum(losses[:4]) / 4, abs=3e-6)
    assert list(values(done.stdout)) == [4, 8, 10]
    rates, mfu = (values(done.stdout, name) for name in ("tokens_per_second", "mfu"))
    flops = model.flops_per_token(SIZES["context"])
    for step, rate in rates.items():
        assert mfu[step] == pytest.approx(flops * rate / 2e9, abs=2e-3)

    assert checkpoint.steps(tmp_path / "out") == [10]
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "out/step_10", no_dist=True)
    tokens = token_files.read_tokens(text, "val").long()
    starts = [int(i) * 16 for i in torch.linspace(0, (len(tokens) - 17) // 16, 5)]
    batch = torch.stack([tokens[start : start + 17] for start in starts])
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert values(done.stdout, "val_loss") == {10: pytest.approx(loss.item(), abs=3e-6)}


@pytest.mark.matrix
def test_shard_is_of_neighbours(text, tmp_path):
    """Six ranks in three pairs."""
    done = train("train_fsdp.py", 6, text, tmp_path, "--shard", 2, "--steps", 1, "--batch-size", 6)
    assert "DeviceMesh((replicate=3, shard=2)" in done.stdout, done.stderr


NOT_FINITE = [
    # At the save, and otherwise within ten steps.
    (1, r"^the weights are not finite after step ([2-9]), and not saved: try a lower"),
    (50, r"^the gradient's norm is nan in step (10): try a lower --learning-rate$"),
]


@pytest.mark.parametrize(("save_every", "said"), NOT_FINITE)
def test_weights_that_are_not_finite(save_every, said, text, tmp_path):
    """One sentence, and the last good weights stay, although no line is logged in between."""
    flags = ["--learning-rate", 1e18, "--warmup-steps", 0, "--log-every", 100, "--steps", 100]
    flags += ["--eval-every", 100]
    done = train("train_fsdp.py", 2, text, tmp_path, *flags, "--save-every", save_every)
    assert done.returncode == 1 and "Finished" not in done.stdout
    found = set(re.findall(said, done.stderr, re.M))
    assert len(found) == 1, done.stderr
    assert checkpoint.steps(tmp_path)[:1] == [int(found.pop()) - 1] * (save_every == 1)


def sample(folder: Path, length: int, *flags: object):
    command = ["distributed/sample.py", folder, "--length", length, "--device", "cpu", *flags]
    return ranks(0, *command)


def test_sample_in_one_process(trained):
    done = sample(trained("fsdp 2")[0], 40, "--prompt", "The ")
    assert done.returncode == 0, done.stderr
    written = done.stdout.split("step_12:\n")[1]
    assert written.startswith("The ")
    assert len(written.removesuffix("\n")) == 44


def test_a_low_temperature_takes_the_likeliest():
    model = Transformer(50, context=8, layers=1, heads=2, width=16)
    model.forward = lambda tokens: torch.arange(50.0).expand(1, tokens.size(1), -1)
    first = torch.zeros(1, 1, dtype=torch.long)
    cold, warm = (model.generate(first, 40, 50, temperature)[0, 1:] for temperature in (0.01, 1))
    assert cold.eq(49).all() and not warm.eq(49).all()


def test_how_weights_are_drawn():
    """Those that add to the residual stream are smaller, the deeper the model."""
    model = Transformer(1000, context=64, layers=8, heads=2, width=128)
    for name, weight in model.named_parameters():
        std = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        drawn = model.draw(name, seed=0)
        assert drawn.shape == weight.shape
        if drawn.dim() == 2:
            assert drawn.std().item() == pytest.approx(std, rel=0.03), name
        else:
            assert drawn.eq(1).all(), name


BAD = [
    (
        "train_fsdp.py --steps 0",
        "--steps, --batch-size, --accumulation, --keep and --..-every",
    ),
    ("train_fsdp.py --heads 5", "--width must be a multiple of 5 (--heads)"),
    ("train_fsdp.py --batch-size 7", "--batch-size must be a multiple of 2 (ranks) x 1 (--acc"),
    ("train_fsdp.py --shard 3", "--shard must divide 2 (ranks)"),
    ("train_fsdp.py --context 999999999", "--context 999999999 is too long for the"),
    ("train_fsdp.py --data-dir /nowhere", "no prepared text at /nowhere/vocabulary.json"),
    ("train_tp.py --tensor-parallel 3", "--tensor-parallel must divide 2 (ranks) and 4 (--heads)"),
    ("train_tp.py --context 15 --sequence-parallel", "--context with --sequence-parallel"),
    ("train_tp.py --accumulation 3", "a multiple of 1 (copies) x 3 (--accumulation)"),
    ("train_tp.py --checkpoint-dir {}", "has checkpoints: pass --resume, or choose another"),
]


@pytest.mark.parametrize(("command", "sentence"), cells(BAD, BAD[2], BAD[-1]))
def test_a_mistake_is_a_sentence(trained, text, tmp_path, command, sentence):
    script, *flags = command.format(trained("fsdp 2")[0]).split()
    done = train(script, 2, text, tmp_path, *flags)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr and "Traceback (most" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
def test_evaluation_has_one_shape_on_all_ranks(text, data_ranks):
    """As many rows as a rank trains with at once: more may not fit into a GPU's memory."""
    windows, rows = token_files.windows(text, "val", 16), 8 // data_ranks
    shapes, counted = [], 0
    for rank in range(data_ranks):
        batches = list(token_files.fixed_batches(windows, 50, rows, rank, data_ranks))
        shapes.append([(tokens.shape, targets.shape) for tokens, targets in batches])
        assert all(tokens.min() >= 0 for tokens, _ in batches)
        counted += sum((targets >= 0).sum().item() for _, targets in batches)
    assert shapes == [[((rows, 16),) * 2] * 7] * data_ranks
    assert counted == 50 * 16


@pytest.mark.matrix
def test_a_padded_vocabulary(text, tmp_path):
    """A multiple of 64 divides by the ranks; no character that does not exist is ever written."""
    flags, logs = ("--pad-vocabulary", 64, "--steps", 10), []
    for script, count in (("train_tp.py", 2), ("train_fsdp.py", 1)):
        done = train(script, count, text, tmp_path / script, *flags)
        assert done.returncode == 0, done.stderr
        logs.append(values(done.stdout))
    assert logs[0] == pytest.approx(logs[1], abs=3e-6)
    about = json.loads((tmp_path / "train_tp.py/step_10/about.json").read_text())
    assert about["sizes"]["vocabulary"] % 64 == 0
    assert 0 < about["sizes"]["vocabulary"] - about["tokenizer"]["size"] < 64
    done = sample(tmp_path / "train_tp.py", 300)
    assert done.returncode == 0, done.stderr
    # A line break first, and one of print's.
    assert len(done.stdout.split("step_10:\n")[1]) == 302


COMPILED = [("train_fsdp.py", 2), ("train_fsdp.py --shard 1", 2)]
COMPILED += [("train_tp.py --sequence-parallel", 2), ("train_tp.py --activation-checkpointing", 4)]


@pytest.mark.parametrize(("command", "count"), cells(COMPILED))
def test_compiled_is_equal(command, count, dense, text, tmp_path):
    script, *flags = command.split()
    cache = {"timeout": 300, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    done = train(script, count, text, tmp_path, "--compile", *flags, **cache)
    assert done.returncode == 0, done.stderr
    assert "Compiled: True" in done.stdout
    assert list(values(done.stdout).values()) == pytest.approx(dense[0], abs=3e-6)


# --- on the cluster ---

TWO = [("torchrun", "train_fsdp.py --shard 2"), ("spawn", "train_tp.py")]


@pytest.mark.parametrize(("launcher", "script"), cells(TWO, TWO[0]))
def test_launchers_give_the_same_losses(script, launcher, cluster, dense, text, tmp_path):
    """Two nodes with two ranks each, which hold a model between them."""
    command = [LAUNCHERS[launcher], *f"distributed/{script}".split(), *FLAGS, "--data-dir", text]
    job = cluster.sbatch(f"--output={tmp_path}/log", *command, "--checkpoint-dir", tmp_path / "out")
    assert job.state == "COMPLETED", job.log
    assert list(values(job.log).values()) == pytest.approx(dense[0], abs=1e-5)
