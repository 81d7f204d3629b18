"""second_node.py, its page and its picture: how much faster two nodes are, computed alike."""

import json
import math
import re
import sys
import textwrap
from types import SimpleNamespace

import pytest

from second_node import second_node
from slurm import REPOSITORY, run

PAGE = (REPOSITORY / "docs/second_node.html").read_text()
CHAPTER = (REPOSITORY / "docs/05_a_second_node.md").read_text()
# Weights, ms of a step, GB/s, ranks, bytes of a gradient: hidden by the backward pass, and not
GIVEN = [(25.6e6, 41.2, 350, 16, 4), (124e6, 61, 2.5, 16, 4), (350e6, 300, 10, 8, 2)]
GIVEN += [(8.19e9, 2000, 45, 512, 4), (1e6, 0.5, 0.125, 2, 2)]


@pytest.mark.parametrize("given", GIVEN)
def test_the_page_computes_what_the_command_does(given):
    """Its function's lines are Python but for `const`, `;` and Math."""
    pattern = r"^function secondNode.*?^(  const sent.*?)^  return \{(.*?)\};$"
    lines, names = re.search(pattern, PAGE, re.M | re.S).groups()
    found = dict(zip(("weights", "step", "busbw", "ranks", "number"), given, strict=True))
    found["Math"] = SimpleNamespace(max=max)
    exec(textwrap.dedent(lines).replace("const ", "").replace(";", ""), found)
    assert {name: found[name] for name in names.split(", ")} == pytest.approx(second_node(*given))


def test_the_picture_is_the_page_as_it_opens():
    """Each point of its curves, and the mark, is second_node's. It is written anew by

    chromium --headless --dump-dom docs/second_node.html | sed -n '/^<svg/,/^<.svg/p' \\
        > docs/figures/second_node.svg
    """
    figure = (REPOSITORY / "docs/figures/second_node.svg").read_text()
    inputs = re.findall(r'<input id="(\w+)" type="number".* value="(\w+)"', PAGE)
    ours = {name: float(value) for name, value in inputs}
    weights, busbw, ranks = 1e6 * ours["millions"], ours["busbw"], int(ours["ranks"])
    steps = [*json.loads(re.search(r"^const STEPS = (.*);$", PAGE, re.M)[1]), ours["step"]]

    def place(step: float, busbw: float) -> tuple[float, float]:
        faster = second_node(weights, step, busbw, ranks)["faster"]
        return 48 + 138 * math.log10(busbw / 0.5), 238 - 95 * faster

    curves = re.findall(r'<polyline class="(?:line|yours)" points="(.*)">', figure)
    for step, points in zip(steps, curves, strict=True):
        pairs = [[float(number) for number in point.split(",")] for point in points.split()]
        assert pairs[0][0] == 48 and pairs[-1][0] == pytest.approx(48 + 138 * 3)
        for left, top in pairs:
            assert top == pytest.approx(place(step, 0.5 * 10 ** ((left - 48) / 138))[1], abs=0.3)
        # Where the backward pass just hides what is sent, the curve reaches 2.
        found = second_node(weights, step, 1, ranks)
        knee = 48 + 138 * math.log10(found["sent"] / found["backward"] / 0.5)
        assert min(abs(left - knee) for left, _ in pairs) < 0.1
        assert step == ours["step"] or f">{step} ms</text>" in figure
    left, top = re.search(r'class="dot" cx="(.*?)" cy="(.*?)"', figure).groups()
    assert (float(left), float(top)) == pytest.approx(place(ours["step"], busbw), abs=0.1)
    faster = second_node(weights, ours["step"], busbw, ranks)["faster"]
    assert f">{faster:.1f} times as fast</text>" in figure
    assert f"GPT-2, which is {faster:.1f} times as fast at {busbw:g} GB/s" in CHAPTER


def test_the_command_answers_the_lab():
    [command] = re.findall(r"^python (aux/second_node.py .*)$", CHAPTER, re.M)
    answer = " ".join(CHAPTER.partition("## Lab")[2].partition("</details>")[0].split())
    printed = run(sys.executable, *command.split()).stdout
    sent, backward, both, faster, hours = map(float, re.findall(r"\d+\.\d+", printed))
    assert f"takes {sent:.0f} ms" in answer and f"backward pass is {backward:.0f} ms" in answer
    assert f"a step takes {both:.0f} ms" in answer and f"= {faster:.2f} times as fast" in answer
    assert hours == round(2 / faster, 2)
    assert f"moves 4 x 0.35 x 14/8 = {sent * 10 / 1000:.2f} GB" in answer
    half = run(sys.executable, *command.split(), "--bf16-gradients").stdout
    assert "gradients take 122.5 ms" in half and "2.00 times as fast" in half
    assert "With bfloat16 it takes 123 ms" in answer and "are twice as fast" in answer
    slow = run(sys.executable, *command.replace("busbw 10", "busbw 2").split()).stdout
    assert slow.endswith("Run two jobs of one node each.\n") and "Run two" not in printed + half
    for wrong in ("--busbw=0", "--weights=many", "--ranks=1"):
        done = run(sys.executable, *command.split(), wrong)
        assert done.returncode == 2 and done.stderr.count("error: ") == 1
