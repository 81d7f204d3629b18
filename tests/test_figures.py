"""The proofs and the plots: a fault in the data's split or in the losses is told, and every
figure is drawn."""

import copy
import json
import shutil
import sys
from argparse import Namespace

import pytest

from conftest import REPOSITORY, environment, read_metrics, run

sys.path.append(str(REPOSITORY / "dev/figures"))

import plot_runs
import prove_convergence
import show_data_split

FIGURES = REPOSITORY / "docs/figures"
SPLIT = json.loads((FIGURES / "data_split.json").read_text())
LOSSES = json.loads((FIGURES / "convergence.json").read_text())


def test_without_matplotlib_it_is_one_sentence(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None; import plot_runs; plot_runs.draw({}, None)"
    )
    done = run(sys.executable, "-c", code, cwd=REPOSITORY / "aux")
    assert done.returncode == 1
    assert done.stderr == "plot_runs.py needs matplotlib: python -m pip install matplotlib\n"


# --- how the data are split ---


def of_train(reads: list) -> list:
    """The reads of training data, as lists that can be changed."""
    return [read for read in reads if read[0] == "train"]


def without_set_epoch(run: dict):
    for reads in [*run["whole"], *run["alone"]]:
        per_epoch = len(of_train(reads)) // show_data_split.EPOCHS
        for i, read in enumerate(of_train(reads)):
            read[1] = of_train(reads)[i % per_epoch][1]


def without_a_sampler(run: dict):
    first = of_train(run["whole"][0])
    for reads in run["whole"]:
        for read, same in zip(of_train(reads), first, strict=True):
            read[1] = same[1]


def whole_test_set_on_every_rank(run: dict):
    for read in [read for reads in run["whole"] for read in reads if read[0] == "test"]:
        read[1] = list(range(show_data_split.TEST_IMAGES))


def resumes_at_the_first_step(run: dict):
    for whole, resumed in zip(run["whole"], run["resumed"], strict=True):
        for read, first in zip(of_train(resumed), of_train(whole), strict=False):
            read[1] = first[1]


def splits_a_group(run: dict):
    """What a tensor-parallel group must not do."""
    for rank, reads in enumerate(run["whole"]):
        for read in of_train(reads):
            read[2] = rank


