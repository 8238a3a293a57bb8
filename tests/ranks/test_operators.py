"""The operators send what the functions do whose place they take, in the order of their tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fullframe as ff
from fullframe.geometry.extents import Extents
from fullframe.ranks.collectives import all_gather_no_grad, all_sum_no_grad, in_one_row
from fullframe.ranks.exchange import fetch
from fullframe.ranks.mesh import spatial_of
from fullframe.ranks.operators import GraphRecorder
from fullframe.ranks.recording import recording
from tests.rank_group import RankFailure, rank_group

EXTENTS = Extents((0, 4, 11))
WANTED = (range(0, 6), range(2, 11))


def asked(x: Tensor, group: Any, axis: Any) -> list[Tensor]:
    """Forward and backward of an exchange, and the collectives."""
    x = x.requires_grad_()
    rows = fetch(x, 2, EXTENTS, WANTED, axis)
    (back,) = torch.autograd.grad((rows * rows).sum(), x)
    part = x.detach()[:, :, :3].requires_grad_()
    row = in_one_row(part, 2, group)
    (shared,) = torch.autograd.grad((row * row).sum(), part)
    value = x.detach()[0, 0, :2].contiguous()
    return [rows.detach(), back, row.detach(), shared, all_sum_no_grad(value, group), all_gather_no_grad(value, group)]


def both(channels_last: bool) -> list[float]:
    spatial = spatial_of(ff.init_mesh(width=2))
    axis, group = spatial.axis("width"), spatial.replica
    sizes = EXTENTS.sizes[axis.coordinate]
    x = torch.randn(2, 3, sizes, 5, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    expected = asked(x.clone(), group, axis)
    recorder = GraphRecorder()
    with recording(recorder):  # the operators run at once here
        found = asked(x.clone(), group, axis)
        recorder.begin()
    assert [t.stride() for t in expected[:2]] == [t.stride() for t in found[:2]]
    return [float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)]


def test_operators_send_what_the_functions_send() -> None:
    for channels_last in (False, True):
        assert rank_group(2).run(both, channels_last) == [[0.0] * 6] * 2


def apart() -> None:
    group = spatial_of(ff.init_mesh(width=2)).replica
    GraphRecorder().all_sum(torch.zeros(3 + group.rank()), group)


def test_heads_are_compared_when_an_operator_runs() -> None:
    with pytest.raises(RankFailure) as failure:
        rank_group(2).run(apart)
    for _, kind, message, _ in failure.value.errors:
        assert kind == "DivergenceError" and "sum" in message and "(3,)" in message and "(4,)" in message


def drawn() -> list[bool]:
    recorder, cpu = GraphRecorder(), torch.device("cpu")
    torch.manual_seed(3)
    mask, after = recorder.kept([64], 0.5, cpu, part=1), torch.rand(())
    numbers = recorder.draw("normal_", [3], torch.float64, cpu, 1.0, 2.0)
    whole = recorder.draw("randint", [3], torch.int64, cpu, 2, 9)
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(int(torch.randint(2**48, ()).item()) + 1)
    return [
        torch.equal(mask, torch.empty(64, dtype=torch.bool).bernoulli_(0.5, generator=own)),
        torch.equal(after, torch.rand(())),
        torch.equal(numbers, torch.empty(3, dtype=torch.float64).normal_(1.0, 2.0)),
        torch.equal(whole, torch.randint(2, 9, (3,))),
    ]


def test_draws_move_the_default_generator_as_the_functions_do() -> None:
    assert drawn() == [True] * 4


def alone() -> list[bool]:
    """A group of one rank has nobody to sum with, and puts nothing into the graph."""
    group, recorder, x = spatial_of(ff.init_mesh(width=1)).replica, GraphRecorder(), torch.ones(2)
    return [torch.equal(recorder.all_sum(x, group), x), torch.equal(recorder.all_gather(x, group, "x"), x[None])]


def test_a_rank_alone() -> None:
    assert rank_group(1).run(alone) == [[True, True]]
