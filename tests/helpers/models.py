"""Small models of Hugging Face's kind, and what train_fsdp.py saves and logs."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hugging_face
from sizes import SIZES, new_config
from slurm import environment, run
from transformer import Transformer

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 96, "head_dim": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
CONTEXT, BATCH_SIZE, STEPS, WARMUP_STEPS = 16, 8, 12, 3
FLAGS = [x for name, value in SHAPE.items() for x in (f"--{name.replace('_', '-')}", str(value))]
FLAGS += f"--context {CONTEXT} --batch-size {BATCH_SIZE} --steps {STEPS}".split()
FLAGS += f"--warmup-steps {WARMUP_STEPS} --learning-rate 0.001 --precision fp32".split()
FLAGS += ["--log-every", "1", "--eval-every", "6", "--eval-windows", "50"]
# Of four ranks that share them the last one has none.
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERT_FLAGS = [x for name, n in EXPERTS.items() for x in (f"--{name.replace('_', '-')}", str(n))]
FLAGS += ["--save-every", "6", "--device", "cpu"]


def values(log: str, name: str = "loss") -> dict[int, float]:
    """The values of one name by step."""
    found = re.findall(rf"^step=(\d+)/\d+ (?:.* )?{name}=(\S+)", log, re.M)
    return {int(step): float(value) for step, value in found}


TP = "train_fsdp.py --tensor-parallel 2"


def saved_state(path: Path, part: str) -> dict:
    dcp_to_torch_save(path, path / "whole.pt")
    return torch.load(path / "whole.pt", weights_only=False)[part]


def random_model(folder: Path, **changed: object) -> Transformer:
    """A model whose weights are all random numbers of bfloat16, in a folder."""
    small = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    model = Transformer(new_config(SIZES["cpu"] | small, 64, 256) | changed)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight).bfloat16().float()
    hugging_face.write(folder, model, dict(model.named_parameters()).__getitem__)
    return model


def python(packages: dict, *command: object, ranks: int = 0) -> str:
    """What a command prints, of so many ranks, or, with 0, without the variables of a rank."""
    start = ["aux/launch/spawn_ranks.py"] if ranks else []
    env = environment(**packages, NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1)
    done = run(sys.executable, *start, *command, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def qwen(packages, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    python(packages, "tests/scripts/tiny_qwen.py", folder)
    return folder
