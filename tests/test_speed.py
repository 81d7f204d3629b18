"""What pages compute from measured numbers, and the loop that measures."""

import re

import pytest
import torch

from sizes import SIZES
from slurm import REPOSITORY, environment, run, stand_ins

OWN_SCRIPT, FASTER, SECOND_NODE, FINE_TUNING = (
    (REPOSITORY / f"docs/{name}.md").read_text()
    for name in ("02_your_own_script", "04_faster", "05_a_second_node", "fine_tuning")
)


def test_a_job_for_each_size(tmp_path):
    """The loop of chapter 5, with a stand-in for sbatch: each GPU has its eight CPUs."""
    [loop] = re.findall(r"^```sh\n(for size in .*?)^```$", SECOND_NODE, re.M | re.S)
    tools = stand_ins(tmp_path / "tools", {"sbatch": 'echo "$@"'})
    done = run("bash", "-c", loop, env=environment(PATH=f"{tools}:/usr/bin:/bin"))
    command = "--no-requeue --job-name={0}x{1} --nodes={0} --gpus-per-node={1} --cpus-per-task={2}"
    command += " launch_slurm_with_torchrun.sh ../mine/my_script.py"
    sizes = ((1, 1, 8), (1, 8, 64), (2, 8, 64))
    assert done.stdout.splitlines() == [command.format(*size) for size in sizes]


def test_one_table_of_the_project():
    """Hours and cost follow from the images per second. The figure and the next chapter repeat
    them, and the bars are as long as their numbers."""
    row = r"^\| `?([\w.]+[^|`]*)`? \| ([\d,]+) \| \d+ % \| [\d.]+ \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, FASTER, re.M)
    names, shown, hours, costs = zip(*rows, strict=True)
    rates = [int(rate.replace(",", "")) for rate in shown]
    computed = [90 * 1.28e6 / rate / 3600 for rate in rates]
    assert len(rows) == 7
    assert [float(value) for value in hours] == [round(value, 1) for value in computed]
    assert [int(value) for value in costs] == [round(3 * value) for value in computed]

    figure = (REPOSITORY / "docs/figures/speed.svg").read_text()
    bar = r'>([^<]+)</text>\n<rect .* width="([\d.]+)" height="20"/>\n<text .*>([\d,]+)</text>'
    found, widths, numbers = zip(*re.findall(bar, figure), strict=True)
    assert (found, numbers) == (names, shown)
    scale = float(widths[-1]) / rates[-1]
    assert [float(width) for width in widths] == pytest.approx([scale * x for x in rates], abs=0.1)
    spoken = re.search('aria-label="(.*)"', figure)[1]
    assert re.findall(r"\b([\d,]*\d{3})[,.]", spoken) == [*shown]

    ours = re.findall(r"^\| one H200, .* \| ([\d,]+) \| ([\d.]+) \|.*\| us \|$", SECOND_NODE, re.M)
    assert ours == [(shown[0], hours[0]), (shown[-1], hours[-1])]

    # A default start has TF32 for its convolutions, and no workers. What a step waits for the
    # loader is the first row's step less the second's, or that part of it in which the GPU is idle.
    first, second, third = (128 / rate for rate in rates[:3])
    default = [128 / (waits + third) for waits in (0.64 * first, first - second)]
    prose = " ".join(FASTER.split())
    low, high = map(int, re.search(r"had some (\d+) to (\d+) images/s, by comp", prose).groups())
    assert [low, high] == [round(rate, -1) for rate in default]
    factor = 2 * rates[-1] / (low + high)
    assert round(factor) == 6 and "about six times as fast as a default start" in prose


def test_what_a_second_node_costs_is_computed():
    """All-reduces of 16 ranks, and how much faster two nodes are than one."""
    rows = re.findall(
        r"^\| (?:eight|one) adapters? of .*? \| (.*GB/s) \| (.*) \|$", SECOND_NODE, re.M
    )
    assert len(rows) == 3
    for busbw, cells in rows:
        buses = [float(value) for value in re.findall(r"[\d.]+", busbw)]
        columns = [re.findall(r"[\d.]+", cell) for cell in cells.split(" | ")]
        for times, factors, weights, step in (
            (*columns[:2], 25.6e6, 128 / 3.110),
            (*columns[2:], 124e6, 32 * 1024 / 538),
        ):
            sent = [4 * weights * 2 * 15 / 16 / bus / 1e6 for bus in buses]
            faster = [2 * step / max(step, step / 3 + ms) for ms in sent]
            assert [float(ms) for ms in times] == pytest.approx(sent, rel=0.15)
            # A cell has one number if both are the same.
            assert {float(factor) for factor in factors} == {round(value, 1) for value in faster}


def test_a_loss_over_tokens():
    """Chapter 2's sum of two ranks' gradients is that of one process, with unequal counts."""
    [written] = re.findall(r"`backward\(\)` on `(.+?)`", OWN_SCRIPT)
    weight, values = torch.tensor(3.0, requires_grad=True), torch.arange(1.0, 6.0)
    parts, means = (values[:1], values[1:]), []
    for part in parts:
        names = {"summed_loss": (weight * part).square().sum(), "world_size": 2, "count": 5}
        [gradient] = torch.autograd.grad(eval(written, names), weight)
        means.append(gradient / 2)  # as DDP averages
    [whole] = torch.autograd.grad((weight * values).square().mean(), weight)
    assert sum(means) == pytest.approx(whole)


def test_weights_of_lora():
    """Two matrices of rank 16 beside each linear layer of Qwen3-8B."""
    size = SIZES["8b"]
    hidden, heads, key_values, head, mlp = (
        size[name]
        for name in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
        )
    )
    outputs = (heads * head, key_values * head, key_values * head, mlp, mlp)
    sides = sum(hidden + width for width in outputs) + heads * head + hidden + mlp + hidden
    weights = 16 * size["num_hidden_layers"] * sides
    shown = re.search(r"`--lora 16` (\d+)\s+million", FINE_TUNING)[1]
    assert int(shown) == round(weights / 1e6)
    share = re.search(r"8\.2 billion, which is ([\d.]+) %", FINE_TUNING)[1]
    assert float(share) == round(100 * weights / 8.19e9, 1)
