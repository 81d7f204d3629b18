"""Draw the pictures of processes in docs/figures: which program starts which, and what sets the five variables.

    python dev/figures/draw_processes.py                  # all of them, in docs/figures
    python dev/figures/draw_processes.py --folder DIR

SVG, from the standard library alone. A picture has its own background, light or dark as the reader's system asks, so
that it can be read on any page. Nothing depends on colour: what a picture is about has thick lines.
"""

import argparse
from html import escape
from pathlib import Path

STYLE = """
  svg { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
  .page { fill: #ffffff }
  .box { fill: #7f7f7f; fill-opacity: 0.10; stroke: #8a8a8a; stroke-width: 1 }
  .main { fill: #ffffff; stroke: #1f6099; stroke-width: 2.5 }
  .line { fill: none; stroke: #6e7781; stroke-width: 1.5 }
  .dashed { stroke-dasharray: 5 4 }
  .head { fill: #6e7781 }
  .code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px }
  .bold { font-weight: 600 }
  .quiet { fill: #59636e; font-size: 13px }
  @media (prefers-color-scheme: dark) {
    svg { fill: #e6edf3 }
    .page { fill: #0d1117 }
    .main { fill: #0d1117; stroke: #79b8ff }
    .line { stroke: #9198a1 }
    .head { fill: #9198a1 }
    .quiet { fill: #9198a1 }
  }
"""

# --- shapes -----------------------------------------------------------------------------------------------------------


class Picture:
    """Shapes on a page of `width` x `height` pixels, y from the top. `alternative` is the picture in words."""

    def __init__(self, width: int, height: int, alternative: str):
        self.width, self.height, self.shapes = width, height, []
        self.alternative = " ".join(alternative.split())

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box"):
        self.shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle"):
        """`y` is the middle of the line's height; `anchor` is start, middle or end."""
        place = f'x="{x}" y="{y + 5}" text-anchor="{anchor}"'
        self.shapes.append(f'<text class="{kind}" {place} xml:space="preserve">{escape(text)}</text>')

    def label(self, x: float, y: float, width: float, height: float, first: str, *more: str, kind="box", text=""):
        """A box with text in its middle: a line of the kind `text`, and quiet ones."""
        self.box(x, y, width, height, kind)
        for number, line in enumerate((first, *more)):
            self.text(x + width / 2, y + height / 2 + 20 * (number - len(more) / 2), line, "quiet" if number else text)

    def line(self, *points: tuple[float, float], kind: str = "line"):
        path = " L ".join(f"{x} {y}" for x, y in points)
        self.shapes.append(f'<path class="{kind}" d="M {path}"/>')

    def arrow(self, *points: tuple[float, float], kind: str = "line"):
        """A line whose last part is horizontal or vertical, with a head at its end."""
        (x1, y1), (x2, y2) = points[-2:]
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.line(*points[:-1], (x2 - 6 * dx, y2 - 6 * dy), kind=kind)
        back = [(x2 - 9 * dx + 4.5 * dy * side, y2 - 9 * dy + 4.5 * dx * side) for side in (-1, 1)]
        corners = " ".join(f"{x},{y}" for x, y in [(x2, y2), *back])
        self.shapes.append(f'<polygon class="head" points="{corners}"/>')

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        alternative = escape(self.alternative, quote=True)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{alternative}">'
        page = f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>'
        return "\n".join(
            [head, f"<title>{alternative}</title>", f"<style>{STYLE}</style>", page, *self.shapes, "</svg>\n"]
        )


# --- pictures ---------------------------------------------------------------------------------------------------------


