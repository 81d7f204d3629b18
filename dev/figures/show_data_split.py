"""Which rank reads which samples, in which step and epoch: a check and a figure, of the train scripts themselves.

    python dev/figures/show_data_split.py             # starts them with torchrun on the CPU, on tiny data
    python dev/figures/show_data_split.py --draw      # the figure again, from what was read the last time

The scripts run as they are; only what they read is written down: in TensorDataset's __getitem__ and in characters.py.
Checked are train_ddp.py (DistributedSampler), train_preemptible.py (RunSampler), train_fsdp.py, and train_tp.py with
two tensor-parallel groups: each sample once, none on two ranks, another order in each epoch, the same order after a
resume, and in every step the batch that one process would have. Exit status 1 if it is not so.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "distributed"))

from resilience.arguments import ArgumentParser

RANKS, EPOCHS, IMAGES, TEST_IMAGES, BATCH = 4, 3, 26, 11, 8  # the last 2 of 26 images are no whole batch
STEPS = IMAGES // BATCH  # of an epoch, and of the text
TINY = ["--layers", "1", "--heads", "2", "--width", "8", "--context", "8", "--eval-every", str(STEPS)]
SCRIPTS = {  # arguments, and the checkpoint from which a second run resumes
    "train_ddp.py": (["--epochs", str(EPOCHS)], "checkpoint_epoch_1.pt"),
    "train_preemptible.py": (["--epochs", str(EPOCHS), "--checkpoint-every", "5"], "checkpoint_step_5.pt"),
    "train_fsdp.py": ([*TINY, "--steps", str(STEPS), "--checkpoint-every", "2"], "checkpoint_step_2"),
    "train_tp.py": ([*TINY, "--steps", str(STEPS), "--checkpoint-every", "2"], "checkpoint_step_2"),
}


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="no runs: check and figure from data_split.json in --out")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/figures", help="folder of data_split.json, .svg")
    parser.add_argument("--record", nargs=argparse.REMAINDER, metavar="FOLDER SCRIPT", help="what the ranks run")
    return parser.parse_args()


def main(args: Namespace):
    if args.record:
        return record(Path(args.record[0]), args.record[1:])
    import style

    found = args.out / "data_split.json"
    if not args.draw:
        with tempfile.TemporaryDirectory() as folder:
            runs = run_all(Path(folder))
        found.parent.mkdir(parents=True, exist_ok=True)
        found.write_text(json.dumps(runs).replace('], "', '],\n"') + "\n")
    try:
        runs = json.loads(found.read_text())
    except OSError as error:
        sys.exit(f"show_data_split.py: no record at {found} ({error.strerror}): run it without --draw first")
    draw(style, runs, found.with_suffix(".svg"))
    checks = check(runs)
    for sentence, holds in checks.items():
        print(f"{'yes' if holds else 'NO ':3}  {sentence}")
    if not all(checks.values()):
        sys.exit(f"show_data_split.py: {list(checks.values()).count(False)} of these do not hold")
    print(f"VERDICT: the data are split as they should be; figure in {found.with_suffix('.svg')}")


# --- on every rank ----------------------------------------------------------------------------------------------------


def record(folder: Path, command: list[str]):
    """Runs a train script as it stands. Every read is a line in `folder`: of what, the indices, and the data rank."""
    script = Path(command[0])
    sys.argv, sys.path[0] = command, str(script.resolve().parent)
    import torch
    from torch.utils.data import TensorDataset

    rank = os.environ.get("RANK", "0")
    file = (folder / f"{rank}.jsonl").open("w", buffering=1)  # the scripts end by os._exit

    def write(split: str, indices, data_rank: int):
        file.write(json.dumps([split, torch.as_tensor(indices).tolist(), data_rank]) + "\n")

    getitem = TensorDataset.__getitem__

    def seen(self, index):
        write("train" if len(self) == IMAGES else "test", index, int(rank))
        return getitem(self, index)

    TensorDataset.__getitem__ = seen
    if script.name in ("train_fsdp.py", "train_tp.py"):
        import characters

        read, random_batch, fixed_batches, starts = (
            characters.read,
            characters.random_batch,
            characters.fixed_batches,
            [],
        )

        def read_seen(windows, begin, device):
            starts[:] = [begin]
            return read(windows, begin, device)

        def random_seen(args, windows, step, data_rank, data_ranks, device):
            batch = random_batch(args, windows, step, data_rank, data_ranks, device)
            write("train", starts[0], data_rank)
            return batch

        def fixed_seen(args, data_rank, data_ranks, device):
            for tokens, targets in fixed_batches(args, data_rank, data_ranks, device):
                counted = targets[:, 0] != characters.IGNORED  # a batch with too few windows is filled up
                write("test", starts[0][counted], data_rank)
                yield tokens, targets

        characters.read, characters.random_batch, characters.fixed_batches = read_seen, random_seen, fixed_seen
    runpy.run_path(str(script), run_name="__main__")


# --- the runs ---------------------------------------------------------------------------------------------------------


def run_all(folder: Path) -> dict[str, dict]:
    """Every script on four ranks, resumed, and as one process: for each the reads of each rank."""
    images, text = write_images(folder / "images"), write_text(folder)
    runs = {}
    for script, (arguments, checkpoint) in SCRIPTS.items():
        plain = script == "train_ddp.py"
        common = [f"distributed/{script}", *arguments, "--device", "cpu", "--dropout", "0", "--batch-size", str(BATCH)]
        common += ["--data-dir", str(images if "--epochs" in arguments else text)]
        common += [] if plain else ["--keep-checkpoints", "9"]
        whole, resumed, alone = (folder / f"{script}-{name}" for name in ("whole", "resumed", "alone"))
        runs[script] = {"whole": launch(whole, RANKS, common)}
        (resumed / "out").mkdir(parents=True)
        saved = whole / "out" / checkpoint
        (shutil.copytree if saved.is_dir() else shutil.copy2)(saved, resumed / "out" / checkpoint)
        runs[script]["resumed"] = launch(resumed, RANKS, [*common, "--resume"])
        runs[script]["alone"] = launch(alone, 1, common)
        if script == "train_preemptible.py":  # its first batch is read once more, for a pass that is discarded
            runs[script] = {name: [reads[1:] for reads in ranks] for name, ranks in runs[script].items()}
    return runs


def launch(folder: Path, ranks: int, command: list[str]) -> list[list]:
    """Runs the command on so many ranks. Returns the reads of each rank."""
    folder.mkdir(exist_ok=True)
    print(f"{command[0]}, {ranks} rank{'s' * (ranks > 1)}{', resumed' * ('--resume' in command)}", flush=True)
    stray = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "NNODES")
    env = {name: value for name, value in os.environ.items() if not name.startswith(stray)}
    env |= {"NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    start = ["./torchrun.sh"] if ranks > 1 else [sys.executable]
    whole = [*start, str(Path(__file__).relative_to(REPOSITORY)), "--record", str(folder), *command]
    whole += ["--checkpoint-dir", str(folder / "out")]
    done = subprocess.run(whole, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"show_data_split.py: {command[0]} has failed: {done.stderr.strip()[-1000:]}")
    return [[json.loads(line) for line in (folder / f"{r}.jsonl").read_text().splitlines()] for r in range(ranks)]


def write_images(folder: Path) -> Path:
    """Black images in MNIST's format: which ones are read does not depend on what is in them."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for split, count in (("train", IMAGES), ("t10k", TEST_IMAGES)):
        size = count.to_bytes(4, "big")
        header = b"\0\0\x08\x03" + size + (28).to_bytes(4, "big") * 2
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + bytes(784 * count))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + size + bytes(count))
    return folder


