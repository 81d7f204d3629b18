"""aux/prepare_data.py: data from a web server on this machine, synthetic, and brought by hand."""

import functools
import gzip
import hashlib
import http.server
import io
import json
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision

import mnist
import prepare_data
import token_files
from slurm import cells, digits, run

SCRIPT = "aux/prepare_data.py"
TEXT = "".join(f"Line {i}: to be, or not to be.\r\n" for i in range(2000)) + "Ende: ÄÖÜ"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder that stands for the internet: small files in MNIST's format, and a text."""
    folder = tmp_path / "served"
    folder.mkdir()
    resources = []
    for split, count in (("train", 30), ("t10k", 20)):
        images = prepare_data.idx(bytes(784 * count), count, 28, 28)
        labels = prepare_data.idx(bytes(7 * i % 10 for i in range(count)), count)
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{split}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content))
            resources.append((path.name, hashlib.md5(path.read_bytes()).hexdigest()))
    (folder / "input.txt").write_bytes(TEXT.encode())

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [url])
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    monkeypatch.setattr(prepare_data, "SHAKESPEARE", f"{url}input.txt")
    md5 = hashlib.md5(TEXT.encode()).hexdigest()
    monkeypatch.setattr(prepare_data, "SHAKESPEARE_MD5", md5)
    yield folder
    server.shutdown()
    server.server_close()


def prepare(monkeypatch, *arguments: object):
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, arguments)])
    prepare_data.main()


def text_in(folder) -> str:
    assert token_files.missing_data(folder, context=16) is None
    splits = [token_files.read_tokens(folder, split).tolist() for split in ("train", "val")]
    _, decode = token_files.text_functions(token_files.read_vocabulary(folder)["tokenizer"], None)
    assert len(splits[0]) == sum(map(len, splits)) * 9 // 10
    return decode(splits[0] + splits[1])


def damaged(folder: Path) -> str:
    """What sha256sum finds; empty if nothing."""
    return run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=folder).stdout


def test_both_are_downloaded_once(served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepare(monkeypatch)
    assert "30 training and 20 test images" in capsys.readouterr().out
    assert text_in(tmp_path / "data/shakespeare") == TEXT
    assert damaged(tmp_path / "data/mnist/MNIST/raw") == ""
    assert damaged(tmp_path / "data/shakespeare") == ""
    for path in served.iterdir():
        path.unlink()
    prepare(monkeypatch)
    assert "SYNTHETIC" not in capsys.readouterr().out


def test_without_internet_both_are_made_here(served, tmp_path, monkeypatch, capsys):
    """And MNIST that was brought by hand is taken."""
    by_hand = [(path.name, path.read_bytes()) for path in served.glob("*.gz")]
    for path in served.iterdir():
        path.unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, "draw_digits", lambda count, seed: bytes(784 * count))
    prepare(monkeypatch)
    said = capsys.readouterr().out
    assert "60,000 training and 10,000 test images: SYNTHETIC" in said and "(synthetic)" in said

    with pytest.raises(SystemExit, match="move them away to download MNIST"):
        prepare(monkeypatch, "mnist")
    with pytest.raises(SystemExit, match=r"bring its four .gz files into \S+raw by hand"):
        prepare(monkeypatch, "mnist", "--data-dir", tmp_path / "other")
    for name, content in by_hand:
        (tmp_path / "other/MNIST/raw" / name).write_bytes(content)
    prepare(monkeypatch, "mnist", "--data-dir", tmp_path / "other")
    assert "30 training and 20 test images: files in MNIST's format" in capsys.readouterr().out


