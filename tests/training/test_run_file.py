"""run.json: how a run stands, whoever asks and however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fullframe as ff
from fullframe.errors import CheckpointError, RunError
from fullframe.processes.exit_reasons import StartAgain
from fullframe.processes.lock import is_held
from fullframe.processes.stop_signals import Stopped
from fullframe.training.observers import Observer
from fullframe.training.run_file import LOCK, RunFile, commit_of, note_end, read_run_file
from tests.training.tiny import recipe


class Looking(Observer):
    """What it was told, and what run.json said at each step; it stops or breaks the run in step 3 on request."""

    def __init__(self, ends=lambda: None):
        self.told, self.seen, self.ends = [], [], ends

    def begin(self, run):
        self.run = run
        self.told.append("begin")

    def before_step(self, number):
        self.told.append(number)
        if number == 3:
            self.ends()

    def after_step(self, number, record):
        self.told.append(record["step"])
        self.seen.append(read_run_file(self.run.run_dir))

    def end(self):
        self.told.append("end")


def test_a_run_says_what_it_is_and_that_it_is_done(tmp_path):
    looking = Looking()
    about = {"recipe": "there.py", "commit": "abc"}
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=3, observers=[looking], about=about)
    assert looking.told == ["begin", 1, 1, 2, 2, 3, 3, "end"]
    running, done = looking.seen[0], read_run_file(tmp_path)
    assert (running["state"], running["ended"], running["pid"]) == ("running", None, os.getpid())
    assert running["started"] == done["started"] <= done["ended"]
    assert (done["state"], done["reason"], done["step"], done["steps"], done["world_size"]) == ("finished", "", 3, 3, 1)
    assert (done["recipe"], done["commit"], done["restarts"]) == ("there.py", "abc", 0)
    assert set(done["versions"]) == {"python", "torch", "fullframe"}


def broken():
    raise ValueError("wrong\nhere" + " and here" * 10_000)


def test_an_error_is_the_reason(tmp_path):
    looking = Looking(broken)
    with pytest.raises(ValueError, match="wrong"):
        ff.fit(recipe(), ff.Strategy(), tmp_path, steps=5, observers=[looking])
    assert looking.told[-1] == "end"
    found = read_run_file(tmp_path)
    assert (found["state"], found["step"]) == ("failed", 2)
    assert found["reason"].startswith("ValueError: wrong\nhere and") and len(found["reason"]) < 2100


def test_a_run_that_was_stopped_says_by_what_and_goes_on(tmp_path):
    with pytest.raises(Stopped):
        stopping = Looking(lambda: os.kill(os.getpid(), signal.SIGTERM))
        ff.fit(recipe(), ff.Strategy(), tmp_path, steps=5, observers=[stopping])
    found = read_run_file(tmp_path)
    assert (found["state"], found["reason"]) == ("stopped", "by SIGTERM; go on with --resume")
    looking = Looking()
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=5, resume=True, observers=[looking])
    assert looking.seen[0]["state"] == "running" and looking.told[1] == 4
    assert read_run_file(tmp_path)["state"] == "finished"


def test_a_resume_that_is_refused_leaves_what_is_said_of_the_run(tmp_path):
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=2)
    before = {name: (tmp_path / name).read_text() for name in ("run.json", "strategy.json")}
    other = recipe(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    with pytest.raises(CheckpointError, match="the checkpoint's optimizer is AdamW"):
        ff.fit(other, ff.Strategy(microbatches=2), tmp_path, steps=9, resume=True)
    assert before == {name: (tmp_path / name).read_text() for name in before}
    ff.fit(recipe(), ff.Strategy(microbatches=2), tmp_path, steps=4, resume=True)
    assert read_run_file(tmp_path)["steps"] == 4 and '"microbatches": 2' in (tmp_path / "strategy.json").read_text()


def out_of_room():
    raise RunError("cannot write; make room")


def test_a_run_that_went_on_and_then_failed_is_no_longer_finished(tmp_path):
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=2)
    with pytest.raises(RunError, match="make room"):
        ff.fit(recipe(), ff.Strategy(), tmp_path, steps=4, resume=True, observers=[Looking(out_of_room)])
    found = read_run_file(tmp_path)
    assert (found["state"], found["reason"]) == ("failed", "RunError: cannot write; make room")


def end_by(tmp_path: Path, error: BaseException) -> dict:
    file = RunFile(tmp_path, writes=True)
    with pytest.raises(type(error)), file.standing({"world_size": 2}):
        raise error
    return read_run_file(tmp_path)


def test_a_run_that_is_started_again_still_runs(tmp_path, monkeypatch, capsys):
    found = end_by(tmp_path, StartAgain("out of memory", "--resume"))
    assert (found["state"], found["reason"]) == ("running", "to be started again: out of memory")
    assert end_by(tmp_path, RuntimeError("[gloo/transport] lost"))["state"] == "running"
    assert end_by(tmp_path, RunError("no room"))["state"] == "failed"
    started = read_run_file(tmp_path)["started"]
    file = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(file | {"started": "earlier", "prediction": {"peak_bytes": 3}}))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    RunFile(tmp_path, writes=True).begin({})
    again = read_run_file(tmp_path)
    assert (again["started"], again["restarts"], again["state"]) == ("earlier", 2, "running") and started
    assert again["prediction"] == {"peak_bytes": 3}


def test_only_one_rank_writes_and_a_full_disk_ends_nothing(tmp_path):
    with RunFile(tmp_path, writes=False).standing({}):
        pass
    assert read_run_file(tmp_path) == {}
    with RunFile(tmp_path / "missing", writes=True).standing({}):
        pass
    (tmp_path / "run.json").write_text("[1")
    assert read_run_file(tmp_path) == {}


def test_what_the_ranks_could_not_say_their_launcher_does(tmp_path):
    RunFile(tmp_path, writes=True).begin({})
    note_end(tmp_path, "rank 1 died (SIGKILL)")
    found = read_run_file(tmp_path)
    assert (found["state"], found["reason"]) == ("failed", "rank 1 died (SIGKILL)")
    note_end(tmp_path, "later")
    assert read_run_file(tmp_path) == found


def test_two_runs_do_not_write_into_one_directory(tmp_path):
    """The second is told who has it, its launcher takes nothing from the first, and a dead one keeps nobody out."""
    holds = "import pathlib, sys\nfrom fullframe.processes.lock import ProcessLock\n"
    command = [sys.executable, "-c", f"{holds}lock = ProcessLock(pathlib.Path(sys.argv[1]))\ninput()"]
    RunFile(tmp_path, writes=True).begin({})
    first = read_run_file(tmp_path)
    with subprocess.Popen([*command, str(tmp_path / LOCK)], stdin=subprocess.PIPE) as other:
        while not is_held(tmp_path / LOCK):
            time.sleep(0.01)
        for resume in (False, "auto"):
            with pytest.raises(RunError, match=f"process {os.getpid()} on .* name another directory"):
                ff.fit(recipe(), ff.Strategy(), tmp_path, steps=1, resume=resume)
        note_end(tmp_path, "refused")
        assert read_run_file(tmp_path) == first
        other.kill()
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=1)
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=2, resume=True)  # and a run that has ended lets go of it
    note_end(tmp_path, "later")
    assert read_run_file(tmp_path)["state"] == "finished"


def test_the_commit_of_a_folder(tmp_path):
    assert commit_of(tmp_path) is None
    here = commit_of(Path(__file__).parent)
    assert here is None or len(here.rstrip("+")) == 40
