"""A run directory is read whole, torn, replaced, dead and half empty."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fullframe.errors import RunError
from fullframe.observation.run_files import RunReader, read_run
from tests.observation.run_writer import LEAK, MIB, facts, good_run, observations, records, write_lines, write_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(good_run(tmp_path / "run"))
    assert (run.state, run.step, run.steps, len(run.table), run.unreadable) == ("finished", 300, 300, 300, 0)
    assert list(run.table.steps) == list(range(1, 301))
    steps, errors = run.table.known("end_point_error")
    assert steps == list(range(25, 301, 25)) and all(map(math.isfinite, errors))
    assert [row.step for row in run.observed[1]] == list(range(1, 301, 3))
    assert run.observed[0][0].bytes["parameter"] == 220 * MIB
    assert run.facts is not None and run.facts.prediction is not None
    assert run.facts.prediction.peak_bytes == 2850 * MIB
    assert run.facts.started is not None and run.facts.ended is not None
    assert (run.facts.ended - run.facts.started).total_seconds() == 123
    assert run.log[0].endswith("step-00000300")


def test_files_and_keys_that_are_absent_or_wrong_are_no_error(tmp_path: Path) -> None:
    bare = read_run(write_run(tmp_path / "bare", metrics=[{"step": 1, "loss": 2.0}, {"step": 2}]))
    assert (bare.state, bare.facts, bare.strategy, bare.observed, bare.steps) == ("unknown", None, None, {}, None)
    assert bare.table.known("loss") == ([1], [2.0]) and bare.table.known("nothing") == ([], [])
    wrong = {"state": 3, "pid": "x", "started": "yesterday", "versions": [], "arguments": "no", "prediction": 4}
    rows = [{"step": 1, "seconds": {"data": "slow", "forward": 0.5}, "bytes": None, "peak_bytes": math.inf}, {}]
    run = read_run(write_run(tmp_path / "wrong", run=wrong, observed={0: rows}))
    assert run.facts is not None and (run.facts.pid, run.facts.started, run.facts.arguments) == (None, None, ())
    (row,) = run.observed[0]
    assert (row.seconds, row.bytes, row.peak_bytes) == ({"forward": 0.5}, {}, None)
    (tmp_path / "wrong" / "run.json").write_text("{")
    assert read_run(tmp_path / "wrong").facts is None


def test_what_is_no_run_directory_is_refused_with_the_runs_it_holds(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no run directory .*; check the path"):
        read_run(tmp_path / "missing")
    with pytest.raises(RunError, match=r"no run directory, it has none of run\.json"):
        read_run(tmp_path)
    good_run(tmp_path / "first")
    with pytest.raises(RunError, match=r"it holds 1 run, the newest is .*first"):
        read_run(tmp_path)
    good_run(tmp_path / "second")
    for file in (tmp_path / "first").iterdir():
        os.utime(file, (1.0, 1.0))
    (tmp_path / "first" / "report.html").write_text("")  # which is written at any time
    os.utime(tmp_path / "second", (1.0, 1.0))
    with pytest.raises(RunError, match=r"it holds 2 runs, the newest is .*second"):
        read_run(tmp_path)


def test_a_live_run_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", metrics=records(3))
    reader = RunReader(path)
    assert list(reader.read().table.steps) == [1, 2, 3]
    line = json.dumps({"step": 4, "loss": 0.5}) + "\n"
    with open(path / "metrics.jsonl", "a") as file:
        file.write(line[:9])
    assert (len(reader.read().table), reader.read().unreadable) == (3, 0), "a torn last line is not read yet"
    with open(path / "metrics.jsonl", "a") as file:
        file.write(line[9:] + "garbage\n" + json.dumps(LEAK) + "\n")
    run = reader.read()
    assert (run.step, run.table.last("loss"), run.unreadable, run.leaks) == (4, 0.5, 1, [LEAK])
    write_lines(path / "observed" / "rank0.jsonl", observations(0, [1, 2]))
    assert [row.step for row in reader.read().observed[0]] == [1, 2]
    write_lines(path / "observed" / "rank0.jsonl", observations(0, [2, 3]), mode="a")
    assert [row.step for row in reader.read().observed[0]] == [1, 2, 3], "step 2 came again after a resume"


def test_a_resumed_run_replaces_its_later_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", metrics=[*records(9), LEAK])
    reader = RunReader(path)
    assert reader.read().step == 9
    # As RunDirectory.forget_after does: another file in its place, shorter, perhaps longer by the time it is read.
    write_lines(path / "metrics.partial", [*records(4), *records(8, start=5, seed=1)])
    os.replace(path / "metrics.partial", path / "metrics.jsonl")
    run = reader.read()
    assert list(run.table.steps) == list(range(1, 13)) and run.leaks == []
    assert run.table.column("loss")[5] == records(8, start=5, seed=1)[1]["loss"]


def test_ranks_that_a_run_went_on_without_are_none_of_it(tmp_path: Path) -> None:
    observed = {rank: observations(rank, range(1, 5 + 5 * (rank < 2))) for rank in range(4)}
    path = write_run(tmp_path / "run", run=facts(world_size=2), observed=observed)
    assert list(read_run(path).observed) == [0, 1]
    assert list(read_run(write_run(path, run=facts(world_size=None))).observed) == [0, 1, 2, 3], "it does not say"


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    path = tmp_path / "run"
    states = []
    for pid, host in ((ended.pid, socket.gethostname()), (ended.pid, "elsewhere"), (os.getpid(), socket.gethostname())):
        run = facts(state="running", pid=pid, host=host, ended=None)
        states.append(read_run(write_run(path, run=run)).state)
    assert states == ["died", "running", "running"]
    os.utime(path / "run.json", (1e9, 1e9))
    assert read_run(path).state == "died", "run.json is older than this process: its pid was another one's"


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()  # it has ended, and nobody waited for it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert read_run(write_run(tmp_path / "run", run=facts(state="running", pid=process.pid))).state == "died"
