"""dev/record_steps.py: what chapters 9 and 10 say of a step is seen in its pictures."""

import re
from itertools import pairwise

import record_steps
from slurm import REPOSITORY


def lanes(figure: str) -> list[dict[str, list[tuple[float, float]]]]:
    """(begin, end) by kind of each group, in px, in the order of time."""
    text = (REPOSITORY / f"docs/figures/{figure}.svg").read_text()
    groups = []
    for part in text.split('<text class="bold start"')[1:]:
        found = {}
        for kind, x, width in re.findall(
            r'<rect class="(\w+)" x="(.*?)" y=".*?" width="(.*?)" height="(?!12)', part
        ):
            found.setdefault(kind, []).append((float(x), float(x) + float(width)))
        groups.append({kind: sorted(spans) for kind, spans in found.items()})
    return groups


def test_ddp_sends_while_it_computes_and_waits_for_the_slow_rank():
    fast, slow = lanes("ddp_step")
    ends = {kind: [its[kind][-1][1] for its in (fast, slow)] for kind in ("backward", "sums")}
    for its in (fast, slow):
        assert len(its["backward"]) == len(its["sums"]) == record_steps.LAYERS
        assert its["sums"][0][0] < its["backward"][-1][0]
    # The fast rank's last sum ends after the slow one's backward pass, long after its own.
    assert ends["sums"][0] > ends["backward"][1] - 1 > ends["backward"][0] + 50
    optimizers = [its["optimizer"][0][0] for its in (fast, slow)]
    assert abs(optimizers[0] - optimizers[1]) < 20 and min(optimizers) >= max(ends["sums"]) - 1


def test_fsdp_gathers_a_layer_before_it_computes():
    [its] = lanes("fsdp_step")
    layers = record_steps.LAYERS
    assert len(its["forward"]) == len(its["backward"]) == len(its["sums"]) == layers
    # The last layer is gathered for the forward pass, and once more, as all are.
    for number, (begin, _) in enumerate(its["forward"]):
        assert its["gathers"][number][1] <= begin + 1.5
    for (_, computed), (reduced, _) in zip(its["backward"], its["sums"], strict=True):
        assert reduced >= computed - 1.5
    assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(its["backward"]))
    assert len(its["gathers"]) == 2 * layers


def test_a_picture_is_as_wide_as_its_longest_step():
    spans = [("forward", 0, 10), ("backward", 10, 30), ("sums", 20, 40), ("optimizer", 40, 44)]
    drawn = record_steps.draw("a < b", [("rank 0", spans)], {"sums": "all-reduces"})
    assert '<rect class="optimizer" x="432.0" y="62" width="31.0"' in drawn
    assert '<rect class="sums" x="272.0" y="88" width="159.0" height="20"' in drawn
    assert "a &lt; b" in drawn and ">44 ms</text>" in drawn
    assert drawn.count(">waits</text>") == 1  # of 20 ms, until the optimizer
    # Two at once share the lane.
    assert record_steps.rows_of([("sums", 0, 9), ("sums", 2, 11), ("sums", 9, 12)]) == [0, 1, 0]
