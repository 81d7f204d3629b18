"""token_files.py: data that are damaged or a stranger's, and which windows a rank reads."""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import token_files


def test_damaged_data_are_refused(text, tmp_path):
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    assert token_files.missing_data(folder, 16) is None
    whole = (folder / "train.bin").stat().st_size
    for size in (100, whole + 1):
        os.truncate(folder / "train.bin", size)
        fault = token_files.missing_data(folder, 16)
        assert fault.startswith(f"{folder}/train.bin is not as long as vocabulary.json beside it")
    shutil.copytree(text, folder, dirs_exist_ok=True)
    with (folder / "val.bin").open("r+b") as file:
        file.write(b"\xff")
    fault = token_files.missing_data(folder, 16)
    assert fault.startswith(f"{folder}/val.bin has token 255, and the vocabulary ends at ")


def of_bytes(**changed: object) -> dict:
    """The tokenizer's entry in vocabulary.json."""
    return {"tokenizer": {"name": "bytes", "size": 256} | changed}


VOCABULARIES = [
    ({"dtype": "int7"}, "its dtype is int7, not one of "),
    ({"dtype": "\x1b]52;c;AAAA\x07"}, "its dtype is ?]52;c;AAAA?, not one of "),
    ({"dtype": None}, "its dtype is None, not of type str"),
    ({"id": 5}, "its id is 5, not of type str"),
    ({"source": None}, "its source is None, not of type str"),
    ({"train_tokens": "900"}, "its train_tokens is '900', not of type int"),
    ({"packed": "16"}, "its packed is '16', not of type int"),
    ({"tokenizer": ["bytes", 256]}, "its tokenizer is ['bytes', 256], not of type dict"),
    (of_bytes(size="256"), "its size is '256', not of type int"),
    (of_bytes(size=65.5), "its size is 65.5, not of type int"),
    (of_bytes(size=True), "its size is True, not of type int"),
    (of_bytes(size=1 << 40), "its size is 1099511627776"),
    (of_bytes(name=None), "its name is None, not of type str"),
    (of_bytes(name="characters"), "its characters is None, not of type list"),
    (of_bytes(name="characters", size=2, characters=["a", 5]), "it has 1 characters, not 2"),
    (of_bytes(name="characters", size=1, characters=["a", "b"]), "it has 2 characters, not 1"),
    ("5", "its JSON is no object"),
    ("[" * 100_000, "its JSON is too deep"),
]


@pytest.mark.parametrize(("changed", "sentence"), VOCABULARIES)
def test_a_vocabulary_from_anywhere_is_a_sentence(changed, sentence, text, tmp_path):
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    said = changed
    if isinstance(changed, dict):
        said = json.dumps(json.loads((folder / "vocabulary.json").read_text()) | changed)
    (folder / "vocabulary.json").write_text(said)
    fault = token_files.missing_data(folder, 16)
    what = f"{folder}: vocabulary.json is not one that aux/prepare_data.py wrote ({sentence}"
    assert fault.startswith(what) and fault.isprintable() and len(fault) < 600


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 12345, 1 << 20])
def test_a_shuffled_order_has_each_place_once(count):
    places, orders = torch.arange(count), []
    for seed in (0, 1):
        orders.append(token_files.shuffled(places, count, seed))
        assert orders[-1].sort().values.equal(places)
    if count > 1000:
        pairs = [(orders[0], places), (orders[0], orders[1]), (orders[0][1:], orders[0][:-1])]
        for pair in pairs:
            assert torch.corrcoef(torch.stack(pair).double())[0, 1].abs() < 4 / math.sqrt(count)


