"""A run's state without a run: made, trained a little, written, read again and damaged."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import fullframe as ff
from fullframe.training.checkpoints.manifest import MANIFEST
from fullframe.training.checkpoints.state import RunState
from fullframe.training.checkpoints.writer import Checkpoints, load, newest_checkpoint
from tests.training.tiny import Frames, Network


def state_at(step=0, seed=0, model=None, optimizer=torch.optim.AdamW, **fields):
    torch.manual_seed(seed)
    mesh = ff.init_mesh()
    model = model or Network()
    loader = ff.ShardedLoader(DataLoader(Frames(), 4, shuffle=True), mesh)
    optimizer = optimizer(model.parameters())
    return RunState(model=model, optimizer=optimizer, loader=loader, mesh=(1, 1, 1), step=step, **fields)


def large_state(step):
    """A state of 2 MB."""
    return state_at(step, model=nn.Linear(500, 500, bias=False, dtype=torch.float64))


def write(state, folder, keep=3):
    written = []
    with Checkpoints(folder, keep, written.append) as checkpoints:
        checkpoints.save(state)
    return written[0]


def train(state, steps):
    """Steps whose gradients follow from the step."""
    for _ in range(steps):
        state.step += 1
        torch.manual_seed(state.step)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        state.optimizer.step()
        if state.average is not None:
            state.average.update()
    return state


def restored(folder, state):
    """`state` after the newest checkpoint, and what was said."""
    newest, problems = newest_checkpoint(folder)
    assert newest is not None and problems == []
    return load(newest, state)


def values_of(state):
    values = [(name, value.clone()) for name, value in state.tensors(first_rank=True).items()]
    return dict(sorted(values))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def damage(path, kind):
    file, manifest = path / "rank-0.safetensors", path / MANIFEST
    contents = bytearray(file.read_bytes())
    if kind == "an empty file":
        file.write_bytes(b"")
    elif kind == "a file cut off":
        file.write_bytes(contents[: len(contents) // 2])
    elif kind == "a file gone":
        file.unlink()
    elif kind == "another file":
        file.write_bytes(b"hello " * 1000)
    elif kind == "one bit of a weight":
        contents[-200] ^= 1
        file.write_bytes(contents)
    elif kind == "one bit of a name":
        contents[20] ^= 1
        file.write_bytes(contents)
    elif kind == "a file too long":
        file.write_bytes(contents + b"\0")
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "an empty manifest":
        manifest.write_text("")
    elif kind == "a manifest cut off":
        manifest.write_text(manifest.read_text()[:-100])
    elif kind == "another number in the manifest":
        text = manifest.read_text()
        assert text.count('"position": 0') == 1
        manifest.write_text(text.replace('"position": 0', '"position": 1'))
    elif kind == "another manifest":
        manifest.write_text('[{"format": 1}]')