def test_own_data_stay(served, tmp_path, monkeypatch):
    """Of a synthetic set, and of another text."""
    prepare(monkeypatch, "mnist", "--data-dir", tmp_path / "mnist")
    with pytest.raises(SystemExit, match="give another --data-dir"):
        prepare(monkeypatch, "mnist", "--synthetic", "--data-dir", tmp_path / "mnist")

    novel = tmp_path / "novel.txt"
    novel.write_text("Call me Ishmael. " * 100)
    folder = tmp_path / "text"
    prepare(monkeypatch, "shakespeare", "--synthetic", "--data-dir", folder)
    prepare(monkeypatch, "text", "--input", novel, "--data-dir", folder)
    assert text_in(folder) == novel.read_text()
    for other in ([], ["--synthetic"]):
        with pytest.raises(SystemExit, match=r"it holds novel.txt: give another --data-dir"):
            prepare(monkeypatch, "shakespeare", "--data-dir", folder, *other)

    theirs = tmp_path / "nanogpt/train.bin"
    theirs.parent.mkdir()
    theirs.write_bytes(b"tokens")
    with pytest.raises(SystemExit, match=r"it holds token files of another program"):
        prepare(monkeypatch, "text", "--input", novel, "--data-dir", theirs.parent)
    assert theirs.read_bytes() == b"tokens"


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_own_text(tokenizer, tmp_path, monkeypatch, capsys):
    """Of several files in pieces, and again only if the text has changed."""
    pieces = functools.partial(prepare_data.pieces, characters=1000)
    monkeypatch.setattr(prepare_data, "pieces", pieces)
    novels = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for novel in novels:
        novel.write_bytes(f"{novel.stem}\r\n{TEXT}".encode())
    command = ["text", "--tokenizer", tokenizer, "--data-dir", tmp_path / "text", "--input"]
    prepare(monkeypatch, *command, *novels)
    assert text_in(tmp_path / "text") == "".join(novel.read_bytes().decode() for novel in novels)
    assert f": one.txt, two.txt, in {tmp_path}/text" in capsys.readouterr().out

    # A byte for each, because there are at most 256 different ones.
    assert token_files.read_tokens(tmp_path / "text", "train").dtype.itemsize == 1

    written = (tmp_path / "text/train.bin").stat().st_mtime_ns
    prepare(monkeypatch, *command, *novels)
    assert (tmp_path / "text/train.bin").stat().st_mtime_ns == written
    novels[0].write_text("Call me Ishmael. " * 100)
    prepare(monkeypatch, *command, *novels)
    assert text_in(tmp_path / "text").startswith("Call me Ishmael.")


class Tokenizer:
    """A stand-in for tokenizers.Tokenizer: a number for each letter, and 999 ends a text. A
    fine-tuning has left its limits."""

    from_file = classmethod(lambda cls, path: cls())
    decode = None
    cuts = pads = True
    largest = 999

    def no_truncation(self):
        self.cuts = False

    def no_padding(self):
        self.pads = False

    def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not (add_special_tokens or self.cuts or self.pads)
        return SimpleNamespace(ids=[*map(ord, text)])

    def token_to_id(self, token: str) -> int | None:
        return {"<|endoftext|>": 999}.get(token)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 97, "<|endoftext|>": self.largest}


def test_a_hugging_face_tokenizer(tmp_path, monkeypatch):
    """Its end of a text is behind every file, and the data are made anew after a change."""
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Tokenizer))
    for name, letter in (("a", "a"), ("b", "b"), ("tokenizer.json", "{")):
        (tmp_path / name).write_text(letter * 600)
    inputs = ["--input", tmp_path / "a", tmp_path / "b", "--data-dir", tmp_path / "text"]
    prepare(monkeypatch, "text", *inputs, "--tokenizer", tmp_path / "tokenizer.json")
    splits = [token_files.read_tokens(tmp_path / "text", split) for split in ("train", "val")]
    numbers = [number for split in splits for number in split.tolist()]
    assert numbers == [97] * 600 + [999] + [98] * 600 + [999]
    copy = tmp_path / "text/tokenizer.json"
    assert copy.read_text() == "{" * 600
    (tmp_path / "tokenizer.json").write_text("{}" * 600)
    prepare(monkeypatch, "text", *inputs, "--tokenizer", tmp_path / "tokenizer.json")
    assert copy.read_text() == "{}" * 600
    assert token_files.missing_data(tmp_path / "text", 16) is None

    monkeypatch.setattr(Tokenizer, "largest", 4_000_000_000)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(SystemExit, match="has token 4,000,000,000, and torch counts to 2,147,4"):
        prepare(monkeypatch, "text", *inputs, "--tokenizer", tmp_path / "tokenizer.json")
    assert copy.read_text() == "{}" * 600


@pytest.mark.parametrize("damage", ["{}", "[]", "[" * 100_000, '{"source": "x"}', "\xff"])
def test_a_vocabulary_of_somebody_else_is_left_alone(damage, tmp_path, monkeypatch):
    path, novel = tmp_path / "vocabulary.json", tmp_path / "novel.txt"
    path.write_text(damage, encoding="latin-1")
    novel.write_text("Call me Ishmael. " * 100)
    with pytest.raises(SystemExit, match=r"json is not one that prepare_data.py wrote \(.*: move "):
        prepare(monkeypatch, "text", "--input", novel, "--data-dir", tmp_path)
    assert path.read_text(encoding="latin-1") == damage and not (tmp_path / "train.bin").exists()


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def template_of(thoughts: bool):
    def template(messages: list[dict], add_generation_prompt: bool, **options) -> str:
        text = ""
        for number, message in enumerate(messages):
            last = number == len(messages) - 1
            thought = "(hm)" if thoughts and last and message["role"] == "assistant" else ""
            text += f"<{message['role']}>{thought}{message['content']}."
        return text + ("<assistant>" if add_generation_prompt else "")

    return template


