"""Writing at index tensors."""

from collections.abc import Callable
from typing import Any
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


def labels(x: Tensor) -> Tensor:
    return (x[:, :1].detach().abs() * 5).long() % 4


YS, XS = torch.tensor([6, 0, 3, 3, -1]), torch.tensor([10, -11, 5, 5, 4])
ROWS = torch.tensor([6, 0, 3, 3, 2])


def along(x: Tensor, dim: int) -> Tensor:
    """(N, 1, H, W): rows of dim `dim`, a split tensor."""
    return (x[:, :1].detach().abs() * 50).long() % x.shape[dim]


def set_at(x: Tensor, value: Tensor, *index: object) -> Tensor:
    x = x * 1
    x[index] = value
    return x


def pillars(x: Tensor, values: Tensor) -> Tensor:
    """Features (C, P) of pillars put on a canvas (C, H * W), as PointPillars does."""
    canvases = []
    for image in x:
        canvas = torch.zeros_like(image).flatten(1)
        canvas[:, YS[:3] * 11 + 5] = values
        canvases.append(canvas.view(image.shape))
    return torch.stack(canvases) * x


def onto(x: Tensor, into: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Features of pixels added to the cells of a whole grid, as Lift-Splat does."""
    return torch.zeros_like(into).index_add_(0, index, value) + into.index_add(0, index, value, alpha=2)


def splat(x: Tensor, into: Tensor) -> Tensor:
    pixels = x.permute(0, 2, 3, 1).flatten(0, 2)
    return onto(x, into, (pixels[:, 0].detach().abs() * 9).long() % into.shape[0], pixels)


def splat_by(x: Tensor, into: Tensor, way: str) -> Tensor:
    pixels = x.permute(0, 2, 3, 1).flatten(0, 2)
    cells = (pixels[:, 0].detach().abs() * 9).long() % into.shape[0]
    if way == "put":
        return into.index_put((cells,), pixels, accumulate=True) + into.index_put(
            (cells, cells % 4), pixels[:, 1], True
        )
    if way == "put values":
        return into.index_put((torch.arange(len(cells)) % 6,), pixels, accumulate=True)
    return into.scatter_add(0, cells[:, None].expand(-1, 4), pixels)


def whole(op: object, *shapes: tuple[int, ...]) -> Case:
    return Case(op, whole=shapes, sizes=((7, 11),))  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    "one hot by scatter": small(lambda x: torch.zeros_like(x).scatter_(1, labels(x), 1.0)),
    "scatter into a whole map": small(lambda x: torch.zeros(x.shape, dtype=x.dtype).scatter(1, labels(x), 1.0)),
    "one hot in a whole map": small(lambda x: torch.zeros(x.shape, dtype=x.dtype).scatter_(1, labels(x), 1.0) * x),
    "scatter of a source": small(lambda x: x.scatter(1, labels(x), x[:, :1] * 3)),
    "scatter_add": small(lambda x: x.scatter_add(1, labels(x), x[:, 1:2])),
    "scatter_reduce": small(lambda x: x.scatter_reduce(1, labels(x), x[:, 1:2], "amax")),
    "index_add": small(lambda x: x.index_add(1, torch.tensor([2, 0]), x[:, :2].sin(), alpha=2)),
    "index_copy": small(lambda x: (x * 1).index_copy_(1, torch.tensor([2, 0]), x[:, :2].sin())),
    "scatter along a split dim": small(lambda x: x.scatter(3, XS.expand(2, 4, 7, 5) % 11, 2.0) * x),
    "scatter a source along a split dim": whole(lambda x, v: x.scatter(2, ROWS[:3, None].expand(2, 4, 3, 11), v) * x,
                                                (2, 4, 3, 11)),
    "scatter of fewer rows": whole(lambda x, v: x.scatter(1, XS[None, None, None].expand(1, 3, 6, 5) % 4, v) * x,
                                   (1, 3, 6, 5)),
    "scatter of one row": whole(
        lambda x, v: [x.scatter_add(3, XS.expand(2, 4, 1, 5) % 11, v),
                      x.scatter(1, XS[:1].expand(1, 4, 1, 1) % 4, v[:1, ..., :1])],
        (2, 4, 1, 5)),
    "scatter of fewer split rows": small(lambda x: x.scatter(1, along(x, 1)[:, :, :5, :9], x[:, 1:2, :5, :9] * 2)),
    "scatter_add along a split dim": whole(
        lambda x, v: [x.scatter_add(3, XS[None, :, None].expand(2, 5, 7)[:, :4, :, None] % 11, v),
                      (x * 1).scatter_add_(2, ROWS[:, None].expand(2, 4, 5, 11), v.expand(2, 4, 7, 11)[:, :, :5])],
        (2, 4, 7, 1)),
    "scatter_reduce along a split dim": whole(
        lambda x, v: [x.scatter_reduce(3, XS.expand(2, 4, 7, 5) % 11, v, way, include_self=own)
                      for way in ("sum", "amax", "mean", "prod") for own in (True, False)], (2, 4, 7, 5)),
    "scatter by a split index": small(
        lambda x: [x.scatter_add(d, along(x, d), x[:, 1:2].sin()) for d in (2, 3)]),
    "rows added": whole(lambda x, v: x.index_add(2, ROWS, v, alpha=3) * x, (2, 4, 5, 11)),
    "rows copied": whole(lambda x, v: (x * 1).index_copy_(3, XS[:2] % 11, v) * x, (2, 4, 7, 2)),
    "rows filled": small(lambda x: [(x * 1).index_fill_(3, XS, 2.5) * x, x.index_fill(2, ROWS, x.sum())]),
    "rows reduced": whole(lambda x, v: [x.index_reduce(2, ROWS, v, way, include_self=False)
                                        for way in ("amax", "mean", "prod")], (2, 4, 5, 11)),
    "rows of a split source": small(
        lambda x: [x.index_add(2, ROWS, x[:, :, :5].sin()), x.index_copy(3, XS % 11, x[..., :5] * 2)]),
    "rows at a split index": small(lambda x: x.index_add(3, along(x, 3)[0, 0, 0], x.sin())),
    "put at points": whole(lambda x, v: x.index_put((torch.tensor([0, 1, 1, 0, 1]), YS % 4, YS, XS), v) * x, (5,)),
    "put at rows": whole(
        lambda x, v: x.index_put((torch.tensor([1]), torch.tensor([2]), YS), v, accumulate=True), (5, 11)),
    "put": whole(lambda x, v: [x.put(torch.tensor([3, -1, 100]), v),
                               (x * 1).put_(torch.tensor([3, 3, 9]), v, True)], (3,)),
    "set at points": whole(lambda x, v: set_at(x, v, slice(None), slice(None), YS[:3], XS[:3]) * x, (2, 4, 3)),
    "set at points of images": whole(
        lambda x, v: set_at(x, v, torch.tensor([0, 1]), slice(None), YS[:2], XS[:2]), (2, 4)),
    "set one value": whole(lambda x, v: [set_at(x, v[0], ..., XS), set_at(x, 3.0, 0, 1, YS, slice(2, None))], (1,)),
    "set in slices": whole(lambda x, v: set_at(x, v, 1, slice(1, 3), slice(2, 6), XS[:3] % 4), (2, 4, 3)),
    "set in a table of points": whole(
        lambda x, v: set_at(x, v, slice(None), slice(None), YS[:3, None], XS[None, :2]), (4, 3, 2)),
    "set split values": small(lambda x: set_at(x, x[:, :, :3] * 2, slice(None), slice(None), YS[:3])),
    "set apart": whole(lambda x, v: set_at(x, v, torch.tensor([1, 0]), slice(None), torch.tensor([2, -1])), (2, 4, 11)),
    "set at numbers that are tensors": small(lambda x: set_at(x, 2.0, ..., torch.tensor(3), torch.tensor(-1)) * x),
    "set a list": small(lambda x: set_at(x, -1, slice(None), [0, 2], slice(None), slice(None))),
    "pillars": whole(pillars, (4, 3)),
    "splat": whole(splat, (6, 4)),
    "splat by index_put": whole(lambda x, into: splat_by(x, into, "put"), (6, 4)),
    "splat at whole positions": whole(lambda x, into: splat_by(x, into, "put values"), (6, 4)),
    "splat by scatter_add": whole(lambda x, into: splat_by(x, into, "scatter"), (6, 4)),
    "index_fill": small(lambda x: x.index_fill(1, torch.tensor([2, 0]), 7.0)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def both(x: Tensor, op: Op) -> list[Tensor]:
    """The result of a write into a copy, and into a view of a slice, whose base is returned."""
    base = x * 1
    return [op(x * 1), op(base[:, :, 1:, 2:]), base]


SPOILED: dict[str, Op] = {
    "points": lambda x: both(x, lambda y: set_in(y, nan_and_more(y), ..., ROWS[:4] % 4, ROWS[:4] % 5)),
    "added": lambda x: x.index_put((ROWS[:2] % 2, ROWS[:2] % 3, ROWS[:2] % 5, ROWS[:2]), nan_and_more(x)[:2], True),
    "scatter": lambda x: both(x, lambda y: y.scatter_(3, ROWS.expand(2, 3, 4, 5) % 5, float("-inf"))),
    "largest": lambda x: x.scatter_reduce(2, ROWS.view(1, 1, 5, 1).expand(2, 3, 5, 7) % 5, x.detach() * 0 + 1, "amax"),
    "rows": lambda x: both(x, lambda y: y.index_fill_(3, ROWS % 5, float("nan"))),
    "duplicates": lambda x: [
        x.index_copy(3, torch.tensor([5, 1, 5, 1]), x.detach()[..., :4] * 0 + torch.arange(4.0).double()),
        x.index_put((*torch.zeros(3, 6).long(), torch.tensor([6, 0, 6, 6, 0, 1])), torch.arange(6.0).double()),
    ],
    "other dtypes": lambda x: [
        (x > 0).index_fill(3, ROWS, True), set_in((x.nan_to_num() * 9).to(torch.int16), 7, ..., [6, 0]),
        torch.complex(x, x).detach().index_add(3, ROWS[:2], x.new_ones(2, 3, 5, 2).to(torch.complex128)),
        x.detach().bfloat16().scatter_add(3, ROWS.expand(2, 3, 1, 5), x.new_ones(2, 3, 1, 5).bfloat16()),
    ],
    "no positions": lambda x: [set_in(x * 1, 3.0, ..., ROWS[:0]), x.index_add(2, ROWS[:0], x.new_ones(2, 3, 0, 7)),
                               x.scatter_add(3, ROWS[:0], x.detach()), (x * 1).scatter_add_(2, ROWS[:0], x.detach()),
                               x.scatter(3, ROWS[:0], 1.0)],
    "one row": lambda x: both(x, lambda y: set_in(y, 1.0, 0, 0, ROWS[:3] * 0, slice(1, 2))),
    "parts without rows": lambda x: [set_in((x * 1)[..., :3], 2.0, ..., [2, 0]),
                                      x[:, :, 3:, 5:].index_fill(3, ROWS[1:2], 1)],
}  # fmt: skip


def set_in(x: Tensor, value: object, *index: object) -> Tensor:
    x[index] = value  # type: ignore[assignment]
    return x


def nan_and_more(x: Tensor) -> Tensor:
    return torch.tensor([float("nan"), float("inf"), -0.0, 1.0], dtype=x.dtype)


def _spoiled(name: str, world: int) -> list[str]:
    return found({name: (SPOILED[name], [with_nan()], [])}, 1e-12, world)


@pytest.mark.parametrize("name", SPOILED)
def test_infinities_nan_duplicates_views_and_dtypes(name: str) -> None:
    assert not on_all_meshes(_spoiled, name)


def _product(world: int) -> list[str]:
    source = torch.linspace(0.5, 2, 210, dtype=torch.float64).view(2, 3, 5, 7)
    source[0, 1, 2, 3] = source[1, 2, 4, 6] = float("nan")
    index = ROWS.view(1, 1, 5, 1).expand(2, 3, 5, 7) % 5

    def product(x: Tensor, source: Tensor) -> Tensor:
        return x.scatter_reduce(2, index, source, "prod", include_self=False)

    return found({"product": (product, [with_nan()], [source])}, 1e-12, world)


def test_nan_of_one_rank_s_rows_is_not_in_the_gradient_of_others() -> None:
    assert not on_all_meshes(_product)


OUTSIDE: dict[str, Op] = {
    "scatter": lambda x: x.scatter(3, torch.full((1, 1, 1, 1), 11), 1.0),
    "index_add": lambda x: x.index_add(2, torch.tensor([-1]), torch.ones(1, 2, 1, 11)),
    "index_copy": lambda x: x.index_copy(3, torch.tensor([11]), torch.ones(1, 2, 7, 1)),
    "index_fill": lambda x: x.index_fill(3, torch.tensor([-12]), 1.0),
    "set": lambda x: set_in(x * 1, 1.0, ..., torch.tensor([11])),
    "put": lambda x: x.put(torch.tensor([154]), torch.ones(1)),
}


def _outside(height: int, width: int) -> list[tuple[str, str]]:
    whole = torch.arange(2 * 77.0).sin().view(1, 2, 7, 11)
    raised = []
    for x in (whole, ff.shard(whole, mesh(height, width))):
        for name, op in OUTSIDE.items():
            with pytest.raises((RuntimeError, IndexError)) as caught:
                op(x)
            raised.append((name, caught.type.__name__))
    return raised


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_what_torch_refuses_is_refused_on_all_ranks(shape: tuple[int, int]) -> None:
    for raised in rank_group(shape[0] * shape[1]).run(_outside, *shape):
        assert raised[: len(OUTSIDE)] == raised[len(OUTSIDE) :]


MANY: dict[str, Op] = {
    "scatter": lambda x: [(x * 2).scatter(3, turned(x, 3), x.sin()), (x * 2).scatter(2, turned(x, 2)[:, :, :3], 0.5)],
    "scatter_": lambda x: [both(x, lambda y: y.scatter_(3, turned(y, 3), y.detach() * 2)),
                           both(x, lambda y: y.scatter_reduce_(2, turned(y, 2) // 2, y.detach() + 1, "amax"))],
    "scatter_add": lambda x: [(x * 2).scatter_add(2, large(x, 2), x),
                              (x * 2).scatter_add(3, large(x, 3)[..., :6], x[..., :6])],
    "tokens": lambda x: (x.flatten(2) * 2).scatter_add(2, turned(x.flatten(2), 2) // 3, x.flatten(2).sin()),
    "scatter_reduce": lambda x: (x * 2).scatter_reduce(3, large(x, 3), x, "mean", include_self=False),
    "put at split points": lambda x: [x.index_put(cells_of(x), x.sin().flatten(), accumulate=True),
                                      both(x, lambda y: put_sorted(y, y.detach()[:, 0]))],
    "one value at equal split points": lambda x: both(x, lambda y: set_in(y, 2.0, *cells_of(y))),
    "few rows": lambda x: [x[:1, 0].flatten(1).scatter(1, turned(x[:1, 0].flatten(1), 1), x[:1, 1].flatten(1).sin()),
                           x[0, 0].flatten().scatter_add(0, large(x[1], 1).flatten() * 7, x[1].flatten().sin())],
    "index_add": lambda x: [x[0].flatten(1).index_add(1, large(x[:, 0], 2).flatten(), pixels_of(x).mT, alpha=2),
                            pixels_of(x * 1).index_add_(0, large(x[:, 0], 2).flatten(), pixels_of(x).cos())],
    "index_copy": lambda x: (x * 2).flatten().index_copy(0, turned(x.flatten(), 0), x.flatten().sin()),
    "put split values at whole points": lambda x: set_in(
        x * 1, x[1].flatten(1).sin(), 0, slice(None), torch.arange(77).flip(0) // 11, torch.arange(77).flip(0) % 11),
}  # fmt: skip


def turned(x: Tensor, dim: int) -> Tensor:
    return x.detach().argsort(dim)


def cells_of(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(large(x, dim).flatten() for dim in range(4))


def pixels_of(x: Tensor) -> Tensor:
    return x.movedim(1, 3).flatten(0, 2).sin()


def put_sorted(y: Tensor, heights: Tensor) -> Tensor:
    """Pixels, sorted by cell, of each cell the last one, written into the cells of the second image."""
    rows, columns = y.shape[2:]
    cells, order = ((heights.abs() * 50).long() % (rows * columns)).flatten().sort(stable=True)
    last = torch.ones_like(cells, dtype=torch.bool)
    last[:-1] = cells[1:] != cells[:-1]
    cells, pixels = cells[last], (y * 2).sin().movedim(1, 3).flatten(0, 2)[order][last]
    y[1, :, cells // columns, cells % columns] = pixels.mT
    return y


def large(x: Tensor, dim: int) -> Tensor:
    return (x.detach().abs() * 50).long() % x.shape[dim]


@pytest.mark.parametrize("world", WORLDS)
def test_many_positions_are_written_where_each_rank_has_whole_rows(world: int) -> None:
    require_many_exact(__name__, world)


def _sent(height: int, width: int) -> list[float]:
    torch.manual_seed(0)
    x = ff.shard(torch.randn(1, 16, 40, 41), mesh(height, width)).requires_grad_()
    values = torch.randn(1, 16, 9, requires_grad=True)
    few, where = x.detach()[:, :1, :3].abs().long() % 40, torch.arange(9)
    writes: list[Op] = [
        lambda: set_in(x * 1, values, ..., where, where),
        lambda: x.scatter_add(3, where[:2].expand(1, 16, 40, 2), x[..., :2]),
        lambda: x.index_add(2, where, values.detach()[..., None].expand(-1, -1, -1, 41)),
        lambda: x.scatter(2, few, 1.0),
    ]  # fmt: skip
    return [bytes_of_messages(lambda f=f: f().sum().backward()) / (x.numel() * 4) for f in writes]  # type: ignore[misc]


def test_the_map_is_not_sent() -> None:
    for shape in ((1, 2), (2, 2)):
        for shares in rank_group(shape[0] * shape[1]).run(_sent, *shape):
            assert all(share < 0.2 for share in shares) and min(shares) < 0.01, shares


def _refused() -> int:
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 6, 8)
    x = ff.shard(whole, mesh(1, 2))
    index = x.flatten().abs().long() % 4
    overwriting: list[Callable[[Any, Any, Any], Any]] = [
        lambda rows, index, x: rows.index_copy(0, index, x.flatten()),
        lambda rows, index, x: rows.scatter(0, index, x.flatten()),
        lambda rows, index, x: rows.index_put((index,), x.flatten()),
    ]
    for write in overwriting:  # of equal positions the last counts
        assert torch.equal(write(torch.zeros(4), index, x).full(), write(torch.zeros(4), index.full(), whole))
        with pytest.raises(ff.UnsupportedOp):  # one row for two ranks
            write(torch.zeros(1), index * 0, x)
    with pytest.raises(ff.UnsupportedOp):
        x.index_put((x > 0,), torch.ones(()))
    with mock.patch.object(points, "FEW", 0), pytest.raises(ff.UnsupportedOp, match="equal in part"):
        x.index_put(cells_of(x), x.flatten())
    with mock.patch.object(points, "FEW", 0), pytest.raises(RuntimeError, match="out of bounds"):
        x.flatten().scatter_add(0, index - 1, x.flatten())
    return 1


def test_split_values_overwrite_a_whole_tensor_with_rows_for_all_ranks_or_are_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [1, 1]
