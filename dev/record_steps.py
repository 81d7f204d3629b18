"""Record a step of DDP and one of FSDP2 by torch.profiler, and draw chapters 9 and 10's pictures.

    NPROC_PER_NODE=2 ./torchrun.sh dev/record_steps.py      # two CPU ranks with gloo, a minute

It writes docs/figures/ddp_step.svg and docs/figures/fsdp_step.svg. It takes the shortest step,
because a machine has other work as well. gloo does two all-reduces at once.
"""

import html
import operator
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile, record_function

FIGURES = Path(__file__).resolve().parents[1] / "docs/figures"
# A layer has 27 MB, and so fills one of DDP's buckets of 25 MiB.
LAYERS, WIDTH, ROWS, STEPS = 4, 2600, 128, 12
# A profiler's event begins with one of these words, and belongs to this kind of work.
KINDS = {
    "aten::linear": "forward",
    "autograd::engine::evaluate_function: MmBackward": "backward",
    "Optimizer.step": "optimizer",
    "gloo:all_reduce": "sums",
    "gloo:reduce_scatter": "sums",
    "gloo:all_gather": "gathers",
}
# Where time 0 is in a picture, and where the end of the longest step
LEFT, RIGHT = 112, 464
STYLE = """
svg { font: 14.5px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
text { text-anchor: middle }
.start { text-anchor: start }
.end { text-anchor: end }
.page { fill: #fff }
.bold { font-weight: 600 }
.quiet { fill: #59636e }
.forward, .optimizer { fill: #8c959f } .backward { fill: #57606a }
.sums { fill: #b4501a } .gathers { fill: #1f6099 }
@media (prefers-color-scheme: dark) {
  svg { fill: #e6edf3 }
  .page { fill: #0d1117 }
  .quiet { fill: #9198a1 }
  .backward { fill: #c9d1d9 }
  .sums { fill: #f0883e } .gathers { fill: #79b8ff }
}
"""

Span = tuple[str, float, float]  # kind, begin and end, in ms from the beginning of the step
BEGIN = operator.itemgetter(1)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def record(model: nn.Module, rows: int) -> list[Span]:
    """What this rank does in the shortest of its steps, which all ranks begin together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = torch.randn(rows, WIDTH)
    with profile() as seen:
        for _ in range(STEPS):
            dist.barrier()
            with record_function("step"):
                model(samples).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    events = [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in seen.events()]
    # In the first steps DDP groups its buckets anew, and gloo connects.
    steps = [(end - begin, begin, end) for name, begin, end in events if name == "step"][3:]
    shortest = torch.tensor([took for took, *_ in steps])
    dist.all_reduce(shortest, dist.ReduceOp.MAX)
    _, start, stop = steps[shortest.argmin()]
    return [
        (kind, round(max(begin, start) - start, 1), round(end - start, 1))
        for word, kind in KINDS.items()
        for name, begin, end in events
        if name.startswith(word) and start < end < stop + 1
    ]


def rows_of(spans: list[Span]) -> list[int]:
    """The row of each, so that no two in a row overlap."""
    ends, rows = [], []
    for _, begin, end in spans:
        row = next((row for row, its in enumerate(ends) if its <= begin), len(ends))
        ends[row : row + 1] = [end]
        rows.append(row)
    return rows


def draw(label: str, groups: list[tuple[str, list[Span]]], legend: dict[str, str]) -> str:
    """An SVG with a group of two lanes for each title: what a rank computes, and what it sends."""
    longest = max(end for _, spans in groups for _, _, end in spans)
    scale = (RIGHT - LEFT) / longest
    parts, top = [], 0
    for title, spans in groups:
        last = max(end for _, _, end in spans)
        parts += [
            f'<text class="bold start" x="16" y="{top + 28}">{title}</text>',
            f'<text class="quiet end" x="464" y="{top + 28}">{last:,.0f} ms</text>',
            f'<text class="start" x="16" y="{top + 77}">computes</text>',
            f'<text class="start" x="16" y="{top + 103}">sends</text>',
        ]
        sent = sorted((its for its in spans if its[0] in ("sums", "gathers")), key=BEGIN)
        sent_rows = rows_of(sent)
        height = 20 / (1 + max(sent_rows))
        places = [(its, 62, 20) for its in spans if its not in sent]
        places += [
            (its, 88 + row * height, height - (height < 20))
            for its, row in zip(sent, sent_rows, strict=True)
        ]
        for (kind, begin, end), y, height in places:
            parts.append(
                f'<rect class="{kind}" x="{LEFT + begin * scale:.1f}" y="{top + y:g}"'
                f' width="{max(1, (end - begin) * scale - 1):.1f}" height="{height:g}"/>'
            )
        for kind in ("forward", "backward", "optimizer"):
            begins, ends = zip(*(its[1:] for its in spans if its[0] == kind), strict=True)
            x, anchor = LEFT + scale * (min(begins) + max(ends)) / 2, ""
            if kind == "optimizer":
                x, anchor = LEFT + scale * max(ends), " end"
            parts.append(f'<text class="quiet{anchor}" x="{x:.1f}" y="{top + 52}">{kind}</text>')
        computed = max(end for kind, _, end in spans if kind == "backward")
        waits = scale * (min(begin for kind, begin, _ in spans if kind == "optimizer") - computed)
        if waits > 50:
            x = LEFT + scale * computed + waits / 2
            parts.append(f'<text class="quiet" x="{x:.1f}" y="{top + 77}">waits</text>')
        top += 124
    left = 16
    for kind, text in legend.items():
        parts += [
            f'<rect class="{kind}" x="{left}" y="{top + 8}" width="12" height="12"/>',
            f'<text class="start" x="{left + 18}" y="{top + 19}">{text}</text>',
        ]
        left += 190
    size = f'width="464" height="{top + 34}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="8 0 464 {top + 34}"',
            f' role="img" aria-label="{html.escape(label)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="page" x="8" {size} rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main():
    # One thread for each rank, as if each had a device of its own
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if dist.get_world_size() != 2:
        sys.exit("two ranks, with NPROC_PER_NODE=2")
    both: list = [None, None]
    mine = record(nn.parallel.DistributedDataParallel(layers()), ROWS * (1 + rank))
    dist.all_gather_object(both, mine)

    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    mine = record(model, ROWS)
    if rank == 0:
        label = "A step of DDP on two CPU ranks over time, from left to right, as recorded by"
        label += " torch.profiler. Rank 1 has twice as many samples, and so computes for twice as"
        label += " long. Each rank sends four buckets of gradients while it computes backward."
        label += " Every all-reduce of rank 0 lasts until rank 1 has computed the same bucket, so"
        label += " both take the optimizer step at the same time."
        groups = [("rank 0", both[0]), ("rank 1, with twice as many samples", both[1])]
        sent = {"sums": "all-reduces of gradients"}
        (FIGURES / "ddp_step.svg").write_text(draw(label, groups, sent))
        label = "A step of FSDP2 with four layers on one of two CPU ranks over time, from left to"
        label += " right, as recorded by torch.profiler. An all-gather of weights comes before each"
        label += " layer in the forward pass, and again in the backward pass, in which a"
        label += " reduce-scatter of gradients follows each layer. The computation waits for them."
        sent = {"gathers": "all-gathers of weights", "sums": "sums of gradients"}
        (FIGURES / "fsdp_step.svg").write_text(draw(label, [("rank 0", mine)], sent))
    dist.barrier()
    os._exit(0)  # gloo on a CPU may abort a Python that shuts down


if __name__ == "__main__":
    main()