def test_which_parts_of_a_conversation_are_learnt():
    """Each answer once, as the chat template shows it when it is the last."""
    messages = [{"role": "system", "content": "s"}, *CHAT]
    messages += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    plain = prepare_data.answers(messages, template_of(thoughts=False))
    first, second = ("<system>s.<user>a.<assistant>", False), ("b.", True)
    assert plain == [[first, second, ("<user>c.<assistant>", False), ("d.", True)]]
    thought = prepare_data.answers(messages, template_of(thoughts=True))
    longer = ("<system>s.<user>a.<assistant>b.<user>c.<assistant>", False)
    assert thought == [[first, ("(hm)b.", True)], [longer, ("(hm)d.", True)]]
    assert prepare_data.answers(messages[:2], template_of(thoughts=False)) == []


def test_conversations_are_packed(tmp_path, monkeypatch, capsys):
    """None is cut that fits into a window; every tenth is in val."""

    class Known:
        eos_token_id = 0
        apply_chat_template = staticmethod(template_of(thoughts=False))

        @classmethod
        def from_pretrained(cls, folder: Path, trust_remote_code: bool) -> "Known":
            assert not trust_remote_code
            return cls()

        def get_vocab(self) -> dict[str, int]:
            return {"a": 97, "z": 299}

        def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
            assert not add_special_tokens
            return SimpleNamespace(input_ids=[*map(ord, text)])

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=Known))
    (tmp_path / "tokenizer.json").write_text("{}")
    lines = [json.dumps({"messages": CHAT})] * 20
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    command = ["chat", "--input", tmp_path / "chat.jsonl", "--data-dir", tmp_path / "data"]
    command += ["--tokenizer", tmp_path, "--context", 50]
    prepare(monkeypatch, *command)
    # "<user>a.<assistant>b." has 21 tokens, so a window has two.
    assert "451 training and 51 validation tokens" in capsys.readouterr().out
    assert token_files.missing_data(tmp_path / "data", 50) is None
    assert damaged(tmp_path / "data") == ""
    text = token_files.TokenDataset(tmp_path / "data", 50, 1)
    for split, windows in (("train", 9), ("val", 1)):
        for start in range(0, 50 * windows, 50):
            inputs, targets = text.read(split, torch.tensor([start]))
            assert bytes(inputs[0].tolist()) == b"<user>a.<assistant>b." * 2 + bytes(8)
            assert targets[targets >= 0].tolist() == [*b"b.b."]
    # Again only if the template has changed
    written = []
    for shown in ("old", "old", "new"):
        (tmp_path / "chat_template.jinja").write_text(shown)
        prepare(monkeypatch, *command)
        written.append((tmp_path / "data/train.bin").stat().st_mtime_ns)
    assert written[0] == written[1] < written[2]
    (tmp_path / "chat.jsonl").write_text("\n".join([*lines, '{"message": 1}']))
    with pytest.raises(SystemExit, match=r"line 21 of chat\.jsonl is no conversation: 'messages'"):
        prepare(monkeypatch, *command)


@pytest.fixture
def few_digits(monkeypatch):
    """Fifty synthetic digits, without a stroke, instead of 70,000."""
    monkeypatch.setattr(prepare_data, "draw_digits", lambda count, seed: bytes(784 * count))
    draw = functools.partial(prepare_data.draw_mnist, 30, 20)
    monkeypatch.setattr(prepare_data, "draw_mnist", draw)


