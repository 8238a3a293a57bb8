"""`fetch`: every rank owns one interval of a dim and gets another; the adjoint brings the gradient back."""

import torch
import torch.distributed as dist
from torch import Tensor

import fullframe as ff
from fullframe.geometry.extents import Extents
from fullframe.ranks.collectives import in_one_row
from fullframe.ranks.exchange import InFlight, Message, fetch
from fullframe.ranks.mesh import spatial_of
from tests.rank_group import rank_group

#          0  1  2 | 3  4 | 5  6        rows of three ranks
EXTENTS = Extents((0, 3, 5, 7))
WANTED = {
    "own": (range(0, 3), range(3, 5), range(5, 7)),
    "less": (range(1, 2), range(3, 5), range(6, 7)),
    "halo": (range(0, 4), range(2, 6), range(4, 7)),
    "beyond the neighbour": (range(0, 6), range(3, 5), range(1, 7)),
    "nothing of its own": (range(5, 7), range(0, 3), range(3, 5)),
    "nothing for one": (range(0, 7), range(3, 3), range(0, 1)),
}


def _fetched(name: str) -> tuple[bool, float, bool]:
    axis = spatial_of(ff.init_mesh(width=3)).axis("width")
    whole = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own, rows = EXTENTS.ranges[axis.coordinate], WANTED[name][axis.coordinate]
    local = whole[:, own.start : own.stop].clone().requires_grad_()
    got = fetch(local, 1, EXTENTS, WANTED[name], axis)
    weight = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(axis.coordinate + 1))
    (got * weight).sum().backward()
    # <fetch(x), w> summed over the ranks is <x, adjoint(w)> summed over the ranks.
    sides = torch.stack([(got * weight).sum(), (local * local.grad).sum()]).detach()
    dist.all_reduce(sides)
    return torch.equal(got, whole[:, rows.start : rows.stop]), float((sides[0] - sides[1]).abs()), got.requires_grad


def test_every_rank_gets_the_rows_it_wants_and_their_gradient_goes_back() -> None:
    for name in WANTED:
        for same, apart, differentiable in rank_group(3).run(_fetched, name):
            assert same and apart < 1e-12 and differentiable, name


def _second_gradient() -> float:
    """Of the squared gradient of sum(fetched ** 3): 18 x ** 3 for each row that a rank got, so 2 for shared rows."""
    axis = spatial_of(ff.init_mesh(width=3)).axis("width")
    own = EXTENTS.ranges[axis.coordinate]
    x = torch.arange(1.0, 8)[own.start : own.stop].requires_grad_()
    (gradient,) = torch.autograd.grad((fetch(x, 0, EXTENTS, WANTED["halo"], axis) ** 3).sum(), x, create_graph=True)
    gradient.sum().backward()
    readers = torch.tensor([1, 1, 2, 2, 2, 2, 1.0])[own.start : own.stop]
    assert x.grad is not None
    return float((x.grad - 6 * x.detach() * readers).abs().max())


def test_the_gradient_of_the_gradient() -> None:
    assert rank_group(3).run(_second_gradient) == [0.0] * 3


def _posted() -> tuple[list[float], list[int]]:
    axis = spatial_of(ff.init_mesh(width=3)).axis("width")
    right, left = (axis.coordinate + 1) % 3, (axis.coordinate - 1) % 3
    into, nothing = torch.zeros(2), torch.zeros(0, 5)
    sent: list[Message] = [Message(right, torch.full((2,), float(axis.coordinate))), Message(left, nothing)]
    got: list[Tensor] = InFlight(axis, sent, [Message(left, into), Message(right, nothing.clone())]).wait()
    return got[0].tolist(), list(got[1].shape)


def test_messages_come_in_the_order_asked_for_and_empty_ones_are_not_waited_for() -> None:
    assert rank_group(3).run(_posted) == [([2, 2], [0, 5]), ([0, 0], [0, 5]), ([1, 1], [0, 5])]


def _conjugates(rows: int) -> list[bool]:
    """Whether the conjugate of what three ranks have comes to them all, and a negative that is one by a mark."""
    axis = spatial_of(ff.init_mesh(width=3)).axis("width")
    draws = torch.Generator().manual_seed(0)
    numbers = torch.randn(3 * rows, 64, dtype=torch.complex128, generator=draws).conj()
    parts = torch.arange(0, 3 * rows + 1, rows).tolist()
    own, everything = slice(*parts[axis.coordinate : axis.coordinate + 2]), (range(3 * rows),) * 3
    right = []
    for whole in (numbers, torch._neg_view(numbers.real.contiguous())):
        mine = whole[own]
        assert mine.is_contiguous() and (mine.is_conj() or mine.is_neg())
        found = fetch(mine, 0, Extents(tuple(parts)), everything, axis), in_one_row(mine, 0, axis.group)
        right += [torch.equal(found[0], whole), torch.equal(found[1], whole)]
    return right


def test_conjugates_and_negatives_are_sent_as_what_they_are() -> None:
    for rows in (2, 1500):  # through the mailbox, and by gloo
        assert all(all(right) for right in rank_group(3).run(_conjugates, rows)), rows
