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

import checkpoint
import token_files
from models import (
    BATCH_SIZE,
    CONTEXT,
    EXPERT_FLAGS,
    EXPERTS,
    FLAGS,
    SHAPE,
    STEPS,
    TP,
    WARMUP_STEPS,
    saved_state,
    values,
)
from sizes import flops_per_token, new_config
from slurm import LAUNCHERS, cells, ranks
from transformer import Transformer

pytestmark = pytest.mark.long


def new_model(**experts: int) -> Transformer:
    shape = SHAPE | {"tie_word_embeddings": True} | experts
    model = Transformer(new_config(shape, CONTEXT, 128))
    for name, weight in model.named_parameters():
        weight.data = model.first_value(name, seed=0)
    return model


def train(command: str, count: int, text: Path, folder: Path, *flags: object, **env: object):
    """A training on this machine, of so many ranks, or of one process."""
    script, *more = f"distributed/{command}".split()
    its = [script, *FLAGS, "--data-dir", text, "--checkpoint-dir", folder, *more]
    return ranks(count if count > 1 else 0, *its, *flags, **env)


# --- equality ---

# Of what costs time and is compared by other tests, once: the last step's.
ONCE = ["--eval-every", STEPS, "--eval-windows", BATCH_SIZE, "--save-every", STEPS]


@pytest.fixture(scope="session")
def chat(text, tmp_path_factory) -> Path:
    """Text as if it were conversations: of some windows more is to be learnt than of others."""
    folder = Path(shutil.copytree(text, tmp_path_factory.mktemp("chat") / "data"))
    said = json.loads((folder / "vocabulary.json").read_text()) | {"packed": CONTEXT}
    for split in ("train", "val"):
        count = said[f"{split}_tokens"]
        learnt = np.random.default_rng(0).random(count) < np.linspace(0, 300, count) % 1
        learnt.astype(np.uint8).tofile(folder / f"{split}.mask")
    (folder / "vocabulary.json").write_text(json.dumps(said))
    return folder


def train_dense(folder: Path, rate: float = 1e-3, **experts: int) -> tuple[list, list, dict]:
    """Losses, norms and weights of a plain loop: one process, no split, unfused AdamW."""
    data = np.fromfile(folder / "train.bin", np.uint8)
    mask = np.ones_like(data)
    if (folder / "train.mask").exists():
        mask = np.fromfile(folder / "train.mask", np.uint8)
    order = token_files.TokenDataset(folder, CONTEXT, BATCH_SIZE)
    model = new_model(**experts)
    options = {"betas": (0.9, 0.99), "weight_decay": 0.1, "fused": False, "foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    losses, norms = [], []
    for step in range(STEPS):
        starts = order.starts(torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE))
        windows = starts[:, None].numpy() + np.arange(CONTEXT + 1)
        tokens, learnt = torch.tensor(data[windows]).long(), torch.tensor(mask[windows]).bool()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits[learnt[:, 1:]], tokens[:, 1:][learnt[:, 1:]])
        optimizer.zero_grad()
        (loss + model.balance()).backward()
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
    """What tests/scripts/language_model.py finds of every split, and of the dense loop."""
    folder = tmp_path_factory.mktemp("splits")
    losses, norms, weights = train_dense(chat)
    torch.save(weights, folder / "dense.pt")
    found = {"dense": {"losses": losses, "norms": norms}}
    for count in (2, 4, 8) if request.param == "all" else (2, 4):
        command = ["tests/scripts/language_model.py", chat, folder, request.param, *FLAGS, *ONCE]
        done = ranks(count, *command, timeout=240)
        assert done.returncode == 0, done.stderr
        found |= json.loads((folder / f"results_{count}.json").read_text())
    return found


def test_split_equals_dense(splits):
    """Of masked tokens, of which each rank has another number."""
    dense = splits["dense"]
    equal = {split for split in splits if split != "dense" and not split.endswith(("bf16", "tf32"))}
    assert len(equal) in (11, 21)
    for split in equal:
        found = splits[split]
        assert len(found["losses"]) == STEPS, split
        assert found["losses"] == pytest.approx(dense["losses"], abs=3e-6), split
        assert found["norms"] == pytest.approx(dense["norms"], rel=2e-6), split
        assert found["weights"] < 3e-6, split
        assert found["matmuls"] == "highest", split