class FullDisk(io.FileIO):
    def write(self, content):
        super().write(content[: len(content) // 2])
        raise OSError(28, "No space left on device", str(self.name))


@pytest.mark.parametrize(
    ("name", "step"), [("mnist", "open"), ("shakespeare", "open"), ("mnist", "replace")]
)
@pytest.mark.parametrize("file", range(5))
def test_a_disk_that_is_full_leaves_no_half_file(
    name, step, file, tmp_path, monkeypatch, few_digits
):
    """Of the five; nor does an end before one gets its place. The next start is whole."""
    real, written = getattr(Path, step), []

    def in_turn(path, *arguments, **options):
        if step == "replace" or "w" in (*arguments, *options.values(), "")[0]:
            written.append(path)
            if len(written) == file + 1:
                if step == "open":
                    return FullDisk(path, "wb")
                raise OSError("ended")
        return real(path, *arguments, **options)

    command = [name, "--synthetic", "--data-dir", tmp_path]
    with monkeypatch.context() as patched:
        patched.setattr(Path, step, in_turn)
        with pytest.raises(SystemExit, match="cannot read or write"):
            prepare(patched, *command)
    assert not [*tmp_path.rglob(written[file].name)], "the half of a file"
    prepare(monkeypatch, *command)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 5


def test_images_are_drawn_as_a_whole(tmp_path, monkeypatch, capsys):
    """A second start changes nothing."""
    draw = functools.partial(prepare_data.draw_images, train=40, test=20)
    monkeypatch.setattr(prepare_data, "draw_images", draw)
    command = ["images", "--data-dir", tmp_path / "pets"]
    prepare(monkeypatch, *command)
    said = f"SYNTHETIC photographs in ten classes: digits in colour, in {tmp_path}/pets"
    assert said in capsys.readouterr().out
    for split, count in (("train", 40), ("test", 20)):
        read = torchvision.datasets.ImageFolder(tmp_path / "pets" / split)
        assert len(read.classes) == 10 and len(read) == count
        assert all(image.size == (400, 400) and image.mode == "RGB" for image, _ in read)
    with pytest.raises(SystemExit, match="pets is left as it is: give another --data-dir"):
        prepare(monkeypatch, *command)


def test_damage_is_found(served, tmp_path, monkeypatch):
    prepare(monkeypatch, "mnist", "--data-dir", tmp_path)
    raw = tmp_path / "MNIST/raw"
    images = bytearray((raw / "train-images-idx3-ubyte").read_bytes())
    images[1000] ^= 1
    (raw / "train-images-idx3-ubyte").write_bytes(images)
    assert damaged(raw) == "train-images-idx3-ubyte: FAILED\n"
    (raw / "train-images-idx3-ubyte").write_bytes(images[:-1])
    with pytest.raises(SystemExit, match="incomplete or damaged"):
        prepare(monkeypatch, "mnist", "--data-dir", tmp_path)


SQUARE = (3, 28, 28)
NO_PAIRS = [(SQUARE, [0, 1]), (SQUARE, [0, 1, 2, 3]), (SQUARE, [0, 1, 10]), ((3, 28, 27), [0] * 3)]


@pytest.mark.parametrize(("shape", "labels"), NO_PAIRS)
def test_labels_and_images_that_do_not_match(shape, labels, tmp_path):
    raw = digits(tmp_path, 5, 5) / "MNIST/raw"
    images = prepare_data.idx(bytes(math.prod(shape)), *shape)
    (raw / "train-images-idx3-ubyte").write_bytes(images)
    (raw / "train-labels-idx1-ubyte").write_bytes(prepare_data.idx(bytes(labels), len(labels)))
    with pytest.raises(SystemExit, match="does not hold a label from 0 to 9 for each image: move"):
        mnist.load(tmp_path)


def test_large_files_have_their_whole_checksums(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(17 << 20))
    (tmp_path / "SHA256SUMS").write_bytes(prepare_data.sums_of(tmp_path / "train.bin"))
    assert damaged(tmp_path) == ""


def test_digits_are_those_of_their_seed():
    """On every node and in every start."""
    first, again, other = (prepare_data.draw_digits(10, seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.fixture(scope="module")
def mnist_few(tmp_path_factory):
    return digits(tmp_path_factory.mktemp("mnist-few"), 1_000, 1_000)


DRAWN = [("mnist_few", (1_000, 1_000)), ("mnist_full", (60_000, 10_000))]


@pytest.mark.parametrize(("drawn", "counts"), cells(DRAWN, DRAWN[0]))
def test_synthetic_digits_are_like_mnist(drawn, counts, request):
    """No two are alike: each has its own handwriting, and no test image is a training image."""
    folder = request.getfixturevalue(drawn)
    train, test = (torchvision.datasets.MNIST(folder, train=train) for train in (True, False))
    assert (len(train), len(test)) == counts
    assert train.targets[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    images = [image.numpy().tobytes() for its in (train, test) for image in its.data[:1000]]
    assert len(set(images)) == 2000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data-dir", "here"], "--data-dir is for one data set"),
        (["mnist", "--input", "here"], "your own text takes both: text --input FILE"),
        (["text"], "your own text takes both: text --input FILE"),
        (["--tokenizer", "bytes"], "--tokenizer is for your own text"),
        (["text", "--input", "none"], "cannot read or write"),
        (["text", "--input", "latin", "--data-dir", "."], "is not UTF-8 text"),
        (["text", "--input", "file", "--data-dir", "."], "at least 1,000 are needed"),
        (["chat", "--input", "none"], "conversations take --tokenizer FOLDER"),
        (["shakespeare", "--synthetic", "--data-dir", "file"], "cannot read or write"),
    ],
)
def test_bad_command_line_folder_and_text(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("short")
    (tmp_path / "latin").write_bytes(b"\xff" * 2000)
    with pytest.raises(SystemExit) as ended:
        prepare(monkeypatch, *arguments)
    assert sentence in f"{ended.value.code}{capsys.readouterr().err}"
    assert not (tmp_path / "vocabulary.json").exists()
