"""docs/containers.md: a container that a job starts by hand ends with the job."""

import os
import re

import pytest

from engines import succeed
from slurm import REPOSITORY, at_once, environment, run, wait_for


@pytest.fixture
def image(engine):
    """It has `sleep` and nothing else."""
    variables, name = environment(**engine), f"tests-{os.getpid()}-sleep"
    libraries = re.findall(r"(/\S+) \(0x", run("ldd", "/bin/sleep").stdout)
    pack = ["tar --create --dereference --absolute-names", "/bin/sleep", *libraries]
    command = f"{' '.join(pack)} | docker import - {name}"
    succeed("bash", "-o", "pipefail", "-c", command, env=variables)
    yield name
    run("docker", "image", "rm", "--force", name, env=variables)


@pytest.mark.matrix
def test_a_container_ends_with_its_job(engine, image, cluster, tmp_path):
    """After scancel. Without the page's trap and options it runs on."""
    page = (REPOSITORY / "docs/containers.md").read_text()
    [script] = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", page, re.M | re.S)
    script = re.sub(r" --gpus \S+| --gpus-per-node=1| --shm-size=8g", "", script)
    script = script.replace("IMAGE python train.py", f"{image} /bin/sleep 600")
    careless = re.sub(r"^trap .*\n", "", script, flags=re.M).replace(" --rm --init", "")
    env = environment(**engine)

    def running(job: int) -> bool:
        shown = run("docker", "ps", "--quiet", f"--filter=name=job-{job}$", env=env)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout != ""

    def scenario(name: str, text: str):
        (tmp_path / name).write_text(text)
        options = [f"--output={tmp_path}/{name}.out", f"--chdir={tmp_path}", "--cpus-per-task=1"]
        job = cluster.submit(*options, tmp_path / name, env=engine)
        try:
            wait_for(lambda: running(job), 60)
            cluster.exec("scancel", job)
            assert cluster.wait(job).state == "CANCELLED"
            if name == "page":
                wait_for(lambda: not running(job), 20)
            else:
                assert running(job)
        finally:
            run("docker", "rm", "--force", f"job-{job}", env=env)

    at_once(scenario, [("page", script), ("careless", careless)])
