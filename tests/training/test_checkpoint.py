"""A checkpoint is whole or not there, is checked before it is believed, and all ranks agree on it."""

import errno
import os
import random
import zipfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fullframe as ff
from fullframe.errors import CheckpointError
from fullframe.training import checkpoint
from fullframe.training.checkpoint import RunState, checkpoints_in, load_newest_checkpoint, save_checkpoint
from fullframe.training.randomness import kept_random_state, random_state, set_random_state
from tests.ranks import rank_group
from tests.training.tiny import Frames, Network


def state_at(step, seed=0):
    torch.manual_seed(seed)
    mesh = ff.init_mesh()
    model = Network()
    loader = ff.ShardedLoader(DataLoader(Frames(), 4, shuffle=True), mesh)
    return RunState(model=model, optimizer=torch.optim.AdamW(model.parameters()), loader=loader, step=step)


def test_plain_torch_reads_it(tmp_path):
    state = state_at(7)
    path = save_checkpoint(state, tmp_path / "new" / "checkpoints", keep=3)
    assert path.name == "step-00000007.pt"
    contents = torch.load(path, weights_only=True)
    assert contents["step"] == 7
    other = Network()
    other.load_state_dict(contents["model"])
    assert all(map(torch.equal, other.state_dict().values(), state.model.state_dict().values()))


def test_the_newest_few_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 11):
        save_checkpoint(state_at(step), tmp_path, keep=3)
    assert [path.name for path in checkpoints_in(tmp_path)] == [f"step-{n:08d}.pt" for n in (9, 10, 11)]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in checkpoints_in(tmp_path)], "nothing else is left"


def test_random_states_come_back():
    def draw():
        return random.random(), float(np.random.normal()), torch.rand(()).item()

    np.random.seed(0)
    np.random.normal()  # leaves a second number in numpy's cache
    state = random_state()
    first = draw()
    set_random_state(state)
    assert draw() == first
    set_random_state(state)
    with kept_random_state():
        draw()
    assert draw() == first


def test_a_crash_while_writing_leaves_the_old_one(tmp_path, monkeypatch):
    save_checkpoint(state_at(1), tmp_path, keep=1)

    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(
        CheckpointError, match=r"cannot write checkpoint .*step-00000002\.pt: .*No space left on device"
    ):
        save_checkpoint(state_at(2), tmp_path, keep=1)
    state, problems = load_newest_checkpoint(tmp_path)
    assert state["step"] == 1 and problems == []


def damage(path, kind):
    contents = bytearray(path.read_bytes())
    if kind == "empty":
        contents = b""
    elif kind == "cut off":
        contents = contents[: len(contents) // 2]
    elif kind == "not a checkpoint":
        contents = b"hello " * 1000
    elif kind == "one bit of a weight":
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda record: record.file_size)
        contents[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(contents)


KINDS = ["empty", "cut off", "not a checkpoint", "one bit of a weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, kind):
    for step in (1, 2):
        save_checkpoint(state_at(step), tmp_path, keep=3)
    damage(tmp_path / "step-00000002.pt", kind)
    state, problems = load_newest_checkpoint(tmp_path)
    assert state["step"] == 1
    assert len(problems) == 1 and "step-00000002.pt is unreadable" in problems[0]


def test_foreign_objects_are_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save({"model": Payload()}, tmp_path / "step-00000001.pt")
    with pytest.raises(CheckpointError, match="unreadable"):
        load_newest_checkpoint(tmp_path)
    assert not (tmp_path / "was run").exists()


def loaded(folder, damaged_on_rank):
    """What each rank says about a folder; on one rank the file cannot be opened."""
    original = checkpoint._read

    def read(path):
        if torch.distributed.get_rank() == damaged_on_rank and path.name == "step-00000002.pt":
            return None, "Permission denied"
        return original(path)

    checkpoint._read = read
    try:
        state, problems = load_newest_checkpoint(folder)
        return state["step"], problems
    except CheckpointError as error:
        return None, str(error)
    finally:
        checkpoint._read = original


def test_ranks_agree(tmp_path):
    for step in (1, 2):
        save_checkpoint(state_at(step), tmp_path, keep=3)
    for step, problems in rank_group(2).run(loaded, tmp_path, None):
        assert step == 2 and problems == []
    for step, problems in rank_group(2).run(loaded, tmp_path, 1):
        assert step == 1 and problems == [f"{tmp_path}/step-00000002.pt is unreadable (rank 1: Permission denied)"]
    damage(tmp_path / "step-00000001.pt", "cut off")
    for step, problem in rank_group(2).run(loaded, tmp_path, 1):
        assert step is None
        assert "step-00000002.pt is unreadable" in problem and "step-00000001.pt is unreadable" in problem
        assert problem.endswith("no older checkpoint is left: start anew in another run directory")


def test_no_checkpoint_at_all(tmp_path):
    assert load_newest_checkpoint(tmp_path) == (None, [])


def test_a_checkpoint_of_another_model_or_version():
    contents = state_at(1).state_dict()
    other = state_at(1)
    other.model = torch.nn.Conv2d(3, 3, 1)
    with pytest.raises(CheckpointError, match="is of another model or optimizer"):
        other.load_state_dict(contents)
    with pytest.raises(CheckpointError, match="checkpoint format 99 is unknown; this version reads 1"):
        state_at(1).load_state_dict(contents | {"format": 99})
