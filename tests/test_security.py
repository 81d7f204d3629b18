"""What SECURITY.md says: nothing of the submitter's runs unasked, no secret is told, a .pt file cannot run code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, environment, run

TRACKED = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
SECRET = "canary-3f1d9c"  # no part of any other text


def hostile(folder: Path) -> dict[str, str]:
    """Variables of a submitter, each of which touches a canary file of its own if anything runs it."""
    (folder / "bash_env").write_text(f"touch {folder}/canary-bash-env\n")
    touch = f"$(touch {folder}/canary-%s)"
    return {
        "BASH_ENV": f"{folder}/bash_env",
        "ENV": f"{folder}/bash_env",
        "BASH_FUNC_srun%%": f"() {{ touch {folder}/canary-function; }}",
        "BASH_FUNC_source%%": f"() {{ touch {folder}/canary-source; }}",
        "SHELLOPTS": "xtrace",
        "PS4": touch % "ps4",
        "MASTER_PORT": touch % "port",  # a string to all that we run: the scripts of this test do not meet
        "OMP_NUM_THREADS": touch % "threads",
        "DEBUG": touch % "debug",
        "ENV_SH_JOB_ID": touch % "job",
        "SLURM_JOB_ID": f"a[{touch % 'slurm'}]",  # sbatch sets it anew
    }


def submit(cluster, folder: Path, *command: object) -> int:
    """sbatch with the hostile variables, which are set for sbatch alone: the cluster's own script is bash, too."""
    variables = [f"{name}={value}" for name, value in hostile(folder).items()]
    done = cluster.exec("env", *variables, "sbatch", "--parsable", *command)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def canaries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("canary*"))


def test_the_environment_of_the_submitter_does_not_run_in_the_job(cluster, tmp_path):
    """By no launcher; but a job of plain bash runs BASH_ENV, which shows that this test can fail."""
    arguments = ["; touch canary", "`touch canary`", "$(touch canary)", "'; touch canary; '", "--x=$(touch canary)"]
    plain = tmp_path / "plain.sh"
    plain.write_text("#!/bin/bash\nsrun true\n")
    cluster.wait(submit(cluster, tmp_path, "--nodes=1", "--output=/dev/null", plain))
    assert canaries(tmp_path) == ["canary-bash-env", "canary-function"]
    for path in tmp_path.glob("canary*"):
        path.unlink()
    ids = {}
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=1", "--gpus-per-node=1", *(["--ntasks-per-node=1"] if way == "srun" else [])]
        command = [f"--output={tmp_path}/{way}", launcher, "tests/scripts/variables.py", *arguments]
        ids[way] = submit(cluster, tmp_path, *size, *command)
    for way in LAUNCHERS:
        job = cluster.wait(ids[way])
        assert "canary" not in re.sub(r"VARIABLES.*|\$\(touch \S+", "", job.log), job.log
        if way != "torchrun":  # which wants a number for its port
            assert job.state == "COMPLETED" and job.ranks()[0]["arguments"] == arguments, job.log
    assert canaries(tmp_path) == [] and not list(REPOSITORY.glob("canary*"))


@pytest.mark.parametrize(
    "value", ["a[$(touch CANARY)]", "$(touch CANARY)", "`touch CANARY`", "2; touch CANARY", "-1", "0"]
)
def test_counts_from_the_environment_are_numbers_or_refused(value, tmp_path):
    """bash's arithmetic would run what stands in an index."""
    value = value.replace("CANARY", f"{tmp_path}/canary")
    done = run("./torchrun.sh", "tests/scripts/variables.py", env=environment(NPROC_PER_NODE=value))
    assert done.returncode == 1 and canaries(tmp_path) == []
    assert len(done.stderr.splitlines()) == 1 and "not a number of ranks" in done.stderr


@pytest.mark.parametrize("way", cells([(way,) for way in LAUNCHERS], ("torchrun",)))
def test_no_secret_in_log_script_or_command_line(way, cluster, tmp_path):
    """Not even with DEBUG=1, which prints many of the variables."""
    secrets = {"SECRET_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    size = ["--nodes=1", "--gpus-per-node=1", *(["--ntasks-per-node=1"] if way == "srun" else [])]
    job = cluster.sbatch(
        *size, f"--output={tmp_path}/log", LAUNCHERS[way], "tests/scripts/find_secret.py", env={**secrets, "DEBUG": "1"}
    )
    assert job.state == "COMPLETED" and "LOOKED" in job.log and "SLURM_JOB_ID=" in job.log, job.log
    assert SECRET not in job.log and "LEAK" not in job.log, job.log
    script = cluster.exec("scontrol", "write", "batch_script", job.id, "-").stdout
    assert script.strip() == (REPOSITORY / LAUNCHERS[way]).read_text().strip()


def test_debug_does_not_print_slurms_token():
    """The line of aux/job.sh. Slurm's clients use SLURM_JWT as their credential, so no job here can be given one."""
    (line,) = [x for x in (REPOSITORY / "aux/job.sh").read_text().splitlines() if x.strip().startswith("env | ")]
    shown = run("bash", "-c", line, env=environment(SLURM_JWT=SECRET, SLURM_JOB_ID="7")).stdout
    assert "SLURM_JOB_ID=7" in shown and SECRET not in shown


def test_no_shell_is_given_a_string():
    """No eval, no sh -c of something put together, and Python starts programs by a list of words."""
    for path in TRACKED:
        text = (REPOSITORY / path).read_text(errors="replace")
        if path.endswith(".sh"):
            code = re.sub(r"(^|\s)#.*", "", text)
            assert not re.search(r"(^|[;&|({\s])eval\s", code), path
            fixed = re.sub(r"\bbash( --norc)? -p?c '[^']*'", "", code)  # nothing is expanded; arguments stay words
            assert not re.search(r"\b(ba)?sh( --\w+)* -\w*c\b", fixed), path
        if path.endswith(".py") and not path.startswith("tests/"):
            for node in ast.walk(ast.parse(text)):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                assert called not in ("eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads"), path
                keywords = {x.arg: ast.unparse(x.value) for x in node.keywords} if called else {}
                assert keywords.get("shell", "False") == "False", path
                assert called != "torch.load" or keywords.get("weights_only") == "True", path


@pytest.mark.parametrize(
    "script", ["distributed/train_preemptible.py", "distributed/train_ddp.py", "local/train_single.py"]
)
def test_a_checkpoint_from_a_stranger_runs_no_code(script, tiny, tmp_path):
    """It is refused; train_preemptible.py says so in a sentence."""
    name = "checkpoint_step_1.pt" if "preemptible" in script else "checkpoint_epoch_1.pt"
    make = "import torch, os, sys\nclass Evil:\n    def __reduce__(self):\n"
    make += "        return os.system, (f'touch {sys.argv[1]}/canary',)\n"
    make += "torch.save({'epoch': 1, 'model': Evil()}, sys.argv[1] + '/' + sys.argv[2])"
    assert run(sys.executable, "-c", make, tmp_path, name).returncode == 0
    control = f"import torch; torch.load('{tmp_path}/{name}', weights_only=False)"
    assert run(sys.executable, "-c", control).returncode == 0 and canaries(tmp_path) == ["canary"]
    (tmp_path / "canary").unlink()
    done = run(sys.executable, script, "--data-dir", tiny, "--resume", "--checkpoint-dir", tmp_path)
    assert done.returncode == 1 and canaries(tmp_path) == [], done.stdout + done.stderr
    if "preemptible" in script:
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert f"{name} is not damaged, but cannot be loaded: " in done.stderr, done.stderr
    else:
        assert "Weights only load failed" in done.stderr, done.stderr
