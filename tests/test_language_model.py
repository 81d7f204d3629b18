"""The language model: however it is split, its steps are the unsplit model's."""

import json
import math
import re
import shutil
import sys
import zlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import token_files
from conftest import LAUNCHERS, cells, environment, run
from transformer import Transformer, attend

SIZES = {"layers": 2, "heads": 4, "width": 32, "context": 16}
BATCH_SIZE, STEPS, WARMUP_STEPS = 8, 20, 5
FLAGS = [part for name, value in SIZES.items() for part in (f"--{name}", value)]
FLAGS += f"--batch-size {BATCH_SIZE} --steps {STEPS} --warmup-steps {WARMUP_STEPS}".split()
FLAGS += ["--precision", "fp32", "--log-every", "1", "--eval-every", "10", "--eval-windows", "50"]
FLAGS += ["--save-every", "10", "--device", "cpu", "--learning-rate", "0.001"]


def train(script: str, ranks: int, text: Path, folder: Path, *flags: object, timeout: float = 120):
    """A training on this machine, by hand."""
    spawner = ["distributed/spawn_ranks.py"] if ranks > 1 else []
    command = [sys.executable, *spawner, f"distributed/{script}", *FLAGS, "--data-dir", text]
    env = environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1)
    return run(*command, "--checkpoint-dir", folder, *flags, env=env, timeout=timeout)


def values(log: str, name: str = "loss") -> dict[int, float]:
    """The values of one name by step."""
    found = re.findall(rf"^step=(\d+)/\d+ (?:.* )?{name}=(\S+)", log, re.M)
    return {int(step): float(value) for step, value in found}


# --- equality ---


