"""Which rank reads which samples in which step: a check and a figure of the real train scripts.

    python dev/figures/show_data_split.py             # starts them on the CPU, on tiny data
    python dev/figures/show_data_split.py --draw      # the figure again, from the last record

The scripts run as they are, on four ranks, resumed, and as one process. This records their reads in
TensorDataset.__getitem__ and in token_files.py. Exit status 1 if a rule does not hold.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS, EPOCHS, TEST_IMAGES, BATCH = 4, 3, 11, 8
# The last 2 of 26 images are no whole batch.
IMAGES, STEPS = 26, 3
TINY = ["--layers", "1", "--heads", "2", "--width", "8", "--context", "8", "--eval-every", "3"]
TINY += ["--steps", "3"]
# The arguments of each script, and of the run that is then resumed, after epoch 1 or step 2.
SCRIPTS = {
    "train_ddp.py": (["--epochs", "3"], ["--epochs", "1"]),
    "train_fsdp.py": (TINY, [*TINY, "--checkpoint-every", "2"]),
    "train_tp.py": (TINY, [*TINY, "--checkpoint-every", "2"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw", action="store_true", help="no runs: from --out's data_split.json")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/figures")
    args = parser.parse_args()

    record = args.out / "data_split.json"
    if not args.draw:
        with tempfile.TemporaryDirectory() as folder:
            runs = run_all(Path(folder))
        record.write_text(json.dumps(runs).replace('], "', '],\n"') + "\n")
    if not record.exists():
        sys.exit(f"show_data_split.py: no record at {record}: run it without --draw first")
    runs = json.loads(record.read_text())
    draw(runs, record.with_suffix(".png"))
    # For chapter 3.
    draw({"train_ddp.py": runs["train_ddp.py"]}, args.out / "data_split_ddp.png")
    checks = check(runs)
    for sentence, holds in checks.items():
        print(f"{'yes' if holds else 'NO ':3}  {sentence}")
    if not all(checks.values()):
        sys.exit("show_data_split.py: not all of these hold")
    print(f"VERDICT: the data are split as they should be; figure in {record.with_suffix('.png')}")


# --- on every rank ---


def record_reads(folder: Path, command: list[str]):
    """Runs a train script. Every read is a line in `folder`: split, indices, data rank."""
    script = Path(command[0])
    sys.argv, sys.path[0] = command, str(script.resolve().parent)
    import torch
    from torch.utils.data import TensorDataset

    # By torchrun. launch() removes Slurm's variables, so without it this is the only process.
    rank = os.environ.get("RANK", "0")
    # Line by line, because the scripts end by os._exit.
    file = (folder / f"{rank}.jsonl").open("w", buffering=1)

    def write(split: str, indices, data_rank: int):
        file.write(json.dumps([split, torch.as_tensor(indices).tolist(), data_rank]) + "\n")

    getitem = TensorDataset.__getitem__

    def getitem_seen(self, index):
        write("train" if len(self) == IMAGES else "test", index, int(rank))
        return getitem(self, index)

    TensorDataset.__getitem__ = getitem_seen
    if script.name in ("train_fsdp.py", "train_tp.py"):
        record_text(write)
    runpy.run_path(str(script), run_name="__main__")


def record_text(write):
    import token_files

    read, random, fixed = token_files.read, token_files.random_batch, token_files.fixed_batches
    starts = []

    def read_seen(windows, begin, device):
        starts[:] = [begin]
        return read(windows, begin, device)

    def random_seen(args, windows, step, data_rank, data_ranks, device):
        batch = random(args, windows, step, data_rank, data_ranks, device)
        write("train", starts[0], data_rank)
        return batch

    def fixed_seen(args, data_rank, data_ranks, device):
        for tokens, targets in fixed(args, data_rank, data_ranks, device):
            # A batch with too few windows is filled up with ignored ones.
            write("test", starts[0][targets[:, 0] != token_files.IGNORED], data_rank)
            yield tokens, targets

    token_files.read = read_seen
    token_files.random_batch, token_files.fixed_batches = random_seen, fixed_seen


# --- the runs ---


def run_all(folder: Path) -> dict[str, dict]:
    """Each script on four ranks, resumed, and as one process: the reads of each rank."""
    data = {"images": write_images(folder / "images"), "text": write_text(folder)}
    runs = {}
    for script, (arguments, shorter) in SCRIPTS.items():
        kind = "images" if "--epochs" in arguments else "text"
        command = [f"distributed/{script}", "--device", "cpu"]
        command += ["--batch-size", str(BATCH), "--data-dir", str(data[kind])]
        whole, resumed, alone = (folder / f"{script}-{n}" for n in ("whole", "resumed", "alone"))
        runs[script] = {"whole": launch(whole, RANKS, [*command, *arguments])}
        launch(resumed, RANKS, [*command, *shorter])
        shutil.rmtree(resumed / "out/checkpoint_step_3", ignore_errors=True)
        runs[script]["resumed"] = launch(resumed, RANKS, [*command, *arguments, "--resume"])
        runs[script]["alone"] = launch(alone, 1, [*command, *arguments])
    return runs


def launch(folder: Path, ranks: int, command: list[str]) -> list[list]:
    folder.mkdir(exist_ok=True)
    print(command[0], f"on {ranks} ranks", "--resume" * ("--resume" in command), flush=True)
    stray = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "NNODES")
    env = {name: value for name, value in os.environ.items() if not name.startswith(stray)}
    env |= {"NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "RECORD": str(folder)}
    start = ["./torchrun.sh"] if ranks > 1 else [sys.executable]
    this = str(Path(__file__).relative_to(REPOSITORY))
    command = [*start, this, *command, "--checkpoint-dir", str(folder / "out")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode != 0:
        sys.exit(f"show_data_split.py: a script has failed: {done.stderr.strip()[:1000]}")
    files = [folder / f"{rank}.jsonl" for rank in range(ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def write_images(folder: Path) -> Path:
    """Black images in MNIST's format, because the order does not depend on their content."""
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for split, count in (("train", IMAGES), ("t10k", TEST_IMAGES)):
        size = count.to_bytes(4, "big")
        header = b"\0\0\x08\x03" + size + (28).to_bytes(4, "big") * 2
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + bytes(784 * count))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + size + bytes(count))
    return folder