FAULTS = {
    without_set_epoch: ("train_ddp.py", ["a different order", "would have read"]),
    without_a_sampler: (
        "train_ddp.py",
        ["read once, by one rank", "one process reads", "would have read"],
    ),
    whole_test_set_on_every_rank: ("train_ddp.py", ["every test image is read once"]),
    resumes_at_the_first_step: ("train_ddp.py", ["would have read"]),
    splits_a_group: (
        "train_tp.py",
        ["share out the batch", "one process reads", "would have read"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_split_is_told(fault):
    script, told = FAULTS[fault]
    runs = copy.deepcopy(SPLIT)
    fault(runs[script])
    untrue = [sentence for sentence, holds in show_data_split.check(runs).items() if not holds]
    assert len(untrue) == len(told), untrue
    assert all(sentence.startswith(f"{script}: ") for sentence in untrue), untrue
    assert all(any(part in sentence for sentence in untrue) for part in told), untrue


@pytest.mark.matrix
def test_the_split_is_drawn_again_from_what_was_read(tmp_path, monkeypatch, capsys):
    shutil.copy2(FIGURES / "data_split.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["show_data_split.py", "--draw", "--out", str(tmp_path)])
    show_data_split.main()
    shown = capsys.readouterr().out
    assert shown.count("\nyes  ") == 14 and "VERDICT: the data are split as they should be" in shown
    assert (tmp_path / "data_split.png").stat().st_size > 10_000
    assert (tmp_path / "data_split_ddp.png").stat().st_size > 5_000
    for line in shown.splitlines()[:-1]:
        assert line in (REPOSITORY / "docs/tested.md").read_text(), (
            "the document shows a real output"
        )


@pytest.mark.matrix  # twelve runs of three scripts
def test_the_split_of_the_scripts_themselves(tmp_path):
    done = run(sys.executable, "dev/figures/show_data_split.py", "--out", tmp_path, timeout=600)
    assert done.returncode == 0 and "VERDICT" in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "data_split.json").read_text()) == SPLIT, (
        "the same on every machine"
    )


# --- the same losses ---


def test_the_published_losses_agree(tmp_path, monkeypatch, capsys):
    """With table and figure drawn again; the table is the document's."""
    shutil.copy2(FIGURES / "convergence.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["prove_convergence.py", "--draw", "--out", str(tmp_path)])
    prove_convergence.main(prove_convergence.parse_arguments())
    *table, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("VERDICT: all launchers agree") and len(table) > 25
    assert "\n".join(table).strip() in (REPOSITORY / "docs/tested.md").read_text()
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    for training, runs in zip(LOSSES["trainings"], ("image_runs", "text_runs"), strict=True):
        planned = getattr(prove_convergence, runs)(container="--container" in LOSSES["command"])
        assert [run["name"] for run in training["runs"]] == [run.name for run in planned]


def changed(number: int, change) -> dict:
    """The published images, with the losses of one run changed."""
    training = copy.deepcopy(LOSSES["trainings"][0])
    run = training["runs"][number]
    run["losses"] = {step: change(int(step), loss) for step, loss in run["losses"].items()}
    return training


def test_a_run_that_differs_is_told(capsys):
    limit = LOSSES["trainings"][0]["limit"]
    [fault] = prove_convergence.judge(
        changed(3, lambda step, loss: loss + 3 * limit * (step == 50))
    )
    assert f"'{LOSSES['trainings'][0]['runs'][3]['name']}'" in fault and "in step 50" in fault
    [fault] = prove_convergence.judge(
        changed(3, lambda step, loss: float("nan") if step == 50 else loss)
    )
    assert "differ by inf in step 50" in fault


def test_a_comparison_that_shows_nothing_is_told(capsys):
    same = LOSSES["trainings"][0]["runs"][0]["losses"]
    training = changed(-1, lambda step, loss: same[str(step)])
    training["runs"][-1]["evaluations"] = training["runs"][0]["evaluations"]
    [fault] = prove_convergence.judge(training)
    assert fault.startswith("the images do not show that a learning rate is 1 % higher")


def test_losses_of_a_plain_log():
    log = (
        "epoch=1 step=1/2 loss=2.5 x\nepoch=1 step=2/2 loss=2.25 x\nepoch=1 test_loss=2.0 "
        "test_accuracy=0.5\n"
    )
    log += log.replace("epoch=1", "epoch=2").replace("2.5", "1.5")
    losses, evaluations = prove_convergence.read_log(log)
    assert losses == {1: 2.5, 2: 2.25, 3: 1.5, 4: 2.25} and evaluations == {2: 2.0, 4: 2.0}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [([], "no sbatch here: run it on a login node"), (["--draw"], "no losses at ")],
)
def test_what_the_proof_lacks_is_one_sentence(options, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prove_convergence.py", *options, "--out", str(tmp_path)])
    monkeypatch.setattr(prove_convergence.shutil, "which", lambda tool: None)
    with pytest.raises(SystemExit, match=f"prove_convergence.py: {sentence}"):
        prove_convergence.main(prove_convergence.parse_arguments())


# --- plots of runs ---


def write_run(folder, scale: float):
    folder.mkdir()
    events = [{"step": step, "loss": scale / step, "images_per_second": 9.0} for step in (1, 2, 3)]
    events.append({"step": 3, "test_loss": scale / 3, "test_accuracy": 0.9})
    text = "".join(json.dumps(event) + "\n" for event in events)
    # A hole, and half a line.
    (folder / "metrics.jsonl").write_text(text + '\0\0{"step": 2')


@pytest.mark.matrix
def test_runs_are_drawn(tmp_path):
    """A folder and a file; what cannot be read is skipped, and no part of a picture is left."""
    write_run(tmp_path / "7", 100)
    write_run(tmp_path / "8", 200)
    found = plot_runs.curves(plot_runs.read(tmp_path / "7"), "loss")
    assert found == {"loss": ([1, 2, 3], [100, 50, 100 / 3]), "test_loss": ([3], [100 / 3])}
    command = [sys.executable, "aux/plot_runs.py", tmp_path / "7", tmp_path / "8/metrics.jsonl"]
    done = run(*command, "--out", tmp_path / "both")
    assert done.returncode == 0 and done.stdout.endswith("up to step 3\n"), done.stderr
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "both.svg").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"7", "8", "both.png", "both.svg"}


def test_a_run_is_drawn_again_while_it_goes_on(tmp_path, monkeypatch):
    """First it has not begun, then it has begun, then nothing is new, then it has gone on."""
    drawn, waits = [], []

    def next_wait(seconds: float):
        waits.append(seconds)
        if len(waits) == 1:
            write_run(tmp_path / "run", 100)
        if len(waits) == 3:
            with (tmp_path / "run/metrics.jsonl").open("a") as file:
                file.write('00}\n{"step": 250, "loss": 0.5}\n')
        if len(waits) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(plot_runs.time, "sleep", next_wait)
    monkeypatch.setattr(plot_runs, "draw", lambda runs, out: drawn.append(runs))
    args = Namespace(runs=[tmp_path / "run"], out=tmp_path / "out", watch=3.0)
    with pytest.raises(KeyboardInterrupt):
        plot_runs.main(args)
    assert [len(runs[str(tmp_path / "run")]) for runs in drawn] == [4, 5] and set(waits) == {3.0}


def test_no_metrics_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"no metrics in .*nowhere: is it a --checkpoint-dir"):
        plot_runs.main(Namespace(runs=[tmp_path / "nowhere"], out=tmp_path / "out", watch=None))


# --- TensorBoard ---


@pytest.mark.matrix  # imports tensorboard, four times
def test_tensorboard_has_what_metrics_has(text, tmp_path):
    """After a resume from an earlier step, too: what came later is not there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train = ["./torchrun.sh", "distributed/train_fsdp.py", "--checkpoint-dir", tmp_path]
    train += ["--log-every", 1, "--checkpoint-every", 5, "--tensorboard", "--device", "cpu"]
    train += ["--data-dir", text, "--batch-size", 8, "--steps", 10, "--eval-every", 5]
    train += ["--eval-windows", 50, "--layers", 1, "--heads", 2, "--width", 16, "--context", 16]
    for options in ([], ["--resume"]):
        done = run(*train, *options, env=environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1))
        assert done.returncode == 0, done.stderr
        newest = max(
            tmp_path.glob("checkpoint_step_*"), key=lambda path: int(path.stem.split("_")[-1])
        )
        # The second start resumes after step 5.
        newest.rename(tmp_path.with_name(f"{tmp_path.name}-{len(options)}"))
        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        for name in ("loss", "val_loss", "tokens_per_second"):
            found = [(event.step, event.value) for event in board.Scalars(name)]
            if name == "val_loss" and options:
                # A resume after an evaluated step evaluates it again.
                again = found.pop(0)
                assert again == found[0]
            events = [event for event in read_metrics(tmp_path) if name in event]
            assert [step for step, _ in found] == [event["step"] for event in events]
            values = [event[name] for event in events]
            assert [value for _, value in found] == pytest.approx(values, rel=1e-6)