def test_experts_split_equal_unsplit(chat, tmp_path, monkeypatch):
    """By DDP, FSDP and their mixture, and recomputed, with the experts' balance in the loss."""
    losses, norms, weights = train_dense(chat, **EXPERTS)
    torch.save(weights, tmp_path / "dense.pt")
    splits = {}
    for count in (2, 4):
        command = ["tests/scripts/language_model.py", chat, tmp_path, "experts", *FLAGS]
        done = ranks(count, *command, *ONCE, *EXPERT_FLAGS, timeout=240)
        assert done.returncode == 0, done.stderr
        splits |= json.loads((tmp_path / f"results_{count}.json").read_text())
    assert len(splits) == 6
    for split, found in splits.items():
        bf16 = split.endswith("bf16")
        assert found["losses"] == pytest.approx(losses, abs=0.02 if bf16 else 3e-6), split
        if not bf16:
            assert found["norms"] == pytest.approx(norms, rel=3e-6), split
            assert found["weights"] < 3e-6, split
    monkeypatch.setattr(Transformer, "balance", lambda model: 0.0)
    assert train_dense(chat, **EXPERTS)[1] != pytest.approx(norms, rel=3e-6), "it would not be seen"


def test_a_slightly_different_run_is_seen(dense, text):
    """A learning rate 1 % higher is a thousand times as far off as any split."""
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
    """Between the blocks all have bfloat16, and FSDP sums gradients in float32, as DDP does, which
    calls no reduce-scatter."""
    for split, found in splits.items():
        if "bf16" in split:
            assert found["losses"] == pytest.approx(splits["dense"]["losses"], abs=0.01), split
            assert found["types"] == ["torch.bfloat16"], split
            alone = split in ("ddp 2, bf16", "tp 2, bf16")
            assert found["reduced"] == ([] if alone else ["torch.float32"]), split
        elif "tf32" in split:
            assert found["matmuls"] == "high" and found["types"] == ["torch.float32"], split
    assert splits["fsdp 2, bf16"] and splits["fsdp 2"]["types"] == ["torch.float32"]


def test_memory_falls_with_the_ranks(splits):
    """Tensor parallelism leaves norms whole: (2 L + 1) C + 2 L D."""
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
        assert count[split] == expected[split[:-2]], split
    once, accumulated = (counts[f"hybrid 2x2{more}"] for more in ("", ", accumulation 2"))
    assert once["allreduce_"] == accumulated["allreduce_"], "between the copies once a step"
    assert counts["ddp 2"]["ddp"] == counts["ddp 2, accumulation 2"]["ddp"] > 0
    # A pair for each all-reduce; all norms' gradients at once.
    assert count["tp 2, sequence"] == 8 * layers + 7 + 1 + 1


# --- the scripts ---


RUNS = {
    "fsdp 2": (2, "train_fsdp.py"),
    "fsdp 4": (4, "train_fsdp.py"),
    "tp 2": (2, f"{TP} --sequence-parallel --deterministic"),
    "tp 2 x data 2": (4, f"{TP} --sequence-parallel --deterministic"),
}


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory):
    """Folder and log of an uninterrupted run, made once, with checkpoints after 6 and 12 steps."""

    @functools.cache
    def folder_and_log(name: str) -> tuple[Path, str]:
        count, command = RUNS[name]
        folder = tmp_path_factory.mktemp("trained")
        done = train(command, count, text, folder)
        assert done.returncode == 0, done.stderr
        assert checkpoint.steps(folder) == [12, 6]
        return folder, done.stdout

    return folder_and_log


PAIRS = [("fsdp 2", "tp 2"), ("fsdp 4", "tp 2 x data 2")]


@pytest.mark.parametrize(("fsdp", "tp"), cells(PAIRS, PAIRS[0]))
def test_scripts_agree(fsdp, tp, trained, dense):
    expected = pytest.approx(dense, abs=3e-6)
    logs = [trained(fsdp)[1], trained(tp)[1]]
    assert [list(values(log).values()) == expected for log in logs] == [True, True]
    first, second = (values(log, "val_loss") for log in logs)
    assert list(first) == [6, 12]
    assert first == pytest.approx(second, abs=3e-6)


def copied(trained, saved: str, folder: Path, step: int = 6) -> Path:
    """The checkpoint after step 6 in a new folder, by the name of any step."""
    shutil.copytree(trained(saved)[0] / "step_6", folder / f"step_{step}")
    return folder


