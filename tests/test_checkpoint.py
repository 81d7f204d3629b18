"""checkpoint.py, in a script of somebody's own and with every fault, on two ranks."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
from slurm import REPOSITORY, ranks

GUEST = (REPOSITORY / "tests/scripts/plain_fsdp.py").read_text()
# The five lines, seeds, and a loop that knows which step it takes.
LINES = {
    "import torch\n": "import sys, checkpoint, torch\n",
    "\nmodel =": "\ntorch.manual_seed(0)\nmodel =",
    "lr=0.01)\n": "lr=0.01)\n"
    "folder = checkpoint.Folder(sys.argv[1])\n"
    "first = folder.load(model, optimizer)\n",
    "for _ in range(8):\n": "for step in range(first + 1, int(sys.argv[2]) + 1):\n"
    "    torch.manual_seed(world_size * step + rank)\n",
    "optimizer.zero_grad()\n": "optimizer.zero_grad()\n    folder.save(step, model, optimizer)\n",
    "\nweights =": "\nfolder.wait()\nweights =",
}


def whole(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name."""
    dcp_to_torch_save(path, path.with_suffix(".pt"))
    state = torch.load(path.with_suffix(".pt"), weights_only=False)
    found = dict(state["model"])
    for name, moments in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in moments.items()}
    return found


def test_a_strangers_script(tmp_path):
    """Five lines: stopped after step 4 and resumed, it ends with the same bits."""
    script = GUEST
    for before, after in LINES.items():
        assert script.count(before) == 1
        script = script.replace(before, after)
    (tmp_path / "script.py").write_text(script)
    path = {"PYTHONPATH": REPOSITORY / "distributed"}
    for folder, last in (("whole", 8), ("stopped", 4), ("stopped", 8)):
        done = ranks(2, tmp_path / "script.py", tmp_path / folder, last, **path)
        assert done.returncode == 0, done.stderr
    assert checkpoint.steps(tmp_path / "stopped") == [8, 7]
    found, expected = (whole(tmp_path / folder / "step_8") for folder in ("stopped", "whole"))
    assert len(found) == 16 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank finds, by scenario."""
    folder = tmp_path_factory.mktemp("checkpoints")
    done = ranks(2, "tests/scripts/checkpoints.py", folder)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_whatever_else_a_run_has(found):
    """A schedule, an average of the weights that is split, a best score, a place in a stream."""
    for rank in found["whatever_else"]:
        assert rank["returns"] == 1 and rank["average"] and rank["schedule"] == [1, 0.05]
        assert rank["best"] == 0.5 and rank["place"] == {"shard": 7}
    first, second = found["without_what_it_asks_for"]
    assert first["ends"] == second["ends"] == 1
    assert (
        "step_1 cannot be read: Missing key in checkpoint state_dict: extra.best" in first["says"]
    )


def test_what_is_not_done_twice(found):
    """Rank 0 alone copies what all hold, and a step that was written or read is not written."""
    copied = [rank["copied"] for rank in found["copies_of_what_all_hold"]]
    assert copied == [[2], [0]] and all(x["returns"] for x in found["copies_of_what_all_hold"])
    first = found["saved_twice"][0]
    assert not first["again"] and not first["read"] and first["folder"] == [True]


def test_the_last_one_of_many(found):
    """With keep=1, older than a damaged one. Its name can be used again."""
    for rank in found["one_to_keep"]:
        assert rank["returns"] == 1 and rank["names"] == ["owner", "step_2", "step_3"]
        assert rank["replaced"] and rank["weights"] == [3]


def test_rank_0_decides_for_all(found):
    assert [rank["returns"] for rank in found["unseen_by_one"]] == [1, 1]
    assert [rank["name"] for rank in found["two_names"]] == ["second-0"] * 2


def test_the_newest_two_stay(found):
    for rank in found["whole"]:
        assert rank["returns"] == 3 and rank["weights"] == [3] and rank["moments"] == 3
        assert rank["names"] == ["owner", "step_2", "step_3"] and rank["says"] == ""


def test_steps_after_a_save_are_not_in_it(found):
    assert [rank["weights"] for rank in found["copied_at_once"]] == [[1], [1]]


@pytest.mark.parametrize("fault", ["truncated", "missing_file"])
def test_the_older_one_is_loaded(found, fault):
    first, second = found[fault]
    for rank in (first, second):
        assert rank["returns"] == 1 and rank["weights"] == [1] and rank["moments"] == 1
    assert re.fullmatch(r"warning: \S+/step_2 cannot be read: .+\n", first["says"])
    assert second["says"] == ""


def test_a_run_does_not_begin_anew_unnoticed(found):
    first, second = found["all_damaged"]
    assert first["ends"] == second["ends"] == 1
    assert re.search(r"\nno checkpoint in \S+ can be read\n$", first["says"])


def test_what_a_killed_start_has_left(found):
    for rank in found["killed_while_it_saved"]:
        assert rank["returns"] == 1 and rank["weights"] == [1]
        names = [".step_50.part", "owner", "step_1", "step_9.bad"]
        assert rank["names"] == names and rank["says"] == ""


def test_a_save_that_fails(found):
    """Is a warning; the older ones stay, and the next save goes well."""
    first, _ = found["full_disk"]
    assert first["returns"] is False and first["names"] == ["owner", "step_1"]
    assert re.fullmatch("warning: step 2 is not saved, .*File too large.*\n", first["says"])
    assert first["then"] and first["later"] == ["owner", "step_1", "step_3"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(number, found, tmp_path, monkeypatch):
    """The run would begin at step 0, and in time delete what it has. (Path.glob finds nothing with
    EACCES in any Python, and with EIO from 3.12 on.)"""
    assert checkpoint.steps(tmp_path / "none") == checkpoint.steps(Path(__file__)) == []

    def fails(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(OSError, match=os.strerror(number)):
        checkpoint.steps(tmp_path)
    for rank in found["away"]:
        assert rank["ends"] == 1 and rank["written"] is True
        assert rank["names"] == ["owner", "step_1", "step_2"]
    assert re.search(r"/away cannot be written: Permission denied\n$", found["away"][0]["says"])


def test_an_owner_that_a_start_has_left_empty(found):
    assert [rank.get("returns") for rank in found["empty_owner"]] == [1, 1]


# What rank 0 says, and both end with status 1.
FAULTS = {
    "not_finite": r"the weights are not finite after step 2, and not saved: .*",
    "other_values": r"\S+/values/step_1 has config.layers 8, not 4: resume it with its own, or .*",
    "not_shared": r"rank 1 on \S+ does not see what rank 0 writes: all nodes must share runs",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_ends_all_with_a_sentence(found, fault):
    first, second = found[fault]
    assert first["ends"] == second["ends"] == 1 and second["says"] == ""
    assert re.fullmatch(FAULTS[fault] + "\n", first["says"])
    assert fault != "not_finite" or first["names"] == ["owner", "step_1"]
    assert fault != "other_values" or first["same"] == 1


def test_a_rank_s_own_weights_are_not_lost(found):
    """Every rank would resume with rank 0's, without a word."""
    [first, second] = found["own_weights"]
    own = "experts has other values on rank 1 than on rank 0, and only those of rank 0 would be "
    own += "saved, so the run ends: "
    own += "make it a DTensor, by DTensor.from_local(part, mesh, [Shard(0)])"
    for how in ("plain", "by_hand"):
        assert first[how]["ends"] == second[how]["ends"] == 1
        assert first[how]["says"] == f"{own}\n" and second[how]["says"] == ""
        assert first[how]["names"] == ["owner"]
    for how in ("dtensor", "copies"):
        assert first[how]["says"] == "" and first[how]["names"] == ["owner", "step_1"]
    assert first["dtensor"]["own"] and second["dtensor"]["own"]


