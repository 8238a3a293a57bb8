"""Checkpoints are written beside the training, whole or not at all, by all ranks or none."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from fullframe.errors import CheckpointError
from fullframe.training.checkpoints import safetensors_files as tensor_files
from fullframe.training.checkpoints import writer as checkpoint
from fullframe.training.checkpoints.writer import Checkpoints, checkpoints_in, newest_checkpoint
from tests.rank_group import rank_group
from tests.training.checkpoints.states import (
    assert_equal,
    damage,
    large_state,
    names_in,
    restored,
    state_at,
    train,
    values_of,
    write,
)


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing stops before its first fsync until the event is set."""
    event = threading.Event()
    original = os.fsync

    def fsync(descriptor):
        assert event.wait(100)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yield event
    event.set()


def test_training_goes_on_while_it_is_written(tmp_path, slow_disk):
    state = train(state_at(), 1)
    expected = values_of(state)
    written = []
    with Checkpoints(tmp_path, 3, written.append) as checkpoints:
        checkpoints.save(state)
        train(state, 2)
        checkpoints.poll()
        assert written == [] and checkpoints_in(tmp_path) == []
        threading.Timer(0.2, slow_disk.set).start()
        checkpoints.save(state)  # waits for the one before
        assert [path.name for path in written] == ["step-00000001"]
    assert [path.name for path in written] == ["step-00000001", "step-00000003"]
    shutil.rmtree(tmp_path / "step-00000003")
    fresh = state_at(seed=1)
    restored(tmp_path, fresh)
    assert_equal(values_of(fresh), expected)


def test_poll_says_when_it_is_written(tmp_path):
    state, written = state_at(1), []
    with Checkpoints(tmp_path, 3, written.append) as checkpoints:
        checkpoints.save(state)
        checkpoints._writing.watch(lambda doing: None)
        checkpoints.poll()
        assert len(written) == 1
        checkpoints.poll()
        assert len(written) == 1


def test_what_was_begun_is_finished_when_training_fails(tmp_path, slow_disk):
    state = state_at(1)
    threading.Timer(0.2, slow_disk.set).start()
    with pytest.raises(KeyError), Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.save(state)
        raise KeyError("the recipe's own")
    assert newest_checkpoint(tmp_path)[0].manifest.step == 1


def test_a_rank_that_writes_on_before_it_saves_alone_is_not_taken_for_hung(tmp_path, slow_disk):
    state, beats = state_at(1), []

    def beat(doing):
        beats.append(doing)
        slow_disk.set()

    with Checkpoints(tmp_path, 3, beat=beat) as checkpoints:
        checkpoints.save(state)
        checkpoints.save_alone(train(state, 1))
    assert beats[0] == f"writing {tmp_path / 'step-00000001'}"
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_newest_few_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 11):
        write(state_at(step), tmp_path)
    assert names_in(tmp_path) == [f"step-{n:08d}" for n in (9, 10, 11)]


FILE_OPERATIONS = ("mkdir", "fsync", "rename", "rmdir")

SCRIPT = """
import os, sys
from pathlib import Path
from tests.training.checkpoints import test_writer as here
folder = Path(sys.argv[1])
here.torch.optim.AdamW(here.nn.Linear(1, 1).parameters())  # loads what every child would load
for number in range(1, 100):
    child = os.fork()
    if child == 0:
        here.write(here.large_state(1), folder / str(number), keep=1)
        here.interrupt(number)
        here.write(here.large_state(2), folder / str(number), keep=1)
        print("wrote", number, flush=True)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""


def interrupt(number):
    """This process is killed right before the `number`-th file operation from now."""
    left = number

    def counted(original):
        def operation(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return operation

    for name in FILE_OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def test_a_process_killed_at_any_moment_of_writing_loses_nothing(tmp_path):
    """A second checkpoint replaces the first; the process is killed before each file operation in turn."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    trials = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert done.stdout == f"wrote {len(trials)}\n" and len(trials) > 10
    found = []
    for trial in trials:
        newest, problems = newest_checkpoint(trial)
        assert problems == []
        found.append(newest.manifest.step)
        write(large_state(9), trial, keep=1)
        assert names_in(trial) == ["step-00000009"], "what was left is cleared away"
    assert found == sorted(found) and set(found) == {1, 2}


def test_a_step_that_is_written_again_has_a_checkpoint_at_any_moment(tmp_path, monkeypatch):
    """As after an evaluation that is made up for, and gives the best value."""
    write(state_at(1), tmp_path)
    counts, rename = [], os.rename

    def move(old, new):
        rename(old, new)
        counts.append(len(checkpoints_in(tmp_path)))

    monkeypatch.setattr(os, "rename", move)
    write(state_at(1), tmp_path, keep=1)
    assert counts == [1, 2, 1] and names_in(tmp_path) == ["step-00000001"]


