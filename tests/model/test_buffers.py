"""Buffers replaced by copies for a while."""

import torch
from torch import nn

from fullframe.model.buffers import borrow_buffers, buffers_of, return_buffers


def shared() -> nn.Module:
    """Two batch norms of which the second has the first one's running mean."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    model[1].running_mean = model[0].running_mean
    return model


def test_every_buffer_is_named_with_its_module() -> None:
    model = shared()
    with torch.inference_mode():
        model[0].register_buffer("inference", torch.zeros(1))
    model[0].register_buffer("nothing", None)
    named = [(owner is model[0], name) for owner, name, _ in buffers_of(model)]
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert named == [(True, name) for name in names] + [(False, name) for name in names]


def test_what_is_written_meanwhile_is_forgotten() -> None:
    model = shared()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    addresses = [buffer.data_ptr() for _, _, buffer in buffers_of(model)]
    there = borrow_buffers(model, {})
    model(torch.randn(4, 2, 3, 3))
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    return_buffers(there)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [buffer.data_ptr() for _, _, buffer in buffers_of(model)] == addresses


def test_copies_take_the_values_given_and_stay_shared() -> None:
    model, value = shared(), torch.full((2,), 7.0)
    there = borrow_buffers(model, {(model[0], "running_mean"): value})
    assert model[0].running_mean is model[1].running_mean
    model[1].running_mean.add_(1)
    assert model[0].running_mean.tolist() == [8, 8] and value.tolist() == [7, 7]
    return_buffers(there)
    assert model[0].running_mean.tolist() == [0, 0]