def waist() -> Picture:
    picture = Picture(
        860,
        300,
        """On the left four programs that start the ranks: srun, torchrun, mp.spawn of torch.multiprocessing, and
        torchrun in a container. On the right the scripts: train_ddp.py, train_fsdp.py, train_tp.py, your own. All
        lines go through one narrow box in the middle with five variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT.""",
    )
    left = ["srun", "torchrun", "mp.spawn", "torchrun, in a container"]
    right = ["train_ddp.py", "train_fsdp.py", "train_tp.py", "your_script.py"]
    picture.text(120, 26, "who starts the ranks", "quiet")
    picture.text(430, 26, "the five variables", "quiet")
    picture.text(740, 26, "what is trained", "quiet")
    for number, (starter, script) in enumerate(zip(left, right, strict=True)):
        y = 50 + 60 * number
        picture.label(20, y, 200, 40, starter, text="code" if number < 3 else "")
        picture.label(650, y, 180, 40, script, text="code")
        picture.arrow((220, y + 20), (250, y + 20), (300, 160), (345, 160))
        picture.arrow((515, 160), (560, 160), (610, y + 20), (650, y + 20))
    picture.box(345, 85, 170, 150, "main")
    for number, name in enumerate(["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]):
        picture.text(430, 110 + 25 * number, name, "code bold")
    return picture


def one_process() -> Picture:
    picture = Picture(
        860,
        190,
        """One machine with one process in it, python train_single.py. In the process, from left to right: device,
        data, model, steps, checkpoint.""",
    )
    picture.box(20, 20, 820, 150)
    picture.text(36, 40, "one machine", "quiet", "start")
    picture.box(40, 60, 780, 92, "main")
    picture.text(56, 78, "one process: python local/train_single.py", "code", "start")
    for number, part in enumerate(["device", "data", "model", "steps", "checkpoint"]):
        x = 60 + 152 * number
        picture.label(x, 98, 128, 34, part)
        if number:
            picture.arrow((x - 24, 115), (x, 115))
    return picture


def two_nodes(picture: Picture, y: int, height: int) -> list[int]:
    """Draws the frames of node-1 and node-2. Returns where they begin."""
    for number, x in enumerate((20, 440)):
        picture.box(x, y, 400, height)
        picture.text(x + 16, y + 20, f"node-{number + 1}", "quiet", "start")
    return [20, 440]


def who_am_i() -> Picture:
    picture = Picture(
        860,
        270,
        """Two nodes with two ranks each. On node-1: RANK 0 with LOCAL_RANK 0, and RANK 1 with LOCAL_RANK 1. On
        node-2: RANK 2 with LOCAL_RANK 0, and RANK 3 with LOCAL_RANK 1. Above, what is equal on all ranks:
        WORLD_SIZE 4, MASTER_ADDR node-1, MASTER_PORT 61007.""",
    )
    picture.text(430, 26, "the same on every rank:  WORLD_SIZE=4   MASTER_ADDR=node-1   MASTER_PORT=61007", "code")
    for node, x in enumerate(two_nodes(picture, 50, 150)):
        for local_rank in range(2):
            left, rank = x + 20 + 190 * local_rank, 2 * node + local_rank
            picture.box(left, 85, 170, 60, "main")
            picture.text(left + 85, 105, f"RANK={rank}", "code")
            picture.text(left + 85, 125, f"LOCAL_RANK={local_rank}", "code")
            picture.text(left + 85, 165, f"GPU {local_rank}, or the CPU", "quiet")
            picture.line((left + 85, 177), (left + 85, 225))
    picture.line((125, 225), (735, 225))
    picture.text(
        430, 245, "they meet at MASTER_ADDR:MASTER_PORT, where rank 0 listens, and are one process group", "quiet"
    )
    return picture


def data_parallel() -> Picture:
    picture = Picture(
        860,
        330,
        """Four columns, one for each rank. Every rank takes its own 16 of the 64 images, goes forward and
        backward, and has its own gradients. One bar goes across all four: all-reduce, the mean of the
        gradients. Below it every rank takes the same step, and has the same weights again.""",
    )
    for rank in range(4):
        x = 30 + 205 * rank
        picture.text(x + 92, 26, f"rank {rank}", "bold")
        picture.label(x, 45, 185, 44, "16 of the 64 images")
        picture.label(x, 110, 185, 44, "forward, backward")
        picture.arrow((x + 92, 89), (x + 92, 110))
        picture.arrow((x + 92, 154), (x + 92, 188))
        picture.text(x + 100, 170, "its gradients", "quiet", "start")
        picture.arrow((x + 92, 232), (x + 92, 264))
        picture.text(x + 100, 248, "their mean", "quiet", "start")
        picture.label(x, 264, 185, 54, "optimizer step", "the same weights again")
    picture.label(30, 188, 800, 44, "all-reduce: the mean of the gradients over all ranks", kind="main")
    return picture


def start_of_a_job(picture: Picture, launcher: str):
    """The part of the three pictures that is equal: from sbatch to srun."""
    picture.label(20, 20, 170, 60, "sbatch", "on the login node", text="code")
    picture.arrow((190, 50), (230, 50))
    picture.label(230, 20, 330, 60, launcher, "reads env.sh, on the first node", text="code")
    picture.arrow((560, 50), (600, 50))
    picture.label(600, 20, 240, 60, "srun", "starts the tasks", text="code")
    picture.line((720, 80), (720, 100), (220, 100))


def processes(launcher: str, starter: str, sentence: str) -> Picture:
    """The processes of two nodes with two ranks each. `starter` is the program between srun and ranks, or nothing."""
    middle = "srun starts four tasks, two on each node. Each task becomes a rank."
    if starter:
        middle = f"srun starts one task on each node, which becomes {starter}. It starts the two ranks of its node."
    picture = Picture(860, 345, f"sbatch starts {launcher} on the first node. {middle} {sentence}")
    start_of_a_job(picture, launcher)
    for node, x in enumerate(two_nodes(picture, 125, 180)):
        picture.line((x + 200, 100), (x + 200, 150))
        if starter:
            picture.arrow((x + 200, 125), (x + 200, 150))
            picture.label(x + 75, 150, 250, 36, f"task {node}: {starter}", kind="main", text="code")
            picture.line((x + 200, 186), (x + 200, 204))
        top = 204 if starter else 150  # where the line from srun, or from the starter, parts
        picture.line((x + 105, top), (x + 295, top))
        for local_rank in range(2):
            left, rank = x + 20 + 190 * local_rank, 2 * node + local_rank
            task = "" if starter else f"task {rank}: "
            picture.arrow((left + 85, top), (left + 85, 226))
            kind = "box" if starter else "main"
            picture.label(left, 226, 170, 60, f"{task}rank {rank}", "python SCRIPT", kind=kind, text="bold")
    picture.text(430, 325, sentence, "quiet")
    return picture


def srun() -> Picture:
    said = "env.sh sets WORLD_SIZE, MASTER_ADDR, MASTER_PORT; slurm_rank.sh sets RANK and LOCAL_RANK of each task."
    return processes("launch_slurm_to_torch.sh", "", said)


def torchrun() -> Picture:
    said = "env.sh sets MASTER_ADDR, MASTER_PORT; torchrun sets WORLD_SIZE, and RANK and LOCAL_RANK of each rank."
    return processes("launch_slurm_with_torchrun.sh", "torchrun", said)


def mp() -> Picture:
    said = "env.sh sets MASTER_ADDR, MASTER_PORT; spawn_ranks.py sets WORLD_SIZE, and RANK and LOCAL_RANK of each rank."
    return processes("launch_slurm_with_mp.sh", "spawn_ranks.py", said)


def container() -> Picture:
    picture = Picture(
        860,
        465,
        """sbatch starts run_script.sh on the first node. srun starts one task on each node: enroot start. In the
        container of each node there are torchrun and the two ranks that it starts. The folder of the repository,
        which both nodes see, is /workspace/mnt in both containers.""",
    )
    start_of_a_job(picture, "run_script.sh")
    for node, x in enumerate(two_nodes(picture, 125, 245)):
        picture.line((x + 200, 100), (x + 200, 125))
        picture.arrow((x + 200, 125), (x + 200, 138))
        picture.label(x + 75, 138, 250, 32, f"task {node}: enroot start", text="code")
        picture.arrow((x + 200, 170), (x + 200, 186))
        picture.box(x + 14, 186, 372, 170, "main")
        picture.text(x + 28, 206, "container", "bold", "start")
        picture.label(x + 125, 220, 150, 32, "torchrun", text="code")
        picture.line((x + 200, 252), (x + 200, 268))
        picture.line((x + 109, 268), (x + 291, 268))
        for local_rank in range(2):
            left, rank = x + 28 + 182 * local_rank, 2 * node + local_rank
            picture.arrow((left + 81, 268), (left + 81, 286))
            picture.label(left, 286, 162, 56, f"rank {rank}", "python SCRIPT", text="bold")
        picture.arrow((x + 200, 404), (x + 200, 356))
        picture.text(x + 212, 386, "mounted: /workspace/mnt", "code", "start")
    seen = "the folder of the repository, on a file system that both nodes see: scripts, data, checkpoints"
    picture.label(20, 404, 820, 44, seen)
    return picture


def laptop() -> Picture:
    picture = Picture(
        860,
        350,
        """On your laptop submit.py sends options and arguments over SSH to the login node, where it runs sbatch, and
        gets back the state of the job and its log. sbatch puts the job into the queue. On the nodes the launcher and
        srun start the ranks. Your code goes into a new folder that login node and nodes see; .venv and data are linked
        there. The ranks run in this folder. What they have written comes back into slurm-jobs on the laptop.""",
    )
    picture.box(20, 20, 230, 310)
    picture.text(36, 40, "your laptop, without Slurm", "quiet", "start")
    picture.box(380, 20, 190, 150)
    picture.text(396, 40, "login node", "quiet", "start")
    picture.box(650, 20, 190, 150)
    picture.text(666, 40, "nodes", "quiet", "start")
    picture.label(36, 60, 198, 92, "submit.py", kind="main", text="code")
    picture.label(396, 60, 158, 92, "sbatch", text="code")
    picture.label(666, 60, 158, 92, "launcher, srun", "the ranks")
    picture.text(315, 40, "SSH", "bold")
    picture.text(315, 68, "options", "quiet")
    picture.arrow((234, 84), (396, 84))
    picture.arrow((396, 128), (234, 128))
    picture.text(315, 146, "state, log", "quiet")
    picture.arrow((554, 106), (666, 106))
    picture.text(610, 90, "queue", "quiet")
    picture.label(36, 196, 198, 56, "this repository", "what git does not ignore")
    picture.label(36, 262, 198, 56, "slurm-jobs/", "what the job has made", text="code")
    inside = "the copy of the code; links to .venv and data;", "what the ranks write: checkpoints, log"
    picture.label(380, 196, 460, 122, "a new folder for this job, which login node and nodes see", *inside, kind="main")
    picture.arrow((234, 224), (380, 224))
    picture.text(315, 208, "a copy", "quiet")
    picture.arrow((380, 290), (234, 290))
    picture.text(315, 308, "--fetch", "code")
    picture.arrow((745, 152), (745, 196))
    picture.text(737, 183, "run in it", "quiet", "end")
    return picture


def hardware() -> Picture:
    picture = Picture(
        860,
        400,
        """A login node, where sbatch is typed, and three compute nodes. A node has CPUs, GPUs and memory.
        --nodes=2 asks for two of the nodes, --nodelist for those of given names, --exclusive for nodes without
        anybody else's jobs. On each node --ntasks-per-node=2 starts two tasks, --cpus-per-task=2 gives each
        task two CPUs, --gpus-per-node=2 asks for two GPUs, --mem=16G for 16 GB of memory.""",
    )
    picture.label(20, 130, 130, 90, "login node", "you, sbatch,", "no training", text="bold")
    picture.arrow((150, 175), (190, 175))
    picture.text(360, 26, "--nodes=2", "code bold")
    picture.text(440, 26, "these two, or by name: --nodelist=node-[1-2]", "quiet", "start")
    picture.line((190, 50), (190, 42), (670, 42), (670, 50))
    for number, x in enumerate((190, 440, 690)):
        free = number == 2
        width = 230 if not free else 150
        picture.box(x, 58, width, 260)
        picture.text(x + 14, 76, f"node-{number + 1}", "quiet", "start")
        if free:
            picture.text(x + 75, 180, "not asked for:", "quiet")
            picture.text(x + 75, 200, "other jobs", "quiet")
            continue
        for task in range(2):
            left = x + 12 + 104 * task
            picture.box(left, 92, 98, 92, "main")
            picture.text(left + 49, 108, f"task {2 * number + task}", "bold")
            for cpu in range(2):
                picture.label(left + 8 + 43 * cpu, 124, 39, 48, "CPU", text="quiet")
            picture.label(left, 194, 98, 36, f"GPU {task}")
        picture.label(x + 12, 240, 202, 30, "16 GB of memory")
        picture.label(x + 12, 278, 202, 30, "more CPUs and memory", text="quiet", kind="line dashed")
    picture.text(30, 345, "on each node:", "quiet", "start")
    parts = ["--ntasks-per-node=2", "--cpus-per-task=2", "--gpus-per-node=2", "--mem=16G"]
    for number, part in enumerate(parts):
        picture.text(150 + 185 * number, 345, part, "code bold", "start")
    picture.text(150, 375, "--exclusive", "code bold", "start")
    picture.text(250, 375, "nobody else's jobs on these nodes, even if there is room", "quiet", "start")
    return picture


def stop_and_resume() -> Picture:
    picture = Picture(
        860,
        350,
        """A job over time, from left to right. Four ranks take steps 113, 114 and 115. Slurm sends SIGTERM, at the
        time limit or for a preemption. It reaches ranks 0 and 1 in step 114, ranks 2 and 3 in step 115. After step 115
        one bar goes across all four ranks: an all-reduce, in which they agree to stop. Then rank 0 writes
        checkpoint_step_115.pt and calls scontrol requeue. The job waits in the queue, and starts again. All four ranks
        load the checkpoint, and go on with steps 116 and 117.""",
    )
    rows = [110, 160, 210, 260]  # the tops of the ranks' lines
    picture.label(85, 30, 190, 44, "SIGTERM", "time limit or preemption", text="code")
    for rank, y in enumerate(rows):
        picture.text(20, y + 18, f"rank {rank}", "bold", "start")
        for number, x in enumerate((85, 155, 225)):
            picture.label(x, y, 50, 36, f"{113 + number}")
        x = 155 if rank < 2 else 225  # the signal does not reach all of them in the same step
        picture.arrow((x - 12, y + 18), (x, y + 18))
        picture.label(665, y, 54, 36, "load")
        for number, x in enumerate((725, 785)):
            picture.label(x, y, 54, 36, f"{116 + number}")
    for x, y in ((143, rows[1]), (213, rows[3])):
        picture.line((x, 74), (x, y + 18), kind="line dashed")
    picture.box(287, 98, 126, 210, "main")
    for number, words in enumerate(("all-reduce:", "was one of us", "asked to stop?")):
        picture.text(350, 172 + 20 * number, words, "bold" if not number else "")
    picture.text(350, 240, "yes: after 115", "quiet")
    picture.label(425, 110, 80, 36, "save")
    picture.text(425, 166, "checkpoint_step_115.pt", "code", "start")
    picture.arrow((465, 110), (465, 74))
    picture.label(430, 30, 205, 44, "scontrol requeue", "by rank 0", text="code")
    picture.label(525, 200, 110, 40, "in the queue", text="quiet", kind="line dashed")
    picture.arrow((635, 52), (692, 52), (692, 110))
    picture.text(768, 52, "starts again", "quiet")
    picture.line((85, 322), (505, 322))
    picture.line((665, 322), (839, 322))
    picture.text(295, 336, "first start of the job", "quiet")
    picture.text(752, 336, "second start", "quiet")
    return picture


def fsdp() -> Picture:
    picture = Picture(
        860,
        430,
        """Four columns, one for each rank. At first every rank holds another quarter of the weights of a block. A bar
        across all four: all-gather, the weights of one block. Below it every rank has the whole block, computes
        forward or backward, and frees it. A second bar: after backward, reduce-scatter, the mean of the gradients, to
        each rank its quarter. At last every rank takes the optimizer step of its quarter.""",
    )
    rows = [(44, False, "holds a quarter of each block"), (190, True, "forward or backward,")]
    rows += [(366, False, "optimizer step of its quarter")]
    for rank in range(4):
        x = 30 + 205 * rank
        picture.text(x + 92, 26, f"rank {rank}", "bold")
        for y, whole, said in rows:
            for part in range(4):
                picture.box(x + 6 + 44 * part, y, 40, 32, "main" if whole or part == rank else "line dashed")
            picture.text(x + 92, y + 46, said, "quiet")
        picture.text(x + 92, 254, "then it is freed", "quiet")
        for first, last in ((102, 122), (166, 188), (266, 290), (334, 364)):
            picture.arrow((x + 92, first), (x + 92, last))
    picture.label(30, 122, 800, 44, "all-gather: the whole weights, of one block at a time", kind="main")
    said = "after backward, reduce-scatter: the mean of the gradients, to each rank its quarter"
    picture.label(30, 290, 800, 44, said, kind="main")
    return picture


def tensor_parallel() -> Picture:
    picture = Picture(
        860,
        300,
        """Two rows, one for each of two ranks. Both ranks begin with the same x. Each goes through its half of the
        linear up, which gives half of the channels, through GELU, and through its half of the linear down, which gives
        a part of the sum. One all-reduce across both rows adds the parts up. Both ranks end with the same y.""",
    )
    for rank in range(2):
        y = 46 + 120 * rank
        picture.text(20, y - 16, f"rank {rank}", "bold", "start")
        picture.label(20, y, 84, 70, "x", "whole")
        picture.label(130, y, 150, 70, "up", "half of its outputs", kind="main", text="code bold")
        picture.label(306, y, 150, 70, "GELU", "half of the channels")
        picture.label(482, y, 150, 70, "down", "half of its inputs", kind="main", text="code bold")
        picture.label(774, y, 66, 70, "y", "whole")
        for left in (104, 280, 456, 632, 748):
            picture.arrow((left, y + 35), (left + 26, y + 35))
    picture.label(658, 46, 90, 190, "all-reduce", "the sum", kind="main")
    said = "Between up and down no rank needs the other's channels. Backward, one more all-reduce: the gradient of x."
    picture.text(430, 270, said, "quiet")
    return picture


PICTURES = [waist, one_process, who_am_i, data_parallel, hardware, srun, torchrun, mp, container, laptop]
PICTURES += [fsdp, tensor_parallel, stop_and_resume]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).resolve().parents[2] / "docs/figures"
    parser.add_argument("--folder", type=Path, default=default, help="where the SVG files go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        (folder / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