def train_dense(folder: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of a plain loop: one process, no split, unfused
    AdamW."""
    vocabulary = token_files.read_vocabulary(folder)["tokenizer"]["size"]
    data = torch.frombuffer(
        bytearray((folder / "train.bin").read_bytes()), dtype=torch.uint8
    ).long()
    model = Transformer(vocabulary, **SIZES)
    for name, weight in model.named_parameters():
        weight.data = model.draw(name, seed=0)
    groups = [{"params": [x for x in model.parameters() if x.dim() >= 2], "weight_decay": 0.1}]
    groups += [{"params": [x for x in model.parameters() if x.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=False, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(zlib.crc32(repr((0, step)).encode()))
        starts = torch.randint(len(data) - SIZES["context"], (BATCH_SIZE,), generator=generator)
        batch = torch.stack([data[start : start + SIZES["context"] + 1] for start in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([x.grad.square().sum() for x in model.parameters()]).sum().sqrt()
        for x in model.parameters():
            x.grad *= min(1.0, 1.0 / norm)
        for group in optimizer.param_groups:
            if step < WARMUP_STEPS:
                group["lr"] = 1e-3 * (step + 1) / (WARMUP_STEPS + 1)
            else:
                done = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
                group["lr"] = 1e-4 + 9e-4 * (1 + math.cos(math.pi * done)) / 2
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, {name: x.detach() for name, x in model.named_parameters()}


@pytest.fixture(scope="session")
def splits(text, tmp_path_factory) -> dict:
    """What tests/scripts/language_model.py finds of every split, on two and on four ranks, and
    of the dense loop."""
    folder = tmp_path_factory.mktemp("splits")
    losses, norms, weights = train_dense(text)
    torch.save(weights, folder / "dense.pt")
    found = {"dense": {"losses": losses, "norms": norms}}
    for ranks in (2, 4):
        command = ["./torchrun.sh", "tests/scripts/language_model.py", text, folder]
        done = run(*command, env=environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1), timeout=240)
        assert done.returncode == 0, done.stderr
        found |= json.loads((folder / f"results_{ranks}.json").read_text())
    return found


SPLITS = ["ddp 2", "fsdp 2", "fsdp 4", "hybrid 2x2", "tp 2", "tp 4", "tp 2 x data 2"]
ACCUMULATED = ("ddp 2", "fsdp 2", "hybrid 2x2", "tp 2", "tp 2, sequence", "tp 2 x data 2")
SPLITS += [f"{split}, accumulation 2" for split in ACCUMULATED]
SPLITS += [f"{split}, sequence" for split in ("tp 2", "tp 4", "tp 2 x data 2")]
SPLITS += [f"{split}, recomputed" for split in ("fsdp 2", "tp 2")]


@pytest.mark.parametrize("split", SPLITS)
def test_split_equals_dense(splits, split):
    """Seen: losses within 1e-6, norms within 3e-7 of themselves, weights within 2e-7. float32 at
    4.6 steps by 5e-7."""
    dense, found = splits["dense"], splits[split]
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(dense["losses"], abs=3e-6)
    assert found["norms"] == pytest.approx(dense["norms"], rel=2e-6)
    assert found["weights"] < 3e-6


def test_tensor_parallel_by_hand():
    """A hundred steps, beside the same ones of the whole model."""
    done = run("./torchrun.sh", "distributed/tensor_parallel_by_hand.py")
    assert done.returncode == 0, done.stderr
    losses = r"^step=\d+ loss_whole=(\S+) loss_split_over_2=(\S+)$"
    whole, split = zip(*re.findall(losses, done.stdout, re.M), strict=True)
    assert len(split) == 6
    assert list(map(float, split)) == pytest.approx(list(map(float, whole)), abs=1e-5)


@pytest.mark.parametrize("split", ["fsdp 2, bf16", "tp 2, bf16", "tp 2 x data 2, bf16"])
def test_bfloat16_is_near(splits, split):
    """Autocast and FSDP's policy round other things; between the blocks all have bfloat16, and
    FSDP sums gradients in float32."""
    assert splits[split]["losses"] == pytest.approx(splits["dense"]["losses"], abs=0.01)
    assert splits[split]["types"] == ["torch.bfloat16"]
    assert splits[split]["reduced"] == ([] if split == "tp 2, bf16" else ["torch.float32"])
    assert splits["fsdp 2"]["types"] == ["torch.float32"]


@pytest.mark.parametrize("split", ["tp 2", "tp 2 x data 2", "tp 2, sequence"])
def test_dropout_leaves_replicated_weights_equal(splits, split):
    found = splits[f"{split}, dropout"]
    assert found["drift"] == 0.0
    dense = splits["dense"]["losses"]
    assert found["losses"] != pytest.approx(dense, abs=1e-3), "nothing was dropped"


def test_a_group_drops_different_heads_and_otherwise_alike(splits):
    layers, heads = SIZES["layers"], SIZES["heads"]
    for split, groups in {"tp 2": [(0, 1)], "tp 2 x data 2": [(0, 1), (2, 3)]}.items():
        found = splits[f"{split}, dropped"]
        assert different(found["heads"]) == layers * heads * len(groups), split
        assert different(found["modules"]) == (1 + 2 * layers) * len(groups), split
        assert all(found["modules"][i] == found["modules"][j] for i, j in groups), split
    found = splits["fsdp 2, dropped"]
    assert different(found["heads"]) == layers * heads * 2, "each rank has its own batch"
    found = splits["tp 2, sequence, dropped"]
    assert different(found["heads"] + found["modules"]) == layers * heads + 2 * (1 + 2 * layers)


def different(ranks: list[list[int]]) -> int:
    return len({mask for rank in ranks for mask in rank})


def test_recomputing_drops_the_same(splits):
    once, twice = splits["tp 2, dropped"]["heads"], splits["tp 2, recomputed, dropped"]["heads"]
    assert [sorted(rank * 2) for rank in once] == [sorted(rank) for rank in twice]


def test_memory_falls_with_the_ranks(splits):
    """Each rank has its part of everything; tensor parallelism leaves norms and positions whole:
    (2 L + 1 + T) C."""
    width, context, layers = SIZES["width"], SIZES["context"], SIZES["layers"]
    everything = sum(part["parameters"] for part in splits["fsdp 2"]["held"])
    replicated = 4 * (2 * layers + 1 + context) * width
    parts_of = {"fsdp 2": 2, "fsdp 4": 4, "hybrid 2x2": 2, "tp 2": 2, "tp 4": 4}
    for split, parts in (parts_of | {"tp 2 x data 2": 4}).items():
        promised = everything / parts
        if split in ("tp 2", "tp 4"):
            promised = (everything - replicated) / parts + replicated
        elif split == "tp 2 x data 2":  # fully_shard splits what the group has whole
            promised = ((everything - replicated) / 2 + replicated) / 2
        for rank in splits[split]["held"]:
            slack = 8 * 4 * width  # rows that do not divide, as the vocabulary's
            assert rank["parameters"] == pytest.approx(promised, abs=slack), split
            assert rank["optimizer"] == 2 * rank["parameters"], split


def test_collectives_are_few(splits):
    """Of a whole step: forward, backward and the gradient's norm (1)."""
    layers = SIZES["layers"]
    counts = {split: found.get("collectives", {}) for split, found in splits.items()}
    count = {split: sum(found.values()) for split, found in counts.items()}
    for ranks in (2, 4):
        # Embedding; head; maximum and two sums of the loss.
        assert count[f"tp {ranks}"] == 4 * layers + 5 + 1
        # Forward and backward; the last block's and the root's stay.
        gathered = 2 * (layers + 1) - 2
        assert count[f"fsdp {ranks}"] == gathered + (layers + 1) + 1
    # The parts of a batch share them: each weight is gathered once, and reduced once.
    assert count["fsdp 2, accumulation 2"] == 2 * (layers + 1) + 1
    once, accumulated = (counts[f"hybrid 2x2{more}"] for more in ("", ", accumulation 2"))
    assert once["allreduce_"] == accumulated["allreduce_"], "between the replicas once a step"
    # A pair for each all-reduce; all norms' gradients at once.
    assert count["tp 2, sequence"] == 8 * layers + 8 + 1 + 1


@pytest.mark.parametrize("tokens", [16, 256])
def test_attention_in_bfloat16_on_a_cpu(tokens):
    """Near float64's, no token sees a later one, and the whole share drops."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, tokens, 32, dtype=torch.bfloat16)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert attend(q, k, v, 0.0).dtype == torch.bfloat16
    torch.testing.assert_close(attend(q, k, v, 0.0).double(), wanted, atol=0.03, rtol=0.02)
    later = torch.arange(tokens).view(-1, 1) > tokens // 2
    torch.testing.assert_close(
        attend(q, k.where(~later, 9), v.where(~later, 9), 0.0)[..., ~later[:, 0], :],
        attend(q, k, v, 0.0)[..., ~later[:, 0], :],
    )
    # The weights that are left, of rows that sum to 1.
    ones = attend(q, k, torch.ones_like(v), 0.25)
    assert ones.mean().item() == pytest.approx(1, abs=0.05) and ones.std() > 0.01


# --- the scripts ---


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory) -> dict[str, Path]:
    """Uninterrupted runs: twenty steps, with checkpoints after 10 and 20."""
    folders = {}
    tp = ("--tensor-parallel", 2, "--sequence-parallel", "--deterministic")
    splits = (("fsdp 4", "train_fsdp.py", ()), ("tp 2 x data 2", "train_tp.py", tp))
    for name, script, flags in splits:
        folders[name] = tmp_path_factory.mktemp("trained")
        done = train(script, 4, text, folders[name], *flags)
        assert done.returncode == 0, done.stderr
    return folders


def test_scripts_agree(trained, splits):
    expected = pytest.approx(splits["dense"]["losses"], abs=3e-6)
    for folder in trained.values():
        assert list(read_metrics(folder).values()) == expected
    first, second = (read_metrics(folder, "val_loss") for folder in trained.values())
    assert list(first) == [10, 20]
    assert first == pytest.approx(second, abs=3e-6)


OTHER_SPLITS = [
    ("fsdp 4", "train_fsdp.py", 1),
    ("fsdp 4", "train_tp.py --sequence-parallel", 2),
    ("tp 2 x data 2", "train_fsdp.py", 2),
]


@pytest.mark.parametrize(("saved", "command", "ranks"), cells(OTHER_SPLITS, *OTHER_SPLITS[1:]))
def test_resume_under_another_split(trained, text, tmp_path, saved, command, ranks):
    shutil.copytree(trained[saved] / "checkpoint_step_10", tmp_path / "checkpoint_step_10")
    script, *flags = command.split()
    done = train(script, ranks, text, tmp_path, "--resume", *flags)
    assert done.returncode == 0 and "Resumed after step 10" in done.stdout, done.stderr
    for name, first in (("loss", 11), ("val_loss", 10)):
        expected = read_metrics(trained[saved], name).items()
        rest = {step: value for step, value in expected if step >= first}
        assert read_metrics(tmp_path, name) == pytest.approx(rest, abs=3e-6)


def sample(folder: Path, length: int, *flags: object):
    command = ["distributed/sample.py", folder, "--length", length, "--device", "cpu", *flags]
    return run(sys.executable, *command)


def test_sample_in_one_process(trained):
    done = sample(trained["fsdp 4"], 40, "--prompt", "The ")
    assert done.returncode == 0, done.stderr
    written = done.stdout.split("checkpoint_step_20:\n")[1]
    assert written.startswith("The ")
    assert len(written.removesuffix("\n")) == 44


BAD = [
    # By argparse, and from one of the two.
    ("train_fsdp.py --steps 0", 2, "--steps: '0' is not a whole number of at least 1"),
    ("train_fsdp.py --heads 5", 1, "--width 32: 1, 2, 4, 8, 16 or 32 would do"),
    ("train_fsdp.py --accumulation 3", 1, "1 ranks x --accumulation 3: 6 or 9 would do"),
    ("train_fsdp.py --batch-size 7", 2, "2 ranks x --accumulation 1: 6 or 8 would do"),
    ("train_fsdp.py --hybrid 3", 2, "--hybrid 3 does not divide the 2 ranks: 1 or 2 would do"),
    ("train_fsdp.py --context 999999999", 1, "--context 999999999 is too long for the"),
    ("train_fsdp.py --data-dir /nowhere", 1, "no prepared text at /nowhere/vocabulary.json"),
    ("train_tp.py --tensor-parallel 3", 2, "2 ranks and --heads 4: 1 or 2 would do"),
    ("train_tp.py --heads 1", 2, "does not divide both 2 ranks and --heads 1: 1 would do"),
    ("train_tp.py --context 15 --sequence-parallel", 2, "2: 14 or 16 would do"),
    ("train_tp.py --accumulation 3", 2, "1 replicas x --accumulation 3: 6 or 9 would do"),
]


@pytest.mark.parametrize(("command", "ranks", "sentence"), cells(BAD, BAD[0], BAD[-1]))
def test_bad_size_is_one_sentence(text, tmp_path, command, ranks, sentence):
    script, *flags = command.split()
    done = train(script, ranks, text, tmp_path, *flags)
    assert done.returncode in (1, 2)
    assert done.stderr.count(sentence) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


def test_other_run_is_not_overwritten(trained, text):
    done = train("train_tp.py", 1, text, trained["fsdp 4"])
    assert done.returncode == 1
    assert "is from an earlier run: continue that one with --resume" in done.stderr


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
def test_evaluation_has_one_shape_on_all_ranks(text, data_ranks):
    """As many rows as a rank trains with at once: more may not fit into a GPU's memory."""
    args = Namespace(data_dir=text, context=16, eval_windows=50, batch_size=16, accumulation=2)
    shapes, counted = [], 0
    for rank in range(data_ranks):
        batches = list(token_files.fixed_batches(args, rank, data_ranks, torch.device("cpu")))
        shapes.append([(tokens.shape, targets.shape) for tokens, targets in batches])
        assert all(tokens.min() >= 0 for tokens, _ in batches)
        counted += sum((targets >= 0).sum().item() for _, targets in batches)
    assert shapes == [[((8 // data_ranks, 16),) * 2] * 7] * data_ranks
    assert counted == 50 * 16


@pytest.mark.matrix  # imports tensorboard, four times
def test_tensorboard_has_what_metrics_has(text, tmp_path):
    """After a resume from an earlier step, too: what came later is not there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for options in ([], ["--resume"]):
        done = train("train_fsdp.py", 2, text, tmp_path, "--tensorboard", *options)
        assert done.returncode == 0, done.stderr
        # The second start resumes after step 10.
        (tmp_path / "checkpoint_step_20").rename(f"{tmp_path}-{len(options)}")
        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        for name in ("loss", "val_loss", "tokens_per_second"):
            found = [(event.step, event.value) for event in board.Scalars(name)]
            if name == "val_loss" and options:
                # A resume after an evaluated step evaluates it again.
                again = found.pop(0)
                assert again == found[0]
            values = read_metrics(tmp_path, name)
            assert [step for step, _ in found] == list(values)
            assert dict(found) == pytest.approx(values, rel=1e-6)


@pytest.mark.matrix
def test_a_padded_vocabulary(text, tmp_path):
    """A multiple of 64 divides by the ranks; no character that does not exist is ever written."""
    flags = ("--pad-vocabulary", "--steps", 10)
    for script, ranks in (("train_tp.py", 2), ("train_fsdp.py", 1)):
        done = train(script, ranks, text, tmp_path / script, *flags)
        assert done.returncode == 0, done.stderr
    split, alone = (read_metrics(tmp_path / script) for script in ("train_tp.py", "train_fsdp.py"))
    assert split == pytest.approx(alone, abs=3e-6)
    manifest = tmp_path / "train_tp.py/checkpoint_step_10/manifest.json"
    whole = json.loads(manifest.read_text().splitlines()[0])
    assert whole["sizes"]["vocabulary"] % 64 == 0
    assert 0 < whole["sizes"]["vocabulary"] - whole["tokenizer"]["size"] < 64
    done = sample(tmp_path / "train_tp.py", 300)
    assert done.returncode == 0, done.stderr
    # A line break first, and one of print's.
    assert len(done.stdout.split("checkpoint_step_10:\n")[1]) == 302


def test_deterministic_leaves_what_the_user_has_set(text, tmp_path):
    code = "import os, runpy, sys; sys.argv.pop(0); sys.path.insert(0, 'distributed')\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "print([os.environ[f'NCCL_{x}'] for x in ('ALGO', 'PROTO', 'NVLS_ENABLE')])"
    command = ["distributed/train_fsdp.py", *FLAGS, "--steps", 1, "--deterministic"]
    command += ["--data-dir", text, "--checkpoint-dir", tmp_path]
    done = run(sys.executable, "-c", code, *command, env=environment(NCCL_PROTO="Tree"))
    assert done.stdout.endswith("\n['Ring', 'Tree', '0']\n"), done.stderr


COMPILED = [("train_fsdp.py", 2), ("train_tp.py --sequence-parallel", 2)]
COMPILED += [("train_tp.py --activation-checkpointing", 4)]


@pytest.mark.parametrize(("command", "ranks"), cells(COMPILED))
def test_compiled_is_equal(command, ranks, splits, text, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script, *flags = command.split()
    done = train(script, ranks, text, tmp_path, "--compile", *flags, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Compiled: True" in done.stdout
    expected = pytest.approx(splits["dense"]["losses"], abs=3e-6)
    assert list(read_metrics(tmp_path).values()) == expected


# --- on the cluster ---


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> dict[int, float]:
    """The losses of train_fsdp.py as one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert train("train_fsdp.py", 1, text, folder / "out").returncode == 0
    return read_metrics(folder / "out")


TWO = [("torchrun", "train_fsdp.py --hybrid"), ("spawn", "train_tp.py")]


@pytest.mark.parametrize(("launcher", "script"), cells(TWO, TWO[0]))
def test_launchers_give_the_same_losses(script, launcher, cluster, alone, text, tmp_path):
    """Two nodes with two ranks each; --hybrid shards inside a node, and so do the tensor-
    parallel groups."""
    command = [LAUNCHERS[launcher], *f"distributed/{script}".split(), *FLAGS, "--data-dir", text]
    job = cluster.sbatch(f"--output={tmp_path}/log", *command, "--checkpoint-dir", tmp_path / "out")
    assert job.state == "COMPLETED", job.log
    assert read_metrics(tmp_path / "out") == pytest.approx(alone, abs=1e-5)
    groups = re.findall(r"^\[Rank: \d .*(ranks \d to \d)", job.log, re.M)
    assert groups == ["ranks 0 to 1"] * 2 + ["ranks 2 to 3"] * 2, job.log


@pytest.mark.matrix
def test_a_group_across_nodes_must_be_asked_for(cluster, alone, text, tmp_path):
    size = ["--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/%j"]
    command = [*size, LAUNCHERS["torchrun"], "distributed/train_tp.py", *FLAGS, "--data-dir", text]
    refused = cluster.submit(*command)
    asked_for = cluster.submit(*command, "--across-nodes", "--checkpoint-dir", tmp_path / "out")
    job = cluster.wait(refused)
    remedy = "or accept slow steps with --across-nodes"
    assert job.state == "FAILED" and job.log.count(remedy) == 1, job.log
    job = cluster.wait(asked_for)
    assert job.state == "COMPLETED", job.log
    assert read_metrics(tmp_path / "out") == pytest.approx(alone, abs=1e-5)
