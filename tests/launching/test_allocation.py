"""Where the machines of a Slurm allocation meet; Slurm's own program is a script here, tests/launching/test_on_slurm.py
asks the real one.
"""

import os
import stat
from pathlib import Path

import pytest

from fullframe.errors import LaunchError
from fullframe.launching.allocation import rendezvous_of


def says(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "scontrol").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "scontrol").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_first_machine_by_the_address_that_slurm_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """case "$2 $3" in
        "hostnames n[3-4]") printf "n3\\nn4\\n" ;;
        "node n3") echo "NodeName=n3 NodeAddr=10.0.0.3 NodeHostName=n3" ;;
        *) exit 1 ;;
    esac"""
    says(tmp_path, monkeypatch, script)
    environment = {"SLURM_JOB_ID": "12007", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]"}
    assert rendezvous_of(environment) == "10.0.0.3:20007"
    with pytest.raises(LaunchError, match=r"scontrol show hostnames n\[1-4\] failed"):
        rendezvous_of(environment | {"SLURM_STEP_NODELIST": ""})


def test_without_slurms_program_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="give --rendezvous"):
        rendezvous_of({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"})