def write_text(folder: Path) -> Path:
    """The first 1,100 characters of the README, prepared."""
    (folder / "text.txt").write_text((REPOSITORY / "README.md").read_text()[:1100])
    prepare = ["aux/prepare_data.py", "shakespeare", "--input", folder / "text.txt", "--data-dir", folder / "text"]
    subprocess.run([sys.executable, *prepare], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder / "text"


# --- check ------------------------------------------------------------------------------------------------------------


def batches(ranks: list[list], split: str) -> list[list[tuple]]:
    """By step, and in it by rank: the indices and the data rank. Raises ValueError if ranks have unequal numbers."""
    return list(zip(*[[(read[1], read[2]) for read in reads if read[0] == split] for reads in ranks], strict=True))


def whole_batch(step: list[tuple]) -> list[int]:
    """What all data ranks have read in a step, by data rank. Ranks of one tensor-parallel group count once."""
    parts = {data_rank: indices for indices, data_rank in reversed(step)}
    return [index for data_rank in sorted(parts) for index in parts[data_rank]]


def check(runs: dict[str, dict]) -> dict[str, bool]:
    """What is promised of the split, in sentences, and whether it holds."""
    holds = {}
    for script, run in runs.items():
        steps, tests = batches(run["whole"], "train"), batches(run["whole"], "test")
        resumed, alone = batches(run["resumed"], "train"), batches(run["alone"], "train")
        if script in ("train_ddp.py", "train_preemptible.py"):
            holds |= check_epochs(script, steps, tests)
        else:
            holds |= check_groups(script, steps, tests, batches(run["alone"], "test"))
        same = [sorted(whole_batch(step)) for step in steps] == [sorted(whole_batch(step)) for step in alone]
        holds[f"{script}: in every step {RANKS} ranks read the batch that one process reads"] = same
        after = len(steps) - len(resumed)
        again = 0 < len(resumed) < len(steps) and resumed == steps[after:]
        holds[f"{script}: resumed after step {after}, every rank reads what it would have read"] = again
    return holds


def check_epochs(script: str, steps: list, tests: list) -> dict[str, bool]:
    """Of a data set that is read in epochs."""
    epochs = [steps[i * STEPS : (i + 1) * STEPS] for i in range(EPOCHS)]
    orders = [[index for step in epoch for index in whole_batch(step)] for epoch in epochs]
    once = all(len(set(order)) == len(order) == STEPS * BATCH and set(order) <= set(range(IMAGES)) for order in orders)
    left = IMAGES - STEPS * BATCH
    tested = [sorted(whole_batch(step)) == list(range(TEST_IMAGES)) for step in tests]
    return {
        f"{script}: in an epoch each image is read once, by one rank; {left} of {IMAGES} are no whole batch": once,
        f"{script}: every epoch has another order": len(set(map(tuple, orders))) == EPOCHS,
        f"{script}: after each epoch every test image is read once": all(tested) and len(tested) == EPOCHS,
    }


def check_groups(script: str, steps: list, tests: list, tests_alone: list) -> dict[str, bool]:
    """Of sequences that are drawn at random, with replacement: a sample is a place in the batch."""
    groups = [tuple(data_rank for _, data_rank in step) for step in steps]
    expected = (0, 0, 1, 1) if script == "train_tp.py" else (0, 1, 2, 3)
    equal = all(
        len({tuple(indices) for indices, of in step if of == group}) == 1 for step in steps for group in expected
    )
    sizes = {len(whole_batch(step)) for step in steps}
    seen, windows = ([index for step in run for index in whole_batch(step)] for run in (tests, tests_alone))
    who = "the ranks of a tensor-parallel group read the same, the groups" if script == "train_tp.py" else "the ranks"
    return {
        f"{script}: {who} share out the batch": set(groups) == {expected} and equal and sizes == {BATCH},
        f"{script}: every step has other sequences": len({tuple(whole_batch(step)) for step in steps}) == len(steps),
        f"{script}: every window of the validation text is read once": sorted(seen) == sorted(set(windows))
        and len(seen) % BATCH > 0,
    }


# --- figure -----------------------------------------------------------------------------------------------------------


def cell(style, axis, x: float, y: float, rank: int, text: object):
    """A filled cell: in the colour of a rank, which also stands in it or beside it."""
    axis.add_patch(style.plt.Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, color=style.COLOURS[rank], linewidth=0))
    axis.text(x + 0.5, y + 0.53, str(text), ha="center", va="center", color="white", fontsize=7, fontweight="bold")


