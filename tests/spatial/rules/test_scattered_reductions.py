"""The largest, smallest, sum or mean of what split points scatter into a whole tensor, a depth buffer say."""

import math

import torch
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, small
from tests.spatial.traffic import bytes_of_messages


def whole(op: object, *shapes: tuple[int, ...]) -> Case:
    return Case(op, whole=shapes, sizes=((7, 11),))  # type: ignore[arg-type]


def cells(x: Tensor) -> Tensor:
    """A cell of seven for each pixel, of which the last is empty."""
    return ((x[:, 1] * 3).long().abs() % 6).flatten(1)


def at_all(points: Tensor, index: Tensor, start: Tensor) -> list[Tensor]:
    return [
        start.scatter_reduce(1, index, points, way, include_self=own)
        for way in ("amax", "amin", "sum", *(["mean"] if points.is_floating_point() else []))
        for own in (True, False)
    ]


def tied(x: Tensor) -> Tensor:
    """Each row has one value, whichever rank holds it."""
    return x[:, 0].mean(2, keepdim=True).expand_as(x[:, 0]).flatten(1)


def not_finite(x: Tensor) -> Tensor:
    points = x[:, 0].detach().clone()
    points[:, 0, 0], points[:, -1, -1], points[:, 2, 3] = math.nan, math.inf, -math.inf
    return points.flatten(1)


CASES: dict[str, Case] = {
    "points": whole(lambda x, start: at_all(x[:, 0].flatten(1), cells(x), start), (2, 7)),
    "ties": whole(lambda x, start: at_all(tied(x), cells(x), start * 0), (2, 7)),
    "in place": small(
        lambda x: torch.full((2, 7), math.inf, dtype=x.dtype).scatter_reduce_(1, cells(x), x[:, 0].flatten(1), "amin")
    ),
    "written after a product": whole(
        lambda x, start: (start * 2).scatter_reduce_(1, cells(x), x[:, 0].flatten(1), "amax", include_self=False) * 3,
        (2, 7),
    ),
    "of a row of cells": whole(
        lambda x, start: start.scatter_reduce(0, cells(x).flatten(), x[:, 0].flatten(), "amax"), (9,)
    ),
    "not finite": small(lambda x: at_all(not_finite(x), cells(x), torch.zeros(2, 7, dtype=x.dtype))),
    "whole numbers": small(
        lambda x: at_all((x[:, 0] * 9).long().flatten(1), cells(x), torch.zeros(2, 7, dtype=torch.int64))
    ),
}

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _sent(width: int) -> float:
    x = ff.shard(torch.randn(1, 2, 40, 60), mesh(1, width)).requires_grad_()
    start = torch.zeros(1, 7)
    buffered = bytes_of_messages(lambda: start.scatter_reduce(1, cells(x), x[:, 0].flatten(1), "amax").sum().backward())
    return buffered / (x.numel() * 4)


def test_the_points_are_not_sent() -> None:
    assert max(rank_group(2).run(_sent, 2)) < 0.05