def write_text(folder: Path) -> Path:
    """1,100 characters of LICENSE, prepared."""
    text, data = folder / "text.txt", folder / "text"
    text.write_text((REPOSITORY / "LICENSE").read_text()[:1100])
    prepare = ["aux/prepare_data.py", "text", "--input", text, "--data-dir", data]
    subprocess.run(
        [sys.executable, *prepare], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
    )
    return data


# --- check ---


def batches(ranks: list[list], split: str) -> list[list[tuple]]:
    """By step, and in it by rank: the indices and the data rank."""
    reads = [[(read[1], read[2]) for read in rank if read[0] == split] for rank in ranks]
    return list(zip(*reads, strict=True))


def whole_batch(step: list[tuple]) -> list[int]:
    """The reads of all data ranks in a step. A tensor-parallel group counts once."""
    parts = {data_rank: indices for indices, data_rank in reversed(step)}
    return [index for data_rank in sorted(parts) for index in parts[data_rank]]


def check(runs: dict[str, dict]) -> dict[str, bool]:
    """The rules of the split, as sentences, and whether each holds."""
    holds = {}
    for script, run in runs.items():
        steps, tests = batches(run["whole"], "train"), batches(run["whole"], "test")
        resumed, alone = batches(run["resumed"], "train"), batches(run["alone"], "train")
        if script == "train_ddp.py":
            holds |= check_epochs(script, steps, tests)
        else:
            holds |= check_groups(script, steps, tests, batches(run["alone"], "test"))
        ours, one = ([sorted(whole_batch(s)) for s in side] for side in (steps, alone))
        holds[f"{script}: in every step {RANKS} ranks read the batch that one process reads"] = (
            ours == one
        )
        after = len(steps) - len(resumed)
        same = 0 < len(resumed) < len(steps) and resumed == steps[after:]
        sentence = f"resumed after step {after}, every rank reads what it would have read"
        holds[f"{script}: {sentence}"] = same
    return holds


def check_epochs(script: str, steps: list, tests: list) -> dict[str, bool]:
    """Of a data set that is read in epochs."""
    epochs = [steps[i * STEPS : (i + 1) * STEPS] for i in range(EPOCHS)]
    orders = [[index for step in epoch for index in whole_batch(step)] for epoch in epochs]
    once = all(len(set(order)) == len(order) == STEPS * BATCH for order in orders)
    tested = [sorted(whole_batch(step)) == list(range(TEST_IMAGES)) for step in tests]
    left = f"{IMAGES - STEPS * BATCH} of {IMAGES} are no whole batch"
    return {
        f"{script}: in an epoch each image is read once, by one rank; {left}": once,
        f"{script}: every epoch has a different order": len(set(map(tuple, orders))) == EPOCHS,
        f"{script}: after each epoch every test image is read once": tested == [True] * EPOCHS,
    }