def draw(style, runs: dict[str, dict], path: Path):
    """Two panels of images by epoch, where a cell has its rank's number; two of places in the batch, by rank."""
    figure, axes = style.subplots(4, 1, 8, 9, height_ratios=(6, 5, 4, 4))
    for axis, script in zip(axes[:, 0], runs, strict=True):
        axis.grid(False)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        draw_panel = draw_epochs if script in ("train_ddp.py", "train_preemptible.py") else draw_places
        draw_panel(style, axis, script, runs[script])
    style.save(figure, path, "Which rank reads which samples")
    style.plt.close(figure)


def draw_epochs(style, axis, script: str, run: dict):
    steps, resumed = batches(run["whole"], "train"), batches(run["resumed"], "train")
    after = len(steps) - len(resumed)
    rows = [(f"epoch {i + 1}", steps[i * STEPS : (i + 1) * STEPS]) for i in range(EPOCHS)]
    for i in range(EPOCHS):
        again = resumed[max(0, i * STEPS - after) : max(0, (i + 1) * STEPS - after)]
        rows += [(f"epoch {i + 1}, resumed after step {after}", again)] if again else []
    if script == "train_ddp.py":
        rows += [("test images", batches(run["whole"], "test")[:1])]
    for y, (_, epoch) in enumerate(rows):
        for step in epoch:
            for rank, (indices, _) in enumerate(step):
                for index in indices:
                    cell(style, axis, index, y, rank, rank)
    sampler = {"train_ddp.py": "DistributedSampler", "train_preemptible.py": "RunSampler"}[script]
    axis.set_title(f"{script}, {sampler}: the rank (0 to {RANKS - 1}) that reads an image")
    axis.set(xlim=(0, IMAGES), ylim=(len(rows), 0), xlabel="image")
    axis.set_xticks([i + 0.5 for i in range(0, IMAGES, 5)], range(0, IMAGES, 5))
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [name for name, _ in rows])


def draw_places(style, axis, script: str, run: dict):
    steps = batches(run["whole"], "train")
    for number, step in enumerate(steps):
        for rank, (indices, data_rank) in enumerate(step):
            for i, index in enumerate(indices):
                cell(style, axis, number * (BATCH + 0.6) + data_rank * len(indices) + i, rank, data_rank, index)
    titles = {
        "train_fsdp.py": "where in the text a rank's sequences begin, by their place in the batch of a step",
        "train_tp.py": "the same, where ranks 0 and 1 are a tensor-parallel group, and ranks 2 and 3",
    }
    axis.set_title(f"{script}: {titles[script]}")
    axis.set(xlim=(0, len(steps) * (BATCH + 0.6)), ylim=(RANKS, 0))
    axis.set_xticks(
        [i * (BATCH + 0.6) + BATCH / 2 for i in range(len(steps))], [f"step {i + 1}" for i in range(len(steps))]
    )
    axis.set_yticks([y + 0.5 for y in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])


if __name__ == "__main__":
    main(parse_arguments())
