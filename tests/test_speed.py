"""What pages compute from measured numbers, and the loop that measures."""

import re

import pytest

from slurm import REPOSITORY, environment, run, stand_ins

FASTER, SECOND_NODE = (
    (REPOSITORY / "docs" / name).read_text() for name in ("04_faster.md", "05_a_second_node.md")
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
