"""How runs stand, from what lies in their directories and what Slurm says of them."""

import json
import math
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from fullframe.errors import LaunchError
from fullframe.launching.jobs import STATES, Files, JobRow, jobs, selected
from fullframe.observation.memory.timeline_file import TimelineFile

ALIVE = {"state": "running", "pid": os.getpid(), "host": socket.gethostname(), "steps": 10, "batch_size": 8}
GONE = ALIVE | {"pid": 2**22 + 1}


def run(folder: Path, facts: dict[str, Any], *records: dict[str, Any], log: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "log.txt").write_text(log)


def launched(folder: Path, places: list[str], job: str | None = "7", on: str = "slurm", **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = [{"place": place, "values": [f"v={place}"]} for place in places]
    (folder / "launch.json").write_text(json.dumps({"on": on, "job_id": job, **more, "runs": runs}))


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, fails: str = "") -> None:
    """Slurm's squeue is a script that says this."""
    text = "\n".join(f"echo '{line}'" for line in lines)
    (folder / "squeue").write_text(f"#!/bin/bash\n{text}\n{f'echo {fails!r} >&2; exit 1' if fails else ''}\n")
    (folder / "squeue").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def found(folder: Path) -> dict[str, JobRow]:
    """The rows by the name of their directory."""
    return {Path(row.run).name: row for row in jobs([folder], Files())[0]}


def test_runs_of_this_machine(tmp_path: Path) -> None:
    record = {"step": 4, "loss": 0.5, "step_seconds": 2.0}
    run(tmp_path / "alive", ALIVE, record, {"leak": "list", "after_step": 9}, log="2026-01-01 00:00:00 warning: hot\n")
    run(tmp_path / "gone", GONE | {"reason": "RuntimeError: x", "step": 6}, record)  # its disk was full
    run(tmp_path / "elsewhere", GONE | {"host": "another"})
    run(tmp_path / "sub" / "done", GONE | {"state": "finished"})
    observed = tmp_path / "alive" / "observed"
    observed.mkdir()
    for rank, peak in ((0, 100), (1, 300)):
        (observed / f"rank{rank}.jsonl").write_text(f'{{"peak_bytes": {peak}}}\n{{"peak_bytes": 50}}\n{{"peak_by')
    rows = found(tmp_path)
    assert {name: row.state for name, row in rows.items()} == {
        "alive": "running",
        "gone": "died",
        "elsewhere": "running",
        "done": "finished",
    }
    alive = rows["alive"]
    assert (alive.step, alive.steps, alive.loss, alive.images_per_second) == (4, 10, 0.5, 4.0)
    assert (alive.peak_bytes, alive.warning) == (300, "warning: hot")
    assert (rows["gone"].step, rows["gone"].reason) == (6, f"process {GONE['pid']} is gone; RuntimeError: x")


def test_odd_files_take_no_other_run_along(tmp_path: Path) -> None:
    run(tmp_path / "good", ALIVE, {"step": 4, "loss": 0.5})
    run(tmp_path / "long", GONE | {"state": "failed", "reason": "x" * 20_000})
    odd = {"environment": {"SLURM_RESTART_COUNT": "x"}, "prediction": [1], "batch_size": "8", "steps": None}
    run(tmp_path / "odd", ALIVE | odd, {"step": "4", "loss": math.inf, "step_seconds": "1"})
    run(tmp_path / "null", ALIVE | {"environment": None, "started": 3})
    (tmp_path / "odd" / "observed").mkdir()
    (tmp_path / "odd" / "observed" / "rank0.jsonl").write_text('{"peak_bytes": NaN, "step": 1, "time": "now"}\n')
    rows = found(tmp_path)
    states = {name: row.state for name, row in rows.items()}
    assert states == {"good": "running", "long": "failed", "odd": "running", "null": "running"}
    odd_row = rows["odd"]
    assert (odd_row.loss, odd_row.peak_bytes, odd_row.images_per_second, odd_row.requeues) == (None, None, None, 0)


def test_another_process_with_the_number_of_the_run_is_not_the_run(tmp_path: Path) -> None:
    run(tmp_path / "old", ALIVE)
    os.utime(tmp_path / "old" / "run.json", (1e9, 1e9))  # before this process began
    assert found(tmp_path)["old"].state == "died"


