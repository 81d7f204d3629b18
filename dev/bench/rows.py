"""What the benchmarks of `make bench` have in common: how sides take turns, what a row holds, how it is judged.

A row says how many times as fast as another way of working ours is: the median of the ratios of its rounds. Beside it
stand the ratio of the quickest rounds, which a busy machine changes least, and those by clock and by CPU. The gate on
quality is judged with it: speed that costs a worse model is a row missed.
"""

import contextlib
import dataclasses
import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

HEADS = ("row", "other side", "ratio", "rounds", "quickest", "by clock", "by CPU", "at least", "verdict", "quality")
PARTS = {  # of a step, by the names that torch's profiler has for its operators
    "products": r"aten::(mm|bmm|addmm|baddbmm)",
    "convolutions": r"aten::(mkldnn_convolution|convolution_backward)",
    "pooling": r"aten::max_pool2d_with_indices.*",
    "attention": r"aten::_scaled_dot_product_flash_attention.*",
    "GELU": r"aten::gelu.*",
    "LayerNorm": r"aten::native_layer_norm.*",
    "optimizer": r"aten::_(fused|foreach)_.*|Optimizer\.step.*",
    "all-reduces": r"EnterSplitBackward|ReduceSplit|c10d::allreduce_|_c10d_functional::(all_reduce|wait_tensor)",
}
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler tells of its start and end, in lines of its own
MOST_BUSY = 0.2  # CPUs that other programs may use in a round that is judged by the clock


@dataclass
class Row:
    """Of a benchmark. `ours` and `theirs` are (wall, CPU) seconds for the same work, an item for each round.

    `least` is 0 where nothing is promised. `quality` says in words what was asked of the result besides, `good` whether
    it holds. `missing` is why the row was not measured at all. `by_cpu`: judged by CPU seconds, for work in one thread;
    else by the clock, and then `busy` are the CPUs that other programs used in each round.
    """

    name: str
    other: str
    least: float
    ours: list[tuple[float, float]] = field(default_factory=list)
    theirs: list[tuple[float, float]] = field(default_factory=list)
    ideal: float = 1.0  # the ratio is given as a share of it
    quality: str = ""
    good: bool = True
    missing: str = ""
    by_cpu: bool = False
    busy: list[float] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)  # more figures, for the file with the raw data

    def quiet(self) -> list[int]:
        """The rounds that are judged; all of them when none was quiet."""
        rounds = range(len(self.ours))
        return [i for i in rounds if self.by_cpu or not self.busy or self.busy[i] <= MOST_BUSY] or list(rounds)

    def ratios(self, which: int) -> list[float]:
        """Of wall (0) or CPU (1) seconds, by round."""
        ideal = 1.0 if which else self.ideal  # two ranks take as many CPU seconds as one, at best
        return [self.theirs[i][which] / self.ours[i][which] / ideal for i in self.quiet()]

    def ratio(self) -> float:
        return median(self.ratios(int(self.by_cpu)))

    def quickest(self) -> float:
        which = int(self.by_cpu)
        theirs, ours = (min(side[i][which] for i in self.quiet()) for side in (self.theirs, self.ours))
        return theirs / ours / self.ideal

    def verdict(self) -> str:
        """ "passed", "missed", or why it is neither."""
        if self.missing:
            return self.missing
        if not self.good:
            return "missed"
        if not self.least:
            return "no gate"
        if self.busy and not self.by_cpu and min(self.busy) > MOST_BUSY:
            return f"not judged: other programs used {median(self.busy):.1f} CPUs"
        return "passed" if self.ratio() >= self.least else "missed"

    def cells(self) -> list[str]:
        """What stands in the columns of HEADS."""
        least = f"{self.least:g}" if self.least else ""
        if self.missing:
            return [self.name, self.other, "", "", "", "", "", least, self.missing, ""]
        ratios = self.ratios(int(self.by_cpu))
        figures = [f"{self.ratio():.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{self.quickest():.2f}"]
        figures.append(f"{median(self.ratios(0)):.2f}")
        figures.append(f"{median(self.ratios(1)):.2f}" if all(cpu for _, cpu in self.ours) else "")
        return [self.name, self.other, *figures, least, self.verdict(), self.quality]

    def sentence(self) -> str:
        """What was missed."""
        found = f"{self.ratio():.2f}, and at least {self.least:g} is promised" if self.good else self.quality
        return f"{self.name}: {found}"