def check_groups(script: str, steps: list, tests: list, alone: list) -> dict[str, bool]:
    """Of sequences that are drawn at random, with replacement."""
    expected, who = [0, 1, 2, 3], "the ranks share out the batch"
    if script == "train_tp.py":
        expected = [0, 0, 1, 1]
        who = "the ranks of a tensor-parallel group read the same, the groups share out the batch"
    shared = True
    for step in steps:
        parts = {(tuple(indices), data_rank) for indices, data_rank in step}
        shared &= [data_rank for _, data_rank in step] == expected
        shared &= len(parts) == len(set(expected)) and len(whole_batch(step)) == BATCH
    seen, windows = ([i for step in run for i in whole_batch(step)] for run in (tests, alone))
    return {
        f"{script}: {who}": shared,
        f"{script}: every step has different sequences": len({tuple(whole_batch(s)) for s in steps})
        == STEPS,
        f"{script}: every window of the validation text is read once": sorted(seen)
        == sorted(windows)
        and len(set(seen)) == len(seen) > BATCH,
    }


# --- figure ---


def draw(runs: dict[str, dict], path: Path):
    """A panel for each script: images by epoch, or places in the batch by rank."""
    import style

    heights = (6, 4, 4)[: len(runs)]
    figure, axes = style.subplots(len(runs), 1, 8, 0.44 * sum(heights), height_ratios=heights)
    titles = {
        "train_ddp.py": "DistributedSampler: the rank (0 to 3) that reads an image",
        "train_fsdp.py": "where in the text a rank's sequences begin, by place in the batch",
        "train_tp.py": "the same; ranks 0 and 1 are a tensor-parallel group, and ranks 2 and 3",
    }
    for axis, (script, run) in zip(axes[:, 0], runs.items(), strict=True):
        axis.grid(False)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.set_title(f"{script}, {titles[script]}")
        draw_panel = draw_epochs if script == "train_ddp.py" else draw_places
        draw_panel(style, axis, run)
    style.save(figure, path)


def cell(style, axis, x: float, y: float, rank: int, text: int):
    patch = style.plt.Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, color=style.COLOURS[rank], lw=0)
    axis.add_patch(patch)
    axis.text(x + 0.5, y + 0.53, text, ha="center", va="center", color="white", fontsize=7)


def draw_epochs(style, axis, run: dict):
    steps, resumed = batches(run["whole"], "train"), batches(run["resumed"], "train")
    after = len(steps) - len(resumed)
    rows = []
    for i in range(EPOCHS):
        begin, end = i * STEPS, (i + 1) * STEPS
        rows.append((f"epoch {i + 1}", steps[begin:end]))
        if end > after:
            again = resumed[max(0, begin - after) : end - after]
            rows.append((f"epoch {i + 1}, resumed after step {after}", again))
    rows.append(("test images", batches(run["whole"], "test")[:1]))
    for y, (_, epoch) in enumerate(rows):
        for step in epoch:
            for rank, (indices, _) in enumerate(step):
                for index in indices:
                    cell(style, axis, index, y, rank, rank)
    axis.set(xlim=(0, IMAGES), ylim=(len(rows), 0), xlabel="image")
    axis.set_xticks([i + 0.5 for i in range(0, IMAGES, 5)], range(0, IMAGES, 5))
    axis.set_yticks([y + 0.5 for y in range(len(rows))], [name for name, _ in rows])


def draw_places(style, axis, run: dict):
    width = BATCH + 0.6
    for number, step in enumerate(batches(run["whole"], "train")):
        for rank, (indices, data_rank) in enumerate(step):
            for i, index in enumerate(indices):
                x = number * width + data_rank * len(indices) + i
                cell(style, axis, x, rank, data_rank, index)
    axis.set(xlim=(0, STEPS * width), ylim=(RANKS, 0))
    steps = range(STEPS)
    axis.set_xticks([i * width + BATCH / 2 for i in steps], [f"step {i + 1}" for i in steps])
    axis.set_yticks([y + 0.5 for y in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])


if __name__ == "__main__":
    if "RECORD" in os.environ:
        record_reads(Path(os.environ["RECORD"]), sys.argv[1:])
    else:
        main()