def write_numbers(folder: Path, count: int, **said: object) -> Path:
    """Token files of 0, 1, 2, ... in train and in val."""
    folder.mkdir()
    for split in ("train", "val"):
        np.arange(count, dtype=np.uint16).tofile(folder / f"{split}.bin")
    described = {"dtype": "uint16", "source": "", "id": "", "train_tokens": count}
    described |= {"tokenizer": {"name": "tokenizer.json", "size": count}, "val_tokens": count}
    (folder / "vocabulary.json").write_text(json.dumps(described | said))
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_window_once_an_epoch(ranks, tmp_path):
    """On any number of ranks; the next epoch has other windows, in another order."""
    text = token_files.TokenDataset(write_numbers(tmp_path / "text", 1000), 9, batch_size=8, seed=1)
    assert text.per_epoch == 110 and "; an epoch is 13.8 steps" in str(text)
    found = []
    for step in range(1, 29):
        parts = [text.batch(step, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
        assert {part[2] for part in parts} == {8 * 9}
        for inputs, targets, _ in parts:
            assert inputs.shape == (8 // ranks, 9) and targets.equal(inputs + 1)
            found += inputs[:, 0].tolist()
    epochs = [found[:110], found[110:220]]
    for epoch in epochs:
        assert np.diff(sorted(epoch)).tolist() == [9] * 109 and epoch != sorted(epoch)
    assert set(epochs[0]).isdisjoint(epochs[1])
    assert found[:16] == [int(x) for x in text.starts(torch.arange(16))], "as on one rank"


def test_a_text_needs_one_token_more_than_the_context(tmp_path):
    """A window's last target."""
    folder = write_numbers(tmp_path / "text", 9)
    fault = token_files.missing_data(folder, 9)
    assert fault == f"--context 9 is too long for the 9 tokens in {folder}/train.bin: 8 would do"
    inputs, targets, _ = token_files.TokenDataset(folder, 8, 1).batch(1, 0, 1, torch.device("cpu"))
    assert inputs.tolist() == [[*range(8)]] and targets.tolist() == [[*range(1, 9)]]


def test_windows_of_conversations(tmp_path):
    """All begin where they were packed, and what is not the model's to write does not count."""
    folder = write_numbers(tmp_path / "text", 10 * 20 + 1, packed=10)
    for split in ("train", "val"):
        (np.arange(201) // 2 % 3 == 0).astype(np.uint8).tofile(folder / f"{split}.mask")
    (folder / "val.mask").rename(tmp_path / "val.mask")
    assert f"no prepared text at {folder}/val.mask (No" in token_files.missing_data(folder, 10)
    (tmp_path / "val.mask").rename(folder / "val.mask")
    for context in (9, 11):
        said = f"packed for --context 10, not {context}"
        assert said in token_files.missing_data(folder, context)
    text = token_files.TokenDataset(folder, context=10, batch_size=4)
    starts = []
    for step in range(1, 11):
        inputs, targets, count = text.batch(step, 0, 1, torch.device("cpu"))
        starts += inputs[:, 0].tolist()
        counts = (inputs + 1) // 2 % 3 == 0
        assert targets.equal((inputs + 1).where(counts, token_files.IGNORED))
        halves = [text.batch(step, rank, 2, torch.device("cpu")) for rank in (0, 1)]
        assert {half[2] for half in halves} == {count} and count == counts.sum()
    assert sorted(starts) == sorted(2 * list(range(0, 200, 10)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_has_one_shape_on_all_ranks(text, ranks):
    rows, shapes, counted = 8 // ranks, [], 0
    its = token_files.TokenDataset(text, 16, 8)
    for rank in range(ranks):
        batches = list(its.eval_batches(50, rows, rank, ranks))
        shapes.append([(tokens.shape, targets.shape) for tokens, targets in batches])
        assert all(tokens.min() >= 0 for tokens, _ in batches)
        counted += sum((targets >= 0).sum().item() for _, targets in batches)
    assert shapes == [[((rows, 16),) * 2] * 7] * ranks
    assert counted == 50 * 16


def test_evaluation_reaches_the_end_of_a_long_text(tmp_path):
    """float32 knows no 33,554,435. Of the files all but the end is a hole."""
    folder, count = write_numbers(tmp_path / "text", 20), 33_554_437
    with (folder / "val.bin").open("r+b") as file:
        file.truncate(2 * count - 4)
        file.seek(0, os.SEEK_END)
        file.write(np.array([5, 7], np.uint16).tobytes())
    said = json.loads((folder / "vocabulary.json").read_text()) | {"val_tokens": count}
    (folder / "vocabulary.json").write_text(json.dumps(said))
    [(inputs, targets)] = token_files.TokenDataset(folder, 1, 3).eval_batches(3, 3, 0, 1)
    assert inputs.tolist() == [[0], [0], [5]] and targets.tolist()[2] == [7]


def test_a_text_that_is_larger_than_the_memory(text, tmp_path):
    """Ten times as large, nearly all of it a hole."""
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    count = 10 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.truncate(folder / "train.bin", count)
    said = json.loads((folder / "vocabulary.json").read_text()) | {"train_tokens": count}
    (folder / "vocabulary.json").write_text(json.dumps(said))
    inputs, _, _ = token_files.TokenDataset(folder, 64, 8).batch(1, 0, 1, torch.device("cpu"))
    assert inputs.shape == (8, 64) and inputs.sum() == 0


# --- text to numbers, and back ---


class Tokenizer:
    """As the package tokenizers has it, for two kinds of ends."""

    from_file = classmethod(lambda cls, path: cls())
    no_truncation = no_padding = lambda self: None
    token_to_id = {"<|endoftext|>": 7, "</s>": 2}.get

    def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(ids=[*map(ord, text)])

    def decode(self, numbers: list[int]) -> str:
        return "".join(map(chr, numbers))


def test_every_tokenizer_there_and_back(tmp_path, monkeypatch):
    """What it does not know is a sentence."""
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Tokenizer))
    kinds = [{"name": "bytes", "size": 256}, {"name": "tokenizer.json", "size": 123}]
    kinds += [{"name": "characters", "size": 3, "characters": ["x", "y", "z"]}]
    for kind, numbers in zip(kinds, [[122, 120]] * 2 + [[2, 0]], strict=True):
        encode, decode = token_files.text_functions(kind, tmp_path)
        assert encode("zx") == numbers and decode(numbers) == "zx"
        if kind["name"] != "bytes":
            said = r"\['{'\] are not among the 3 characters"
            if kind["name"] == "tokenizer.json":
                said = "has token 123, and the vocabulary ends at 122: it is another one's tokeni"
            with pytest.raises(ValueError, match=said):
                encode("{")
    assert token_files.end_tokens({"eos_token_id": 5}, None) == [5]
    assert token_files.end_tokens({"eos_token_id": [5, 6]}, tmp_path) == [5, 6, 7, 2]
    assert token_files.end_tokens({"eos_token_id": None}, None) == []
    with pytest.raises(SystemExit, match=r"needs the tokenizer\.json that made the tokens: --tok"):
        token_files.text_functions(kinds[1], None)
    monkeypatch.setattr(Tokenizer, "from_file", None)
    with pytest.raises(SystemExit, match=f"{tmp_path} is not a Hugging Face tokenizer's file: "):
        token_files.text_functions(kinds[1], tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="this needs the package tokenizers: pip install tokeni"):
        token_files.text_functions(kinds[1], tmp_path)


def test_what_is_said_of_the_data(text):
    dataset = token_files.TokenDataset(text, 16, 8)
    its = dataset.vocabulary
    count, size = its["train_tokens"], its["tokenizer"]["size"]
    said = rf"{re.escape(its['source'])}, {count} \w+ of {size} kinds, in {text}; an epoch is (\S+)"
    steps = re.fullmatch(f"{said} steps", str(dataset))[1]
    assert float(steps) == pytest.approx(count // 16 / 8, abs=0.2)


def test_a_json_file_may_not_be_large(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('{"a": 1}')
    monkeypatch.setattr(token_files, "LARGEST", 8)
    assert token_files.read_object(tmp_path / "a.json") == {"a": 1}
    monkeypatch.setattr(token_files, "LARGEST", 7)
    with pytest.raises(ValueError, match=r"a\.json has more than 7 bytes"):
        token_files.read_object(tmp_path / "a.json")