def line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def print_heads():
    print(line(HEADS), line(["---"] * len(HEADS)), sep="\n", flush=True)


def report(row: Row) -> str | None:
    """Prints the row, and records it. Returns a sentence when it is missed."""
    print(line(row.cells()), flush=True)
    record(row)
    return row.sentence() if row.verdict() == "missed" else None


def record(row: Row):
    """Appends the row to the file that BENCH_ROWS names, where `make bench` collects them."""
    if path := os.environ.get("BENCH_ROWS"):
        with Path(path).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(row) | {"load": round(os.getloadavg()[0], 1)}) + "\n")


# --- time -------------------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def used_by_others() -> float:
    """CPU seconds that other programs, and other virtual machines, have used up to now; 0 where nothing tells."""
    if not Path("/proc/stat").exists():
        return 0
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - cpu_seconds()


@contextlib.contextmanager
def watched(busy: list[float]) -> Iterator[None]:
    """Appends how many CPUs other programs used meanwhile."""
    clock, used = time.monotonic(), used_by_others()
    yield
    busy.append((used_by_others() - used) / (time.monotonic() - clock))


def now() -> tuple[float, float]:
    """Wall and CPU seconds, each since some moment."""
    return time.perf_counter(), cpu_seconds()


def since(start: tuple[float, float], steps: int = 1) -> tuple[float, float]:
    """Wall and CPU seconds since then, for each of so many steps."""
    wall, cpu = now()
    return (wall - start[0]) / steps, (cpu - start[1]) / steps


def seconds(work: Callable[[], object], steps: int = 1) -> tuple[float, float]:
    """Wall and CPU seconds of `work`, for each of its steps."""
    start = now()
    work()
    return since(start, steps)


def take_turns(
    sides: dict[str, Callable[[int], object]], rounds: int, turn: float, agree: Callable[[int], int] = int
) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """(wall, CPU) seconds a step of each side by round, and the CPUs that others used in it.

    A side is called with the number of its step, and all do equally many: what takes the first side about `turn`
    seconds. `agree` makes of each rank's number of steps one for all ranks. The first round is not counted.
    """
    for step in sides.values():
        step(0)
    spent = [seconds(partial(step, 1))[0] for step in sides.values()]
    steps = agree(max(1, round(turn / spent[0])))
    taken, busy = {name: [] for name in sides}, []

    def for_each(step: Callable[[int], object], numbers: range):
        for index in numbers:
            step(index)

    for number in range(rounds + 1):
        begin = 2 + number * steps
        with watched(busy):
            for name, step in sides.items():
                turn_of = partial(for_each, step, range(begin, begin + steps))
                taken[name].append(seconds(turn_of, steps))
    return {name: times[1:] for name, times in taken.items()}, busy[1:]


# --- parts of a step --------------------------------------------------------------------------------------------------


def parts_of(step: Callable[[int], object], side: str) -> dict[str, float]:
    """How much of the time of five steps each of PARTS takes, as a share of 1; the names begin with the side's.

    They are why a ratio is what it is: what both sides do alike cannot become faster.
    """
    import torch  # by programs that have it

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(5):
            step(number)
    taken = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    whole = sum(taken.values())
    sums = {part: sum(taken[name] for name in taken if re.fullmatch(names, name)) for part, names in PARTS.items()}
    return {f"{side}, {part}": round(spent / whole, 3) for part, spent in sums.items() if spent}