def test_the_pace_is_that_of_the_clock_where_ranks_are_observed(tmp_path: Path) -> None:
    run(tmp_path / "slow", ALIVE, {"step": 4, "loss": 0.5, "step_seconds": 0.01})
    (tmp_path / "slow" / "observed").mkdir()
    times = [0.0, 0.5, 7200.0, 7200.5, 7201.0]  # a new start lies between
    lines = [json.dumps({"step": number, "time": time, "peak_bytes": 1}) for number, time in enumerate(times)]
    (tmp_path / "slow" / "observed" / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    assert found(tmp_path)["slow"].images_per_second == ALIVE["batch_size"] / 0.5


def test_of_a_long_run_too_the_peak_and_the_pace_are_known(tmp_path: Path) -> None:
    """A CPU's ranks say their peak in the second step alone; the file is thinned to every second one, and so on."""
    run(tmp_path / "long", ALIVE, {"step": 1400, "loss": 0.5, "step_seconds": 0.01})
    file = TimelineFile(tmp_path / "long", 0, 0)
    for step in range(1, 1401):
        row = {"step": step, "time": 0.5 * step, "seconds": {"data": 0.49}, "host_bytes": 10**9}
        if file.wants(step):
            file.add(row | ({"peak_bytes": 300, "bytes": {"activation": 300}} if step == 2 else {}))
    row = found(tmp_path)["long"]
    assert (row.peak_bytes, row.images_per_second) == (300, ALIVE["batch_size"] / 0.5)


def test_runs_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["waits", "again", "begins", "trains", "done", "cut", "gone", "ends", "ready", "anew"]
    launched(tmp_path / "sweep", names)
    for name, state in (("again", "stopped"), ("begins", "stopped"), ("trains", "running"), ("done", "finished"),
                        ("cut", "running"), ("ends", "stopped"), ("ready", "finished"),
                        ("anew", "finished")):  # fmt: skip
        said = {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_ID": str(10 + names.index(name)) if name != "anew" else "4"}
        run(tmp_path / "sweep" / name, GONE | {"state": state, "environment": said})
    (tmp_path / "sweep" / "waits").mkdir()
    launched(tmp_path / "single", ["."], job="12")
    run(tmp_path / "single", GONE | {"restarts": 3, "prediction": {"peak_bytes": 400}})
    states = ["PENDING", "PENDING", "RUNNING", "RUNNING", "COMPLETED", "NODE_FAIL", None, "COMPLETING"]
    states += ["RUNNING", "RUNNING"]
    lines = [f"{10 + i}|7|{i}|{state}|Why|/" for i, state in enumerate(states) if state]
    slurm(tmp_path, monkeypatch, *lines, "99|99|N/A|RUNNING|None|/else|where", "12|12|N/A|RUNNING|None|/")
    rows = found(tmp_path)
    assert {name: row.state for name, row in rows.items()} == {
        "waits": "pending",
        "again": "requeued",
        "begins": "starting",
        "trains": "running",
        "done": "finished",
        "cut": "died",
        "gone": "lost",
        "ends": "stopped",
        "single": "running",
        "ready": "finished",  # its report is being written
        "anew": "starting",
    }
    single = rows["single"]
    assert (single.job, single.restarts, single.requeues, single.predicted_bytes) == ("12", 3, 0, 400)
    assert (rows["waits"].reason, rows["waits"].job, rows["waits"].values) == ("Why", "7_0", ("v=waits",))
    assert (rows["cut"].reason, rows["again"].requeues) == ("its job node_fail", 2)
    assert {row.state for row in rows.values()} <= set(STATES)


def test_runs_of_docker_and_kubernetes(tmp_path: Path) -> None:
    of_container = GONE | {"host": "0123456789ab"}
    waits, gone = ({"launcher": facts | {"changed": time.time()}} for facts in (ALIVE, GONE))
    for name, on, job, more in (
        ("no-image", "docker", None, {"exit_code": 125}),
        ("pulls", "docker", None, waits),
        ("left", "docker", None, gone),
        ("killed", "docker", None, {"exit_code": 137}),
        ("trains", "docker", None, waits),
        ("done", "docker", None, {"exit_code": 0}),
        ("refused", "kubernetes", None, {}),
        ("taken", "kubernetes", "job.batch/x", {}),
    ):  # fmt: skip
        launched(tmp_path / name, ["."], job, on, **more)
    for name, state in (("killed", "running"), ("trains", "running"), ("done", "finished")):
        run(tmp_path / name, of_container | {"state": state})
    assert {name: (row.state, row.reason) for name, row in found(tmp_path).items()} == {
        "no-image": ("lost", "docker has ended with exit code 125"),
        "pulls": ("starting", ""),
        "left": ("lost", "what waited for docker is gone; launch it again"),
        "killed": ("died", "docker has ended with exit code 137"),
        "trains": ("running", ""),
        "done": ("finished", ""),
        "refused": ("lost", "kubectl has not taken it; launch it again"),
        "taken": ("unknown", "what it writes lies on the cluster's volume; see kubectl get job.batch/x"),
    }


def test_a_controller_that_does_not_answer_hides_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(tmp_path / "sweep", ["a", "b"])
    run(tmp_path / "sweep" / "b", GONE | {"state": "failed", "reason": "KeyError"})
    launched(tmp_path / "unsent", ["."], job=None)
    slurm(tmp_path, monkeypatch, fails="slurm_load_jobs error: Unable to contact slurm controller")
    rows, problem = jobs([tmp_path], Files())
    assert [(Path(row.run).name, row.state) for row in rows] == [("a", "unknown"), ("b", "failed"), ("unsent", "lost")]
    assert "Unable to contact slurm controller" in problem


def test_filters(tmp_path: Path) -> None:
    for name, state in (("lr=1,seed=2", "finished"), ("lr=1,seed=3", "failed"), ("lr=2,seed=2", "finished")):
        run(tmp_path / name, {"state": state})
    rows, _ = jobs([tmp_path], Files())
    assert [Path(row.run).name for row in selected(rows, ["finished"], ["lr=1"])] == ["lr=1,seed=2"]
    assert len(selected(rows, [], ["lr=*seed=2"])) == 2
    assert selected(rows, [], []) == rows
    with pytest.raises(LaunchError, match="there is no folder"):
        jobs([tmp_path / "none"], Files())


def test_a_file_that_has_not_changed_is_read_once(tmp_path: Path) -> None:
    files, parsed = Files(), []
    path = tmp_path / "file"
    for text in ("one", "two!"):
        path.write_text(text)
        assert [files.read(path, lambda found: parsed.append(found) or found) for _ in range(3)] == [text] * 3
    assert parsed == ["one", "two!"]