OTHER_SPLITS = [
    ("fsdp 2", f"{TP} --sequence-parallel", 2),
    ("tp 2", "train_fsdp.py", 1),
    ("fsdp 4", "train_fsdp.py", 1),
    ("fsdp 4", "train_fsdp.py --shard 1", 2),
    ("fsdp 4", f"{TP} --sequence-parallel", 2),
    ("tp 2 x data 2", "train_fsdp.py", 2),
]


@pytest.mark.parametrize(("saved", "command", "count"), cells(OTHER_SPLITS, *OTHER_SPLITS[:2]))
def test_resume_under_another_split(trained, text, tmp_path, saved, command, count):
    folder = copied(trained, saved, tmp_path)
    done = train(command, count, text, folder, "--resume")
    assert done.returncode == 0 and "Resumed after step 6\n" in done.stdout, done.stderr
    for name, first in (("loss", 7), ("val_loss", 6)):
        expected = values(trained(saved)[1], name).items()
        rest = {step: value for step, value in expected if step >= first}
        assert values(done.stdout, name) == pytest.approx(rest, abs=3e-6)


def test_the_command_line_holds_after_a_resume(trained, text, tmp_path):
    """By a requeued job, which is not told to resume."""
    flags = ["--learning-rate", 0.002, "--steps", 15, "--precision", "bf16", "--beta2", 0.9]
    folder = copied(trained, "fsdp 2", tmp_path)
    done = train("train_fsdp.py", 1, text, folder, *flags, SLURM_RESTART_COUNT=1)
    assert "\nResumed after step 6\n" in done.stdout and "Precision: bf16" in done.stdout
    rate = 0.002 * (0.55 + 0.45 * math.cos(math.pi * (6 - WARMUP_STEPS) / (15 - WARMUP_STEPS)))
    assert values(done.stdout, "learning_rate")[7] == pytest.approx(rate, rel=1e-3)
    assert values(done.stdout)[7] == pytest.approx(values(trained("fsdp 2")[1])[7], abs=0.01)
    [group] = saved_state(folder / "step_15", "optimizer")["param_groups"]
    assert tuple(group["betas"]) == (0.9, 0.9)


def test_one_rank_is_asked_to_stop(text, tmp_path):
    """All save when they next agree, which is within five seconds, and evaluate when they resume,
    for which Slurm may not leave time before. Losses and weights are those of an uninterrupted
    run."""
    logs = []
    for folder, seconds, options in (("all", 0, {}), ("out", 1.5, {"TERM_AT": 3}), ("out", 0, {})):
        command = ["tests/scripts/slowly.py", seconds, "distributed/train_fsdp.py"]
        command += [*FLAGS, "--data-dir", text, "--checkpoint-dir", tmp_path / folder]
        command += ["--eval-every", 1, "--eval-windows", BATCH_SIZE, "--resume"]
        done = ranks(2, *command, **options)
        assert done.returncode == 0, done.stderr
        logs.append(done.stdout)
    whole, stopped, resumed = logs
    step = int(re.search(r"\nStopped after step (\d+), saved\n$", stopped)[1])
    assert 3 <= step <= 6 and f"\nResumed after step {step}\n" in resumed
    assert list(values(stopped, "val_loss")) == list(range(1, step))
    for name in ("loss", "val_loss"):
        assert values(stopped, name) | values(resumed, name) == values(whole, name)
    rate = max(values(stopped, "tokens_per_second").values())
    assert 0.55 < rate / (BATCH_SIZE * CONTEXT / 1.5) <= 1, "of all ranks"
    first, second = (saved_state(tmp_path / x / "step_12", "model") for x in ("all", "out"))
    assert all(torch.equal(first[name], second[name]) for name in first)


CHANGED = [("--seed 1", "seed 0, not 1"), ("--batch-size 4", "batch_size 8, not 4")]
CHANGED += [("--hidden-size 64", "config.hidden_size 32, not 64"), ("--context 8", "c")]
CHANGED += [("--data-dir {other}", "data ")]


@pytest.mark.parametrize(("flags", "sentence"), cells(CHANGED, CHANGED[0], CHANGED[-1]))
def test_what_would_change_the_run_is_refused(trained, text, tmp_path, flags, sentence):
    folder = copied(trained, "fsdp 2", tmp_path)
    other = Path(shutil.copytree(text, tmp_path / "other"))
    said = json.loads((other / "vocabulary.json").read_text()) | {"id": "of another text"}
    (other / "vocabulary.json").write_text(json.dumps(said))
    flags = flags.format(other=other).split()
    done = train("train_fsdp.py", 1, text, folder, "--resume", *flags)
    assert done.returncode == 1 and done.stderr.count(f"step_6 has {sentence}") == 1, done.stderr