def test_the_order_of_writing(tmp_path, monkeypatch):
    """Nothing gets its name before what it names is on the disk."""
    happened = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor):
        happened.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        fsync(descriptor)

    def move(old, new):
        happened.append(f"name {Path(new).relative_to(tmp_path)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", move)
    write(state_at(1), tmp_path)
    assert happened == [
        "sync step-00000001.partial/rank-0.safetensors",
        "sync step-00000001.partial",
        "sync step-00000001.partial/manifest.json",
        "sync step-00000001.partial",
        "name step-00000001",
        "sync .",
    ]


def loaded(folder, damaged_on_rank):
    """What each rank says about a folder; on one rank a file cannot be opened."""
    original = checkpoint._damage

    def damage(path, manifest):
        if torch.distributed.get_rank() == damaged_on_rank and path.name == "step-00000002":
            return "Permission denied"
        return original(path, manifest)

    checkpoint._damage = damage
    try:
        newest, problems = newest_checkpoint(folder)
        return newest.manifest.step, problems
    except CheckpointError as error:
        return None, str(error)
    finally:
        checkpoint._damage = original


def test_ranks_agree(tmp_path):
    for step in (1, 2):
        write(state_at(step), tmp_path)
    for step, problems in rank_group(2).run(loaded, tmp_path, None):
        assert step == 2 and problems == []
    for step, problems in rank_group(2).run(loaded, tmp_path, 1):
        assert step == 1 and problems == [f"{tmp_path}/step-00000002 is unreadable (rank 1: Permission denied)"]
    damage(tmp_path / "step-00000001", "a file cut off")
    for step, problem in rank_group(2).run(loaded, tmp_path, 1):
        assert step is None
        assert "step-00000002 is unreadable" in problem and "step-00000001 is unreadable" in problem
        assert problem.endswith("no older checkpoint is left: start anew in another run directory")


def failing(folder, where, error=None):
    """Every rank's account of a checkpoint that one rank cannot write."""
    state = state_at(2, model=nn.Linear(50, 50))
    original = tensor_files.os.fsync

    def fsync(descriptor):
        if torch.distributed.get_rank() == 1:
            raise error or OSError(errno.EIO, "Input/output error")
        original(descriptor)

    tensor_files.os.fsync = fsync
    try:
        with Checkpoints(folder, 3) as checkpoints:
            checkpoints.save(state)
            if where == "poll":
                while True:
                    checkpoints.poll()
                    time.sleep(0.01)
            elif where == "save":
                checkpoints.save(state)
    except CheckpointError as error:
        return str(error)
    finally:
        tensor_files.os.fsync = original


@pytest.mark.parametrize("where", ["poll", "save", "end"])
def test_what_one_rank_cannot_write_stops_all(tmp_path, where):
    write(state_at(1, model=nn.Linear(50, 50)), tmp_path)
    for problem in rank_group(2).run(failing, tmp_path, where):
        assert problem == (
            f"cannot write checkpoint {tmp_path}/step-00000002 (rank 1): Input/output error; "
            "step-00000001 is whole, go on from it with --resume"
        )
    assert names_in(tmp_path) == ["step-00000001"]


def test_an_error_of_another_kind_while_one_rank_writes_stops_all(tmp_path):
    first, second = rank_group(2).run(failing, tmp_path, "end", RuntimeError("no pinned memory"))
    assert first == second and first.endswith("step-00000002 (rank 1): RuntimeError: no pinned memory")


def beats_while_one_writes_slowly(folder):
    """How often each rank said that it gets on, while rank 1 alone still wrote its file."""
    beats, seconds, fsync = [], checkpoint._BEAT_SECONDS, os.fsync

    def slow(descriptor):
        time.sleep(0.5 * torch.distributed.get_rank())
        fsync(descriptor)

    os.fsync, checkpoint._BEAT_SECONDS = slow, 0.02
    try:
        with Checkpoints(folder, 3, beat=beats.append) as checkpoints:
            checkpoints.save(state_at(1, model=nn.Linear(50, 50)))
    finally:
        os.fsync, checkpoint._BEAT_SECONDS = fsync, seconds
    return len(beats)


def test_a_rank_that_waits_for_anothers_file_does_not_say_that_it_gets_on(tmp_path):
    first, second = rank_group(2).run(beats_while_one_writes_slowly, tmp_path)
    assert first < second / 2, "a hang of the other would go unnoticed"


def written_apart(folder):
    """Every rank has a folder of its own, as machines without a common disk have."""
    try:
        write(state_at(1), folder / str(torch.distributed.get_rank()))
    except CheckpointError as error:
        return str(error)


def test_a_folder_that_only_one_rank_sees(tmp_path):
    first, second = rank_group(2).run(written_apart, tmp_path)
    assert (
        first
        == second
        == (
            f"cannot write checkpoint {tmp_path}/0/step-00000001 (rank 1): No such file or directory; "
            "the run directory must be visible to all ranks"
        )
    )
