"""aux/prepare_data.py against a web server on this machine: resumed, checked, whole or not at all, one sentence."""

import array
import gzip
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "aux" / "prepare_data.py"
sys.path.insert(0, str(SCRIPT.parent))
import prepare_data
from figures.draw_digits import draw_digits
from resilience import checksums

TEXT = "".join(f"Line {i}: to be, or not to be, that is the question.\r\n" for i in range(2000)) + "Ende: ÄÖÜ"


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` {name: bytes} with Range; `limits` {name: n}: the first reply ends, or hangs, after n bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.limits, self.ranges, self.asked, self.hang = {}, {}, [], [], 0
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, *_):
        pass  # a client that was killed


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        self.server.asked.append(name)
        if name not in self.server.files:
            return self.send_error(404)
        content, span = self.server.files[name], self.headers["Range"]
        if span:
            self.server.ranges.append(span)
            start = int(span.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self.send_error(416)
            content = content[start:]
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        limit = self.server.limits.pop(name, len(content))
        self.wfile.write(content[:limit])
        self.wfile.flush()
        if limit < len(content):
            time.sleep(self.server.hang)

    def log_message(self, *_):
        pass


def idx(*dimensions: int, content: bytes) -> bytes:
    return b"".join(n.to_bytes(4, "big") for n in (0x800 + len(dimensions), *dimensions)) + content


def real_set(seed: int = 0) -> dict[str, bytes]:
    """Four small IDX files that play MNIST: 60 and 20 images."""
    files = {}
    for split, count in (("train", 60), ("t10k", 20)):
        pixels = hashlib.shake_256(bytes([seed, count])).digest(count * 784)
        files[f"{split}-images-idx3-ubyte"] = idx(count, 28, 28, content=pixels)
        files[f"{split}-labels-idx1-ubyte"] = idx(count, content=bytes(pixel % 10 for pixel in pixels[:count]))
    return files


@pytest.fixture
def server(monkeypatch):
    """A running Server that plays every mirror, with a small MNIST and a small Tiny Shakespeare on it."""
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.mnist = real_set()
    server.files = {f"{name}.gz": gzip.compress(content) for name, content in server.mnist.items()}
    server.files["input.txt"] = TEXT.encode()
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in server.mnist.items()}
    monkeypatch.setattr(prepare_data, "MNIST_SHA256", sums)
    monkeypatch.setattr(prepare_data, "MNIST_COUNTS", {"train": 60, "t10k": 20})
    monkeypatch.setattr(prepare_data, "MNIST_MIRRORS", [server.url])
    monkeypatch.setattr(prepare_data, "SHAKESPEARE_MIRRORS", [server.url])
    monkeypatch.setattr(prepare_data, "SHAKESPEARE_SHA256", hashlib.sha256(TEXT.encode()).hexdigest())
    monkeypatch.setattr(prepare_data, "TIMEOUT", 1)
    yield server
    server.shutdown()
    server.server_close()


def run(*arguments) -> None:
    prepare_data.main([str(argument) for argument in arguments])


def refused(capsys, *arguments) -> str:
    """Run what must fail; return the one sentence."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        run(*arguments)
    if isinstance(ending.value.code, str):  # what the interpreter prints on stderr, with status 1
        print(ending.value.code, file=sys.stderr)
    assert ending.value.code not in (0, None)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "Traceback" not in sentence
    return sentence


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files but the one with the checksums, by name."""
    files = {path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS"}
    return {path.name: path.read_bytes() for path in files}


def decoded(folder: Path) -> str:
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    tokens = array.array({"uint8": "B", "uint16": "H"}[vocabulary["dtype"]])
    for split in ("train", "val"):
        before = len(tokens)
        tokens.frombytes((folder / f"{split}.bin").read_bytes())
        assert len(tokens) - before == vocabulary[f"{split}_tokens"]
    if sys.byteorder == "big":
        tokens.byteswap()
    return "".join(vocabulary["characters"][token] for token in tokens)


# --- download ---------------------------------------------------------------------------------------------------------


def test_mnist_is_downloaded_once(server, tmp_path, capsys):
    run("mnist", "--data-dir", tmp_path)
    assert contents(tmp_path) == server.mnist
    assert (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file()
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    asked = len(server.asked)
    run("mnist", "--data-dir", tmp_path)
    assert "already there" in capsys.readouterr().out.splitlines()[-1]
    assert len(server.asked) == asked and times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_no_argument_is_both_data_sets(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run()
    assert contents(tmp_path / "data" / "mnist") == server.mnist
    assert decoded(tmp_path / "data" / "shakespeare") == TEXT


def test_no_argument_and_no_internet_is_both_drawn_here(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for mirrors in ("MNIST_MIRRORS", "SHAKESPEARE_MIRRORS"):
        monkeypatch.setattr(prepare_data, mirrors, ["http://no-such-host.invalid/"])
    monkeypatch.setattr(prepare_data, "MNIST_COUNTS", {"train": 20, "t10k": 10})
    run()
    shown = capsys.readouterr().out
    assert shown.count("SYNTHETIC data are made instead") == 2 and "synthetic digits, written" in shown
    assert (tmp_path / "data/mnist/MNIST/raw/t10k-labels-idx1-ubyte").stat().st_size == 8 + 10
    vocabulary = json.loads((tmp_path / "data/shakespeare/vocabulary.json").read_text())
    assert vocabulary["source"] == "Python documentation (synthetic)"


def test_cut_connection_is_resumed_in_the_same_run(server, tmp_path):
    server.limits["train-images-idx3-ubyte.gz"] = 10_000
    run("mnist", "--data-dir", tmp_path)
    assert server.ranges == ["bytes=10000-"] and contents(tmp_path) == server.mnist


def test_silent_server_is_left_and_asked_for_the_rest(server, tmp_path):
    server.limits["input.txt"], server.hang = 1234, 3
    run("shakespeare", "--data-dir", tmp_path)
    assert server.ranges == ["bytes=1234-"] and decoded(tmp_path) == TEXT


def test_next_mirror_takes_over(server, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "MNIST_MIRRORS", ["http://127.0.0.1:9/", server.url + "nothing/", server.url])
    run("mnist", "--data-dir", tmp_path)
    assert contents(tmp_path) == server.mnist


@pytest.mark.parametrize("sign, status", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ended_run_leaves_only_a_part_that_the_next_resumes(server, tmp_path, sign, status):
    server.limits["input.txt"], server.hang = 20_000, 3
    start = f"import prepare_data as p; p.SHAKESPEARE_MIRRORS = ['{server.url}']; p.main()"
    command = [sys.executable, "-c", start, "shakespeare", "--data-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        part = tmp_path / "input.txt.part"
        deadline = time.monotonic() + 10
        while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(sign)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == status and "Traceback" not in errors
    assert len(errors.splitlines()) == (1 if sign == signal.SIGINT else 0)
    assert list(contents(tmp_path)) == ["input.txt.part"]
    size = part.stat().st_size
    run("shakespeare", "--data-dir", tmp_path)
    assert server.ranges == [f"bytes={size}-"] and decoded(tmp_path) == TEXT and not part.exists()


def test_wrong_checksum_leaves_nothing(server, tmp_path, capsys):
    server.files["t10k-labels-idx1-ubyte.gz"] = gzip.compress(b"something else")
    assert "wrong checksum" in refused(capsys, "mnist", "--data-dir", tmp_path)
    left = contents(tmp_path)
    assert "t10k-labels-idx1-ubyte.gz.part" not in left and not set(left) & set(server.mnist)


@pytest.mark.parametrize("part", [b"<html>log in first</html>", b"x" * 10_000_000])
def test_part_of_another_file_is_begun_anew(server, tmp_path, part):
    (tmp_path / "input.txt.part").write_bytes(part)
    run("shakespeare", "--data-dir", tmp_path)
    assert decoded(tmp_path) == TEXT


def test_no_internet_says_what_to_bring_and_takes_it(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare_data, "MNIST_MIRRORS", ["http://no-such-host.invalid/"])
    begin = time.monotonic()
    sentence = refused(capsys, "mnist", "--data-dir", tmp_path)
    assert time.monotonic() - begin < 10
    raw = tmp_path / "MNIST" / "raw"
    assert str(raw) in sentence and "--synthetic" in sentence and "t10k-labels-idx1-ubyte.gz" in sentence
    assert contents(tmp_path) == {}
    raw.mkdir(parents=True, exist_ok=True)
    for name, content in server.mnist.items():
        (raw / f"{name}.gz").write_bytes(gzip.compress(content))
    run("mnist", "--data-dir", tmp_path)
    assert server.mnist.items() <= contents(tmp_path).items()
    (raw / "t10k-labels-idx1-ubyte").unlink()
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(b"half")
    assert "t10k-labels-idx1-ubyte.gz is wrong" in refused(capsys, "mnist", "--data-dir", tmp_path)


# --- what is already there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [lambda content: content[:-1], lambda content: b"<html>" + content, lambda _: b""])
def test_broken_file_is_replaced(server, tmp_path, capsys, spoil):
    run("mnist", "--data-dir", tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    path.write_bytes(spoil(path.read_bytes()))
    server.asked.clear()
    run("mnist", "--data-dir", tmp_path)
    assert contents(tmp_path) == server.mnist and server.asked == ["train-labels-idx1-ubyte.gz"]
    assert f"{path} is damaged and will be replaced" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--synthetic",)])
def test_own_data_is_never_replaced(server, tmp_path, capsys, flags):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in real_set(seed=1).items():
        (raw / name).write_bytes(content)
    before = contents(tmp_path)
    assert "--data-dir" in refused(capsys, "mnist", "--data-dir", tmp_path, *flags)
    assert contents(tmp_path) == before and not server.asked


@pytest.mark.parametrize("flags", [(), ("--synthetic",)])
@pytest.mark.parametrize("name", ["mnist", "shakespeare"])
def test_checksums_find_what_has_changed(server, tmp_path, name, flags):
    run(name, "--data-dir", tmp_path, *flags)
    [sums] = tmp_path.rglob("SHA256SUMS")
    check = ["sha256sum", "--check", "--strict", "--quiet", sums.name]
    assert subprocess.run(check, cwd=sums.parent, capture_output=True).stdout == b""
    assert checksums.damaged(sums.parent) is None
    for path in sums.parent.iterdir():
        if path != sums:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            assert str(path) in checksums.damaged(sums.parent)
            path.write_bytes(whole)


def test_damaged_digit_is_drawn_again(server, tmp_path, capsys):
    run("mnist", "--data-dir", tmp_path, "--synthetic")
    drawn, path = contents(tmp_path), tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    run("mnist", "--data-dir", tmp_path, "--synthetic")
    assert f"{path} is damaged and will be replaced" in capsys.readouterr().out and contents(tmp_path) == drawn


def test_synthetic_digits_give_way_to_mnist_but_not_the_reverse(server, tmp_path, capsys):
    run("mnist", "--data-dir", tmp_path, "--synthetic")
    drawn = contents(tmp_path)
    run("mnist", "--data-dir", tmp_path, "--synthetic")
    assert "already there" in capsys.readouterr().out.splitlines()[-1] and contents(tmp_path) == drawn
    run("mnist", "--data-dir", tmp_path)
    assert contents(tmp_path) == server.mnist
    assert "synthetic one and will be replaced" in capsys.readouterr().out
    assert "MNIST itself" in refused(capsys, "mnist", "--data-dir", tmp_path, "--synthetic")
    assert contents(tmp_path) == server.mnist


def test_full_disk_changes_nothing(server, tmp_path, capsys, monkeypatch):
    run("shakespeare", "--data-dir", tmp_path, "--synthetic")
    before = contents(tmp_path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_data.os, "fsync", full)
    assert "No space left on device" in refused(capsys, "shakespeare", "--data-dir", tmp_path)
    left = contents(tmp_path)
    assert left.pop("input.txt.part") == TEXT.encode() and left == before
    assert "No space left" in refused(capsys, "mnist", "--data-dir", tmp_path / "m", "--synthetic")
    assert contents(tmp_path / "m") == {}


def test_conflicting_files(server, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for dataset in ("mnist", "shakespeare"):
        assert str(tmp_path / "file") in refused(capsys, dataset, "--synthetic", "--data-dir", tmp_path / "file")
    (tmp_path / "text" / "val.bin").mkdir(parents=True)
    assert "val.bin: Is a directory" in refused(capsys, "shakespeare", "--synthetic", "--data-dir", tmp_path / "text")
    assert contents(tmp_path / "text") == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_write_permission(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(capsys, "shakespeare", "--synthetic", "--data-dir", tmp_path)


# --- synthetic digits -------------------------------------------------------------------------------------------------


def test_synthetic_files_are_idx_with_cyclic_labels(server, tmp_path):
    run("mnist", "--data-dir", tmp_path, "--synthetic")
    files = contents(tmp_path)
    for split, count in (("train", 60), ("t10k", 20)):
        images, labels = files[f"{split}-images-idx3-ubyte"], files[f"{split}-labels-idx1-ubyte"]
        assert labels == idx(count, content=bytes(range(10)) * (count // 10))
        assert images[:16] == idx(count, 28, 28, content=b"") and len(images) == 16 + count * 784
    assert files["train-images-idx3-ubyte"][16:][: 20 * 784] != files["t10k-images-idx3-ubyte"][16:]  # other seeds


@pytest.mark.matrix
def test_synthetic_digits_are_too_varied_for_a_linear_model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    images, unseen = (
        torch.frombuffer(bytearray(draw_digits(count, seed)), dtype=torch.uint8).view(-1, 1, 28, 28) / 255
        for seed, count in enumerate((6000, 2000))
    )
    again = draw_digits(1000, seed=1)
    assert again == (unseen[:1000] * 255).round().byte().numpy().tobytes()
    labels, truth = torch.arange(6000) % 10, torch.arange(2000) % 10

    def accuracy(model: nn.Module, rate: float, epochs: int) -> float:
        optimizer = torch.optim.Adam(model.parameters(), rate)
        for _ in range(epochs):
            for batch in torch.randperm(6000).split(100):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch] - 0.17), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            return (model(unseen - 0.17).argmax(1) == truth).float().mean().item()

    linear = accuracy(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), 2e-3, epochs=8)
    convolution = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten())
    network = accuracy(nn.Sequential(*convolution, nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10)), 2e-3, epochs=4)
    print(f"linear={linear:.3f} network={network:.3f}")
    assert 0.6 < linear < 0.88 < 0.9 < network


# --- text -------------------------------------------------------------------------------------------------------------


def test_text_round_trip_ninety_to_ten(server, tmp_path, capsys):
    run("shakespeare", "--data-dir", tmp_path)
    vocabulary = json.loads((tmp_path / "vocabulary.json").read_text())
    assert decoded(tmp_path) == TEXT and set(contents(tmp_path)) == {"train.bin", "val.bin", "vocabulary.json"}
    assert vocabulary["characters"] == sorted(set(TEXT)) and vocabulary["dtype"] == "uint8"
    assert vocabulary["train_tokens"] == len(TEXT) * 9 // 10 and vocabulary["source"] == "Tiny Shakespeare"
    assert vocabulary["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    run("shakespeare", "--data-dir", tmp_path)
    assert "already there" in capsys.readouterr().out and len(server.asked) == 1
    (tmp_path / "val.bin").write_bytes(b"")
    run("shakespeare", "--data-dir", tmp_path)
    assert "incomplete" in capsys.readouterr().out and decoded(tmp_path) == TEXT


def test_many_characters_take_two_bytes(tmp_path):
    text = "".join(chr(0x4E00 + i % 300) for i in range(5000)) + "😀"
    (tmp_path / "chinese.txt").write_bytes(text.encode())
    run("shakespeare", "--data-dir", tmp_path / "out", "--input", tmp_path / "chinese.txt")
    vocabulary = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert vocabulary["dtype"] == "uint16" and vocabulary["source"] == "chinese.txt"
    assert len(vocabulary["characters"]) == 301 and decoded(tmp_path / "out") == text
    assert (tmp_path / "out" / "val.bin").stat().st_size == 2 * vocabulary["val_tokens"]
    assert (tmp_path / "out" / "train.bin").read_bytes()[:4] == b"\x00\x00\x01\x00"


def test_synthetic_text(tmp_path):
    run("shakespeare", "--data-dir", tmp_path, "--synthetic")
    assert "statement" in decoded(tmp_path)
    assert json.loads((tmp_path / "vocabulary.json").read_text())["source"] == "Python documentation (synthetic)"


def test_own_text_gives_way_only_to_itself(server, tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_text(TEXT + "first")
    run("shakespeare", "--data-dir", tmp_path / "out", "--synthetic")
    run("shakespeare", "--data-dir", tmp_path / "out", "--input", text)
    text.write_text(TEXT + "second", newline="")
    run("shakespeare", "--data-dir", tmp_path / "out", "--input", text)
    for flags in ((), ("--synthetic",)):
        assert "own.txt" in refused(capsys, "shakespeare", "--data-dir", tmp_path / "out", *flags)
    assert decoded(tmp_path / "out") == TEXT + "second"


@pytest.mark.parametrize(
    "content, word",
    [
        (None, "No such file"),
        (b"short", "too short"),
        (b"\xff\xfe" * 1000, "not UTF-8"),
        ("".join(map(chr, [*range(0xD800), *range(0xE000, 0x13000)])).encode(), "65,536"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, capsys, content, word):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert word in refused(capsys, "shakespeare", "--data-dir", tmp_path / "out", "--input", tmp_path / "text")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data-dir", "x"],
        ["all", "--input", "x"],
        ["mnist", "--input", "x"],
        ["shakespeare", "--synthetic", "--input", "x"],
        ["shakespeare", "--input", "nowhere.txt", "--data-dir", "x"],
    ],
)
def test_command_line_fails_with_one_sentence(tmp_path, arguments):
    result = subprocess.run([sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1 and not contents(tmp_path)
