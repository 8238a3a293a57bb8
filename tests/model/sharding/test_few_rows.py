"""Extremes of sharded tensors, of which some rank has no rows: one process's on all ranks."""

from collections.abc import Callable
from math import inf

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import fullframe as ff
from fullframe.model.sharding.few_rows import leaves_one_without
from fullframe.model.sharding.values import whole_value
from tests.exactness import mesh, relative
from tests.rank_group import rank_group

EXTREMES: dict[str, Callable[[list[Tensor]], Tensor]] = {  # of all gradients
    "the largest": lambda every: every[0].abs().max(),
    "the smallest": lambda every: every[1].min(),
    "over some dims": lambda every: every[2].amax((0, 2)),
    "over others": lambda every: every[2].amin(-1),
    "where": lambda every: every[0].argmax(),
    "an infinite norm": lambda every: every[0].norm(inf),
    "the other": lambda every: torch.linalg.vector_norm(every[2], ord=-inf),
    "of all": lambda every: get_total_norm(every, inf),
    "of each": lambda every: torch.stack(torch._foreach_norm(every, ord=inf)),
    "the largest of each": lambda every: torch.stack(torch._foreach_max(every)),
    "a norm that is none": lambda every: get_total_norm(every),
    "of some rows": lambda every: every[2][1:].max(),
}


@pytest.mark.parametrize(
    ("rows", "ranks", "parts"),
    [
        (1, 2, "10"),
        (2, 2, "11"),
        (4, 3, "220"),
        (5, 3, "221"),
        (5, 4, "2210"),
        (6, 4, "2220"),
        (7, 4, "2221"),
        (0, 2, ""),
    ],
)
def test_which_leave_a_rank_without(rows: int, ranks: int, parts: str) -> None:
    assert leaves_one_without(rows, ranks) == ("0" in parts)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 1, 3), nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 1)).double()


def _found(is_sharded: bool, what: str) -> Tensor:
    net, on = _net(), mesh(1, 3)
    model = ff.parallelize(net, on, shard_parameters=True) if is_sharded else net
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(ff.shard(x, on) if is_sharded else x).square().mean().backward()
    every = [p.grad for p in net.parameters() if p.grad is not None]
    if what != "clipped":
        return whole_value(EXTREMES[what](every))  # type: ignore[no-any-return]
    clip_grad_norm_(net.parameters(), 0.01, norm_type=inf)
    return torch.cat([whole_value(each).flatten() for each in every])


def _off(what: str) -> float:
    return relative(_found(False, what).double(), _found(True, what).double())


@pytest.mark.parametrize("what", [*EXTREMES, "clipped"])
def test_extremes_are_one_process_s_where_a_rank_has_no_rows(what: str) -> None:
    assert max(rank_group(3).run(_off, what)) < 1e-12
