"""docs/fine_tuning.md: a tiny Hugging Face model is tuned on any number of ranks, resumes, and is
loaded by transformers again."""

import re
import sys

import pytest

from conftest import environment, run

pytestmark = pytest.mark.matrix

SCRIPT = "tests/guests/fine_tune.py"
# A random Qwen3 of two layers, and a tokenizer with a token for each byte.
MAKE = """
import sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(sys.argv[1])
torch.manual_seed(1)
config = Qwen3Config(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    tie_word_embeddings=True)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
"""
# The loss of a saved model on the batch of a step
LOSS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = AutoTokenizer.from_pretrained(sys.argv[1])(Path(sys.argv[2]).read_text()).input_ids
sequences = torch.tensor(tokens[: len(tokens) // 32 * 32]).view(-1, 32)
generator = torch.Generator().manual_seed(int(sys.argv[3]))
batch = sequences[torch.randint(len(sequences), (8,), generator=generator)]
with torch.no_grad():
    print(model(batch, labels=batch).loss.item())
"""


def python(packages: dict, *command: object, ranks: int = 1) -> str:
    start = [] if ranks == 0 else ["distributed/spawn_ranks.py"]
    env = environment(**packages, NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1)
    done = run(sys.executable, *start, *command, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tiny_model(packages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    python(packages, "-c", MAKE, folder / "model", ranks=0)
    (folder / "text").write_text("".join(f"{i} is less than {i + 1}.\n" for i in range(2000)))
    return folder


def tune(packages, tiny_model, out, *options, ranks: int = 1) -> dict[int, float]:
    where = ["--model", tiny_model / "model", "--text", tiny_model / "text", "--out", out]
    sizes = ["--batch-size", 8, "--context", 32, "--learning-rate", 0.01, "--save-every", 10]
    log = python(packages, SCRIPT, *where, *sizes, *options, ranks=ranks)
    found = re.findall(r"^step=(\d+)/\d+ loss=(\S+)$", log, re.M)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("lora", [[], ["--lora", 4]], ids=["full", "lora"])
def test_tuned(lora, packages, tiny_model, tmp_path):
    """Two ranks learn what one learns, a run goes on with another number of them, and
    transformers has the model's loss."""
    one = tune(packages, tiny_model, tmp_path / "one", "--steps", 30, *lora)
    assert one[30] < one[10] < 5.6
    tune(packages, tiny_model, tmp_path / "two", "--steps", 20, *lora, ranks=2)
    resumed = tune(packages, tiny_model, tmp_path / "two", "--steps", 30, *lora)
    assert list(resumed) == [30] and resumed[30] == pytest.approx(one[30], abs=1e-3)
    saved = [tmp_path / name / "model" for name in ("one", "two")]
    losses = [
        float(python(packages, "-c", LOSS, path, tiny_model / "text", 30, ranks=0))
        for path in saved
    ]
    assert losses[0] < one[30] and losses[1] == pytest.approx(losses[0], abs=1e-3)