def watched(folder: Path, count: int, command: str, text: Path, *flags: object, **env: object):
    its = ["tests/scripts/what_train_fsdp_does.py", *f"distributed/{command}".split(), *FLAGS]
    its += ["--data-dir", text]
    return ranks(count, *its, "--checkpoint-dir", folder / "out", *flags, **env)


@pytest.mark.parametrize(("command", "size"), [("train_fsdp.py", 2), (TP, 4)])
def test_what_the_log_says(dense, text, tmp_path, command, size):
    """The mean over the steps since the last line and over the ranks; mfu of all of them; and the
    loss of five evenly spread windows, which fill no batch, as many at once as a rank trains
    with. A signal in the last evaluation is heard, and then it is repeated at the next start."""
    flags = ["--log-every", 4, "--eval-every", 4, "--eval-windows", 5, "--steps", 10, "--keep", 1]
    flags += ["--accumulation", 2]
    done = watched(tmp_path, 2, command, text, *flags, TERM=10)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nStopped after step 10, saved\n"), done.stdout
    assert "\nMemory of a rank: about " in done.stdout and "recompute False" in done.stdout
    if command == "train_fsdp.py":
        sizes = [*FLAGS[: 2 * len(SHAPE)], "--vocab-size", 128, "--ranks", 2, "--batch", size]
        sizes += ["--model", "qwen3-0.6b", "--sequence", CONTEXT, "--precision", "fp32"]
        said = ranks(0, "aux/memory.py", *sizes).stdout.splitlines()
        assert said[-1] in done.stdout.splitlines(), said
    # To make the model; for each of two batches of an evaluation; to save
    alive = re.findall(r"^alive (\S+) 600$", done.stdout, re.M)
    calls = {"None": 2, "4": 4, "6": 2, "8": 4, "10": 6}
    assert {step: alive.count(step) for step in alive} == calls
    assert done.stdout.count(f"evaluated {size} at once\n") == 6
    policy = "policy {'param_dtype': torch.float32, 'reduce_dtype': torch.float32}\n"
    assert done.stdout.count(policy) == (2 if command == "train_fsdp.py" else 0)
    # A run of ten steps has another learning rate after its warm-up.
    assert values(done.stdout)[4] == pytest.approx(sum(dense[:4]) / 4, abs=3e-6)
    assert list(values(done.stdout)) == [4, 8, 10]
    rates, mfu = (values(done.stdout, name) for name in ("tokens_per_second", "mfu"))
    model = new_model()
    for step, rate in rates.items():
        flops = flops_per_token(model.config, CONTEXT) * rate
        assert mfu[step] == pytest.approx(flops / 2e9, abs=2e-3)
    assert BATCH_SIZE * CONTEXT / rates[8] < 2, "the evaluation counts as training"

    assert checkpoint.steps(tmp_path / "out") == [10]
    weights = dict(model.named_parameters())
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "out/step_10", no_dist=True)
    tokens = token_files.read_tokens(text, "val").long()
    starts = [int(i) * 16 for i in torch.linspace(0, (len(tokens) - 17) // 16, 5)]
    batch = torch.stack([tokens[start : start + 17] for start in starts])
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    again = watched(tmp_path, 2, command, text, *flags, "--resume")
    assert again.stdout.endswith(f"\nFinished: step=10, checkpoint in {tmp_path}/out\n")
    for log in (done.stdout, again.stdout):
        assert values(log, "val_loss")[10] == pytest.approx(loss.item(), abs=3e-6)


def test_a_long_run_whose_last_save_fails(trained, text, tmp_path):
    """Garbage is collected at step 1000, and activations recomputed for lack of memory."""
    copied(trained, "fsdp 2", tmp_path / "out", step=998)
    flags = ["--steps", 1002, "--eval-windows", 5, "--resume"]
    done = watched(tmp_path, 2, "train_fsdp.py", text, *flags, LOST=1, ROOM=1000)
    assert done.stdout.count("collected 1000\n") == 2, done.stderr
    assert done.returncode == 1 and "Finished" not in done.stdout
    assert "The last steps are not saved" in done.stdout
    assert "\nwarning: this may not fit into the GPU" in done.stdout
    assert set(re.findall("^recompute.*", done.stdout, re.M)) == {"recompute True"}


def test_weights_that_are_not_finite(text, tmp_path):
    """One sentence within ten steps, although no line is logged in between and nothing saved."""
    flags = ["--learning-rate", 1e18, "--warmup-steps", 0, "--log-every", 100, "--steps", 100]
    flags += ["--eval-every", 100, "--save-every", 50]
    done = train("train_fsdp.py", 2, text, tmp_path, *flags)
    assert done.returncode == 1 and "Finished" not in done.stdout
    said = r"^the gradient's norm is nan in step (\d|10): try a lower --learning-rate$"
    assert len(set(re.findall(said, done.stderr, re.M))) == 1, done.stderr
    assert checkpoint.steps(tmp_path) == []


def test_sample_in_one_process(trained):
    """Of 128 numbers, 103 are characters."""
    command = ["aux/sample.py", trained("tp 2")[0], "--length", 100, "--device", "cpu"]
    done = ranks(0, *command, "--prompt", "The ", "--temperature", 5)
    assert done.returncode == 0, done.stderr
    written = done.stdout.split("step_12:\n")[1]
    assert written.startswith("The ")
    assert len(written.removesuffix("\n")) == 104


BAD = [
    ("train_fsdp.py --batch-size 7", "--batch-size must be a multiple of 2 (ranks) x 1 (--acc"),
    (f"{TP} --num-key-value-heads 1", "must divide 2 (ranks) and 1 (--num-key-value-heads)"),
    ("train_fsdp.py --checkpoint-dir {}", "has checkpoints: pass --resume, or choose another"),
    ("train_fsdp.py --steps 0", "argument --steps: invalid positive value: '0'"),
    ("train_fsdp.py --num-attention-heads 6", "must be a multiple of --num-key-value-heads"),
    ("train_fsdp.py --context 999999999", "--context 999999999 is too long for the"),
    ("train_fsdp.py --data-dir /nowhere", "no prepared text at /nowhere/vocabulary.json"),
    ("train_fsdp.py --num-experts 4", "--num-experts-per-tok must be between 1 and --num-experts"),
    ("train_fsdp.py --keep 0", "--keep must be 1 or more"),
]


@pytest.mark.parametrize(("command", "sentence"), cells(BAD, *BAD[:3]))
def test_a_mistake_is_a_sentence(trained, text, tmp_path, command, sentence):
    done = train(command.format(trained("fsdp 2")[0]), 2, text, tmp_path)
    assert done.returncode in (1, 2)
    assert sentence in done.stderr and "Traceback (most" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_deterministic_leaves_what_the_user_has_set():
    """It sets the other variables, before the ranks meet on a machine that seems to have GPUs."""
    command = ["tests/scripts/watched.py", "distributed/train_fsdp.py", "--deterministic"]
    done = ranks(0, *command, ACCELERATOR="cuda:8", NCCL_ALGO="Tree")
    facts = json.loads(done.stdout.removeprefix("WATCHED "))
    found = facts["variables"]
    assert (found["NCCL_ALGO"], found["NCCL_PROTO"]) == ("Tree", "Simple"), done.stderr
    # Of cuBLAS's manual, which knows no other sizes but :16:8
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and found["NCCL_NVLS_ENABLE"] == "0"


COMPILED = [("train_fsdp.py", 2), ("train_fsdp.py --shard 1", 2)]
COMPILED += [(f"{TP} --sequence-parallel", 2), (f"{TP} --activation-checkpointing", 4)]


@pytest.mark.parametrize(("command", "count"), cells(COMPILED))
def test_compiled_is_equal(command, count, dense, text, tmp_path):
    cache = {"timeout": 300, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    done = train(command, count, text, tmp_path, "--compile", **cache)
    assert done.returncode == 0, done.stderr
    assert "Compiled: True" in done.stdout
    assert list(values(done.stdout).values()) == pytest.approx(dense, abs=3e-6)


# --- on the cluster ---

TWO = [(way, "train_fsdp.py --shard 2") for way in ("srun", "torchrun")] + [("spawn", TP)]


@pytest.mark.parametrize(("launcher", "script"), cells(TWO, TWO[0]))
def test_launchers_give_the_same_losses(script, launcher, cluster, dense, text, tmp_path):
    """Two nodes with two ranks each, which hold a model between them."""
    command = [LAUNCHERS[launcher], *f"distributed/{script}".split(), *FLAGS, "--data-dir", text]
    job = cluster.sbatch(f"--output={tmp_path}/log", *command, "--checkpoint-dir", tmp_path / "out")
    assert job.state == "COMPLETED", job.log
    assert list(values(job.log).values()) == pytest.approx(dense, abs=1e-5)
