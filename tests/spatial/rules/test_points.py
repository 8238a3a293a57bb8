"""Reads of split maps at positions."""

from unittest import mock

import pytest
import torch
from torch import Tensor

import fullframe as ff
from fullframe.spatial.rules import points
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, WORLDS, Case, Op, as_in_one_process, small
from tests.spatial.many_positions import require_many_exact
from tests.spatial.traffic import bytes_of_messages
from tests.spatial.values import found, on_all_meshes, with_nan

YS, XS = torch.tensor([6, 0, 3, 3, -1]), torch.tensor([10, -11, 5, 5, 4])


def along(x: Tensor, dim: int, channels: int = 1) -> Tensor:
    """(N, channels, H, W): rows of dim `dim`, a split tensor."""
    return (x[:, :channels].detach().abs() * 50).long() % x.shape[dim]


CASES: dict[str, Case] = {
    "at points": small(lambda x: x[:, :, YS, XS]),
    "at points of images": small(lambda x: x[torch.tensor([0, 1, 1, 0, 1]), :, YS, XS]),
    "at points of each image": small(lambda x: x[torch.arange(2)[:, None], :, YS.view(1, 5), XS.expand(2, 5)]),
    "rows": small(lambda x: x[:, :, YS] * 2),
    "columns": small(lambda x: x[..., XS] + x[..., [1, 2, 3, 4, 5]]),
    "one point": small(lambda x: x[:, :, torch.tensor(2), torch.tensor(-1)]),
    "a slice before": small(lambda x: x[:, 1:3, 2:, XS] + x[0, 1:3, 2:, XS]),
    "points apart": small(lambda x: x[torch.tensor([1, 0]), :, torch.tensor([2, -1])]),
    "a table of points": small(lambda x: x[:, :, YS[:, None], XS[None, :4]]),
    "no points": small(lambda x: [x[:, :, YS[:0], XS[:0]], x[..., XS[:0]]]),
    "tokens": small(lambda x: x.flatten(2)[:, :, YS * 11 + 3].sin()),
    "tokens of all channels": small(lambda x: x.flatten()[[5, -1, 200, 3 * 77 + 40]]),
    "gathered tokens": small(
        lambda x: x.flatten(2).mT.gather(1, torch.tensor([[5, 76, 5], [0, 40, 41]])[..., None].expand(-1, -1, 4))
    ),
    "by a split index": small(lambda x: x[:, :, (x[0, 0, :, :3].detach().abs() * 9).long() % 7]),
    "rows by a split index": small(lambda x: x.index_select(2, along(x, 2)[0, 0, 0])),
    "index_select": small(lambda x: [x.index_select(3, XS % 11), torch.index_select(x, -2, YS % 7)]),
    "take": small(lambda x: [x.take(torch.tensor([[0, 100], [-1, 7]])), torch.take(x, along(x, 0)[0, 0] * 70)]),
    "take at one place": small(lambda x: [x.take(torch.tensor(40)), x.take(torch.tensor(-1)).sin()]),
    "gather at no place": small(lambda x: [x.gather(d, torch.empty(*sizes, dtype=torch.int64))
                                           for d, sizes in ((0, (0,)), (3, (2, 0)), (2, (2, 4, 0, 11)))]),
    "gather along a split dim": small(lambda x: x.gather(3, XS.expand(2, 4, 7, 5) % 11).sin()),
    "gather of fewer rows": small(lambda x: x.gather(2, YS[:, None].expand(1, 3, 5, 6) % 7)),
    "gather of one row": small(
        lambda x: [x.gather(1, (XS % 4).expand(2, 3, 1, 5)), x.gather(3, YS.expand(1, 4, 1, 5) % 11)]),
    "gather of fewer columns along channels": small(lambda x: x.gather(1, along(x, 1)[:, :, :5, :7])),
    "gather by an index cut so": small(lambda x: [x.gather(d, along(x, d)) for d in (1, 2, 3)]),
    "gather by an index cut otherwise": small(lambda x: x.gather(3, along(x, 3).flip(3)[..., :4]).sin()),
    "gather by a turned index": small(lambda x: x[..., :7].gather(2, along(x[..., :7], 2).mT)),
    "gather from a map that is whole there": small(
        lambda x: x.sum(3, keepdim=True).expand_as(x).gather(1, along(x, 1))
    ),
    "take_along_dim": small(
        lambda x: [x.take_along_dim(along(x, 3), 3), torch.take_along_dim(x, XS[None, None, None], dim=3),
                   torch.take_along_dim(x, YS.view(1, 1, 5, 1) % 7, -2), x.take_along_dim(torch.tensor([3, 500]))]
    ),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def spoiled() -> Tensor:
    x = with_nan()
    x[0, 0, 2, 2], x[1, 2, 4, 6] = -0.0, -0.0
    return x


POINTS = torch.tensor([1, 4, 0, 2, -1]), torch.tensor([1, 6, 0, 2, 5])
SPOILED: dict[str, Op] = {
    "at points": lambda x: 1 / x[:, :, POINTS[0], POINTS[1]],
    "gather": lambda x: 1 / x.gather(2, POINTS[0].abs().view(1, 1, 5, 1).expand(2, 3, 5, 7)),
    "rows": lambda x: x.index_select(3, POINTS[1]),
    "short dtypes": lambda x: [x.detach().to(t)[:, :, POINTS[0], POINTS[1]] for t in (torch.bfloat16, torch.float16)],
    "other dtypes": lambda x: [(x > 0)[..., POINTS[1]], torch.complex(x, -x).detach()[:, :, POINTS[0]],
                               x.nan_to_num().to(torch.int16).take(POINTS[0]), x.nan_to_num().long()[..., POINTS[1]]],
    "parts without rows": lambda x: [x[..., :3][..., [2, 0]], x[:, :, 3:, 5:].gather(3, x[..., :2, :1].long() * 0 + 1)],
    "one row": lambda x: x[:, :, :1][:, :, [0, 0, -1]],
}  # fmt: skip


def _spoiled(name: str, world: int) -> list[str]:
    return found({name: (SPOILED[name], [spoiled()], [])}, 1e-12, world)


@pytest.mark.parametrize("name", SPOILED)
def test_infinities_nan_signed_zeros_and_dtypes(name: str) -> None:
    assert not on_all_meshes(_spoiled, name)


def in_turns(op: Op) -> Op:
    """`op` of the elements of `x` and of as many indices, one of them outside, where no rank may hold them all."""

    def call(x: Tensor) -> Tensor:
        flat = x.flatten()
        with mock.patch.object(points, "FEW", 0):
            return op(flat, turned(flat, 0) + (flat == flat.max()) * 200)

    return call


OUTSIDE: dict[str, Op] = {
    "index": lambda x: x[..., torch.tensor([1, 11])],
    "index, from the end": lambda x: x[:, :, torch.tensor([-8])],
    "index_select": lambda x: x.index_select(3, torch.tensor([-1])),
    "take": lambda x: x.take(torch.tensor([-1, 2000])),
    "gather": lambda x: x.gather(3, torch.full((1, 1, 1, 1), 11)),
    "gather by a split index": lambda x: x.gather(3, (x[:, :1] == x.max()) * x.shape[3]),  # on one rank alone
    "too many": lambda x: x[YS, YS, YS, YS, YS],
    "index in turns": in_turns(lambda x, at: x[at]),
    "gather in turns": in_turns(lambda x, at: x.gather(0, at)),
    "gather in turns, of few rows": in_turns(lambda x, at: x[:, None].gather(0, at[:, None])),
    "index_select in turns": in_turns(lambda x, at: x.index_select(0, at)),
    "scatter in turns": in_turns(lambda x, at: x.scatter(0, at, x)),
    "scatter_add in turns, from the end": in_turns(lambda x, at: x.scatter_add(0, -at, x)),
    "index_add in turns": in_turns(lambda x, at: x.index_add(0, at, x)),
    "index_add in turns, of rows": in_turns(lambda x, at: x[:, None].index_add(0, at, x[:, None])),
    "index_copy in turns": in_turns(lambda x, at: x.index_copy(0, at, x)),
}


def _outside(height: int, width: int) -> list[tuple[str, str]]:
    ops = {name: op for name, op in OUTSIDE.items() if width > 1 or "split index" not in name}
    whole = torch.arange(2 * 77.0).sin().view(1, 2, 7, 11)
    raised = []
    for x in (whole, ff.shard(whole, mesh(height, width))):
        for name, op in ops.items():
            try:
                op(x)
            except Exception as error:
                raised.append((name, type(error).__name__))
    return raised


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_what_torch_refuses_is_refused_on_all_ranks(shape: tuple[int, int]) -> None:
    for raised in rank_group(shape[0] * shape[1]).run(_outside, *shape):
        half = len(raised) // 2
        assert half >= len(OUTSIDE) - 1 and raised[:half] == raised[half:]


def turned(x: Tensor, dim: int) -> Tensor:
    """An index as large as the map: each row along `dim` in another order."""
    return x.detach().argsort(dim)


def picked_by_order(x: Tensor) -> Tensor:
    """The positions of the pixels above zero, by their values."""
    order = turned(x.view(-1), 0)
    return order[x.detach().view(-1)[order] > 0]


def batch(x: Tensor) -> Tensor:
    return torch.arange(2)[:, None].expand(2, 77).reshape(-1)


BACK = torch.arange(11).flip(0)
MANY: dict[str, Op] = {
    "gather": lambda x: [x.gather(3, turned(x, 3)).sin(), x.gather(2, turned(x, 2))],
    "gather of a part": lambda x: [x.gather(3, turned(x, 3)[..., 2:8]), x.gather(2, turned(x, 3)[..., :7, :5] % 7)],
    "gather by a whole index": lambda x: x.gather(3, BACK.expand(2, 4, 7, 11)),
    "gather of tokens": lambda x: x.flatten(2).gather(2, turned(x.flatten(2), 2)[..., :60]).sin(),
    "gather by an index cut otherwise": lambda x: x[..., :7].gather(3, turned(x[..., :7], 3).mT.contiguous()),
    "take_along_dim": lambda x: x.take_along_dim(turned(x[:, :1], 2), 2),
    "rows": lambda x: [x[..., BACK], x.index_select(2, BACK[4:]), x[:, :, torch.tensor([-1, 3, 3, 0, -7])]],
    "a table of rows and columns": lambda x: x[:, :, torch.arange(14)[:, None] // 2, torch.arange(22)[None] // 2],
    "rows of tokens": lambda x: x.flatten(2).mT[:, torch.arange(77).flip(0)].cos(),
    "sorted pixels": lambda x: [x.flatten()[turned(x.flatten(), 0)], x.sin().view(-1)[picked_by_order(x)] * 2],
    "of what a mask picks": lambda x: [(x * 2)[x > 0][turned(x[x > 0], 0)], x[x > 0].gather(0, turned(x[x > 0], 0))],
    "pixels at split points": lambda x: [x.movedim(1, 3)[batch(x), along(x, 2).flatten(), along(x, 3).flatten()].cos(),
                                         x[:, :, along(x, 2, 4).view(-1) - 7, along(x, 3, 4).view(-1)].sin()],
    "a table of split points": lambda x: x[:, :, along(x, 2)[0, 0], along(x, 3)[1, 0]].cos(),
    "gather in few rows": lambda x: x[:1, 0].flatten(1).gather(1, turned(x[:1, 0].flatten(1), 1)).cos(),
    "by index_select": lambda x: x.flatten().index_select(0, turned(x.flatten(), 0)[3:]).cos(),
    "at random": lambda x: [x.flatten()[torch.arange(500) * 37 % 616], x.view(-1).take(-torch.arange(600) % 616).cos(),
                            x.flatten().gather(0, torch.arange(500) * 37 % 616), x[:1, :1].movedim(3, 0)[BACK].sin()],
    "by take": lambda x: x.take((x.detach().abs() * 50).long() % x.numel()),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_many_positions_are_read_where_each_rank_has_whole_rows(world: int) -> None:
    require_many_exact(__name__, world)


def _sent(height: int, width: int) -> list[float]:
    torch.manual_seed(0)
    x = ff.shard(torch.randn(1, 64, 40, 41, dtype=torch.float64), mesh(height, width)).requires_grad_()
    index = torch.randint(40, (1, 64, 7, 1)).expand(-1, -1, -1, 41)
    few = x.detach()[:, :1, :3].abs().long() % 40
    reads: list[Op] = [
        lambda: x[:, :, torch.arange(9), torch.arange(9)], lambda: x.gather(2, index[:, :, :2]),
        lambda: x.flatten(2).mT[:, torch.arange(20)], lambda: x.take(torch.arange(30)),
        lambda: x[:, :, few[0, 0, :, 0]],
    ]  # fmt: skip
    whole = x.numel() * 8
    return [bytes_of_messages(lambda read=read: read().sum().backward()) / whole for read in reads]  # type: ignore[misc]


def test_the_map_is_not_sent() -> None:
    for shape in ((1, 2), (2, 2)):
        for shares in rank_group(shape[0] * shape[1]).run(_sent, *shape):
            assert all(0 < share < 0.12 for share in shares), shares


def _sent_of_many(height: int, width: int) -> list[float]:
    torch.manual_seed(0)
    x = ff.shard(torch.randn(1, 64, 40, 41, dtype=torch.float64), mesh(height, width)).requires_grad_()
    columns = turned(x, 3)
    reads: list[Op] = [lambda: x.gather(3, columns), lambda: x[..., torch.arange(41).flip(0)]]
    part = x.local.numel() * 8
    return [bytes_of_messages(lambda read=read: read().sum().backward()) / part for read in reads]  # type: ignore[misc]


@pytest.mark.parametrize("width", [2, 3])
def test_what_lies_on_other_ranks_is_sent_once_each_way(width: int) -> None:
    away = 1 - 1 / width
    for gathered, rows in rank_group(width).run(_sent_of_many, 1, width):  # x, index and result; two gradients
        assert 9 * away < gathered < 11 * away and 7 * away < rows < 9 * away  # sent and received


def _too_much() -> int:
    torch.manual_seed(0)
    x = ff.shard(torch.randn(1, 80, 40, 50), mesh(1, 2))
    channels, often = x.detach().abs().long() % 80, torch.arange(40).repeat(200)
    for read in (lambda: x[:, channels.flatten()], lambda: x[:, :, often, often]):
        with pytest.raises(ff.UnsupportedOp, match="unsupported='gather'"):
            read()
    return 1


def test_a_map_that_would_be_whole_is_refused_by_name() -> None:
    assert rank_group(2).run(_too_much) == [1, 1]