def test_no_rank_ends_before_the_fault_is_printed(found):
    """The launcher would then end rank 0."""
    first, second = found["slow_words"]
    assert second["ended"] >= first["printed"]


def test_a_start_that_was_replaced_writes_nothing(found):
    """Its restarts are compared as numbers: 10 is later than 9."""
    first, second = found["zombie"]
    assert first["again"]["ends"] == second["again"]["ends"] == 1
    assert "belongs to a later start of this job, so this one ends" in first["again"]["says"]
    assert first["writes"]["ends"] == 1
    assert re.search(r"belongs to another start now \(7 10 ", first["writes"]["says"])
    assert [name for name in first["names"] if name.startswith("step")] == ["step_1"]
    assert first["parts"][0].startswith(".step_1.7.9."), "two starts may write the same step"


def test_two_jobs_in_one_folder(found):
    """By mistake: the first one writes. If the second one is to resume: the later one."""
    first, second = found["two_jobs"]
    assert first["refused"]["ends"] == second["refused"]["ends"] == 1
    sentence = r"\S+/jobs belongs to job 7, which began on \S+: pass --resume to take it over, .*\n"
    assert re.fullmatch(sentence, first["refused"]["says"]) and first["first"]
    assert first["writes"]["ends"] == 1 and "(8 0 " in first["writes"]["says"]
    assert first["then"] and "step_2" in first["names"] and "step_3" not in first["names"]


def test_what_no_run_wrote_is_not_replaced(found):
    """In a folder of somebody's own, named by mistake."""
    sentences = {"model": r"\S+/model/model is of no run: move it away, or choose another .*"}
    damaged = r"\S+/owner is damaged, or of another program: delete it, or choose another .*"
    sentences |= dict.fromkeys(("owner", "link"), damaged)
    for name, sentence in sentences.items():
        first, second = (rank[name] for rank in found["of_no_run"])
        assert first["ends"] == second["ends"] == 1 and first["kept"], name
        assert re.fullmatch(sentence + "\n", first["says"]) and second["says"] == ""
