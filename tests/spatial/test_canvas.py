"""Whole tensors that become split where split values are written into them, and those that must not."""

import weakref
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, nn

import fullframe as ff
from fullframe.spatial.canvas import _view_of
from fullframe.spatial.gradients import manage
from tests.exactness import mesh
from tests.rank_group import RankFailure, rank_group
from tests.spatial.traffic import bytes_of_messages

SHAPE = (1, 2, 6, 9)


def _filled() -> list[Any]:
    x = ff.shard(torch.ones(SHAPE), mesh(1, 2))
    canvas = torch.zeros(SHAPE).to(memory_format=torch.channels_last)
    canvas[:, 0] = 3
    same, holders = canvas, {"canvas": canvas}
    sent = bytes_of_messages(lambda: canvas.__setitem__((slice(None), 1), x[:, 1]))
    assert same is canvas is holders["canvas"] and isinstance(canvas, ff.SpatialTensor)
    assert canvas.stride() == torch.empty(SHAPE).to(memory_format=torch.channels_last).stride()
    assert torch.equal(canvas.full()[0], torch.stack([torch.full((6, 9), 3.0), x.full()[0, 1]]))
    return [sent, canvas.local.shape[-1], canvas.local.untyped_storage().nbytes()]


def test_the_object_itself_becomes_split_and_nothing_is_sent() -> None:
    assert rank_group(2).run(_filled) == [[0, width, 2 * 6 * width * 4] for width in (5, 4)]


def _cuts() -> list[Any]:
    x = ff.shard(torch.ones(SHAPE), mesh(2, 2))
    taller, wider, flat = torch.zeros(1, 2, 12, 9), torch.zeros(1, 2, 6, 1), torch.zeros(108)
    taller[:, :, ::2] += x
    wider += x.sum(-1, keepdim=True)
    flat[torch.arange(108)] = x.flatten()
    assert torch.equal(taller.full()[:, :, ::2], x.full()) and torch.equal(flat.full(), torch.ones(108))  # type: ignore[attr-defined]
    return [tuple(t.local.shape) for t in (taller, wider, flat)]  # type: ignore[attr-defined]


def test_the_cuts_are_those_of_what_is_written() -> None:
    parts = [((1, 2, 6, 5), (30,)), ((1, 2, 6, 4), (24,)), ((1, 2, 6, 5), (30,)), ((1, 2, 6, 4), (24,))]
    assert rank_group(4).run(_cuts) == [[taller, (1, 2, 3, 1), flat] for taller, flat in parts]


def _voxels(images: int) -> tuple[int, ...]:
    """Points of cameras are put into cells seen from above, as lift-splat does it."""
    points = torch.arange(images * 10.0).view(-1, 2)
    places = torch.arange(len(points))
    cells = torch.zeros(images, 2, 6, 9)
    cells[places % images, :, places % 5, places % 9] = ff.shard(points[None, None], mesh(2, 1))[0, 0]
    expected = torch.zeros(images, 2, 6, 9)
    expected[places % images, :, places % 5, places % 9] = points
    assert torch.equal(cells.full(), expected)  # type: ignore[attr-defined]
    return tuple(cells.local.shape)  # type: ignore[attr-defined]


@pytest.mark.parametrize("images", [1, 2, 3])
def test_what_positions_pick_together_lies_along_the_longest_of_their_dims(images: int) -> None:
    assert rank_group(2).run(_voxels, images) == [(images, 2, 6, 5), (images, 2, 6, 4)]


def _splatted(x: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
    """Pixels (N, H, W, C) are moved to positions (N, H, W): written, added up, and written into pixels in one row."""
    n, channels = len(x), x.shape[-1]
    image = torch.arange(n).view(n, 1, 1)
    moved, added, flat = torch.zeros(n, channels, 18, 6), torch.zeros(n, 6, 9, channels), torch.zeros(18 * 6, channels)
    moved[image, :, torch.arange(54).view(6, 9) // 3, torch.arange(54).view(6, 9) % 3 * 2] = x
    added.index_put_((image, rows, columns), x, accumulate=True)
    flat[torch.arange(54).view(6, 9) * 2] = x[0]
    return [moved, added, flat]


def _splats(height: int, width: int) -> list[tuple[int, ...]]:
    generator, on = torch.Generator().manual_seed(0), mesh(height, width)
    x = torch.rand(2, 6, 9, 3, generator=generator)
    rows, columns = (torch.randint(0, size, (2, 6, 9), generator=generator) for size in (6, 9))
    pixels, *positions = ff.shard(x.movedim(-1, 1), on).movedim(1, -1), ff.shard(rows, on), ff.shard(columns, on)
    found = _splatted(pixels, *positions)
    for expected, got in zip(_splatted(x, rows, columns), found, strict=True):
        assert isinstance(got, ff.SpatialTensor) and torch.equal(got.full(), expected)
    return [tuple(t.local.shape) for t in found]  # type: ignore[attr-defined]


def test_positions_of_as_many_dims_as_they_index_lie_along_each() -> None:
    for on, first in (
        ((1, 2), [(2, 3, 18, 3), (2, 6, 5, 3), (54, 3)]),
        ((2, 1), [(2, 3, 9, 6), (2, 3, 9, 3), (54, 3)]),
        ((2, 2), [(2, 3, 9, 3), (2, 3, 5, 3), (27, 3)]),
    ):
        assert rank_group(on[0] * on[1]).run(_splats, *on)[0] == first


def _warped(x: Tensor, place: Tensor) -> list[Tensor]:
    """Pixels of (1, C, H, W) that go to pixels `place` (H, W) of new maps, by each function that is not in place."""
    channels, rows, columns = x.shape[1:]
    pixels, cells = x.flatten(2), place.flatten()
    table, flat = pixels[0].mT, cells.expand(1, channels, -1)
    maps, lists = x.new_full(pixels.shape, 0.5), x.new_full(table.shape, 0.5).requires_grad_()
    layers = torch.arange(channels).view(-1, 1, 1)
    return [
        maps.scatter_add(2, flat, pixels),
        *(torch.scatter_reduce(maps, 2, flat, pixels, how) for how in ("sum", "mean", "amax", "prod")),
        x.new_zeros(x.shape[1:]).index_put((layers, place // columns, place % columns), x[0], accumulate=True),
        lists.index_put((cells,), table, accumulate=True),
        torch.index_add(lists, 0, cells, table),
        lists.index_copy(0, (torch.arange(rows * columns) + 7) % (rows * columns), table),
        torch.put(x.new_zeros(rows * columns), cells, pixels[0, 0], accumulate=True),
        x.new_zeros(2 * rows * columns, channels).index_copy(0, torch.arange(rows * columns) * 2, table),
    ]


def _warps(height: int, width: int) -> None:
    generator, on = torch.Generator().manual_seed(0), mesh(height, width)
    plain = torch.rand(SHAPE, generator=generator, dtype=torch.float64).requires_grad_()
    x, place = plain.detach().clone().requires_grad_(), torch.randint(0, 54, (6, 9), generator=generator)
    expected, found = _warped(plain, place), _warped(ff.shard(x, on), ff.shard(place, on))
    for one, other in zip(expected, found, strict=True):
        assert isinstance(other, ff.SpatialTensor) and torch.equal(other.full(), one)
    for maps in (expected, found):
        torch.stack([t.pow(3).sum() for t in maps]).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-12, atol=1e-12)


def test_what_a_function_that_is_not_in_place_writes_is_split() -> None:
    for on in ((1, 2), (2, 1), (2, 2), (1, 3)):
        rank_group(on[0] * on[1]).run(_warps, *on)


def _window(image: Tensor) -> Tensor:
    summed = torch.zeros(1, 4, 11, 13)
    for top in (0, 2, 5):
        summed[:, 1:3, top : top + 6, 2:11] += image
        summed[0, 3, top : top + 6].mT[4:] -= image[0, 1].mT
    return summed


def _windows(height: int, width: int) -> bool:
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
    summed = _window(ff.shard(x, mesh(height, width)))
    return torch.equal(summed.full(), _window(x))  # type: ignore[attr-defined]


def test_windows_of_several_dims_are_added_to() -> None:
    for on in ((1, 2), (2, 1)):
        assert rank_group(2).run(_windows, *on) == [True, True]


def _in_one_batch(images: list[Tensor]) -> Tensor:
    """Images of several sizes, as DETR and those after it put them together: the loop holds a view of each."""
    batch = torch.zeros(len(images), 2, 7, 9)
    for image, part in zip(images, batch, strict=True):
        part[: image.shape[0], : image.shape[1], : image.shape[2]].copy_(image)
    return batch


def _batches(height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    large, small = torch.rand(2, 7, 9, generator=generator), torch.rand(2, 4, 6, generator=generator)
    for images in ([large, large / 2], [small, large], [large, small], [small, small / 2, small[:, 1:]]):
        batch = _in_one_batch([ff.shard(image.clone(), mesh(height, width)) for image in images])
        assert isinstance(batch, ff.SpatialTensor) and torch.equal(batch.full(), _in_one_batch(images))


def test_images_are_put_into_views_of_a_batch() -> None:
    for on in ((1, 2), (2, 1)):
        rank_group(2).run(_batches, *on)


def _through_views(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    canvas = torch.ones(2, *SHAPE[1:])
    first, odd, turned, rows = canvas[0], canvas[1:, :, 1::2], canvas[1].mT, canvas[:, :, 2]
    odd.mul_(x[:, :, 1::2])
    read = rows.clone()
    turned[..., 3] += x[0, :, 3]
    rows[..., 1] = 5.0
    first.add_(x[0] * weight)
    canvas[:, :, 2] *= 3
    return canvas, read, rows * weight, odd, turned


def _views_that_are_held(height: int, width: int) -> None:
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
    on = mesh(height, width)
    plain, weight = torch.tensor(0.5, requires_grad=True), nn.Parameter(torch.tensor(0.5))
    manage(weight, None)
    expected = _through_views(x, plain)
    ends = _through_views(ff.shard(x, on), weight)
    for end, value in zip(ends, expected, strict=True):
        assert torch.equal(end.full() if isinstance(end, ff.SpatialTensor) else end, value)
    sum(value.square().sum() for value in expected).backward()  # type: ignore[union-attr]
    sum(end.square().sum() for end in ends).backward()  # type: ignore[union-attr]
    assert weight.grad is not None and plain.grad is not None
    dist.all_reduce(weight.grad)  # of which DDP would take the mean
    torch.testing.assert_close(weight.grad / 2, plain.grad)


def test_views_that_were_taken_before_are_views_of_what_is_split() -> None:
    for on in ((1, 2), (2, 1)):
        rank_group(2).run(_views_that_are_held, *on)


def _in_numpy(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, canvas.numpy()


def _of_numpy(x: Tensor) -> tuple[Tensor, Any]:
    return torch.from_numpy(torch.zeros(SHAPE).numpy().copy()), None


def _in_a_graph(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, canvas * torch.ones(SHAPE, requires_grad=True)


def _viewed_flat(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, canvas.flatten()


def _view_in_a_graph(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, (canvas[:, 1], canvas[:, 0] * torch.ones(SHAPE[2:], requires_grad=True))


def _viewed_in_numpy(x: Tensor) -> tuple[Tensor, Any]:
    base = torch.zeros(2, *SHAPE)
    return base[0], base[1].numpy()


def _view_of_a_class(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, canvas[:, 1].as_subclass(Image)


def _detached(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, canvas.detach()


def _memory_kept(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, canvas.untyped_storage()


def _shared(x: Tensor) -> tuple[Tensor, Any]:
    return torch.zeros(SHAPE).share_memory_(), None


def _parameter(x: Tensor) -> tuple[Tensor, Any]:
    return nn.Parameter(torch.zeros(SHAPE), requires_grad=False), None


def _buffer(x: Tensor) -> tuple[Tensor, Any]:
    module = nn.BatchNorm2d(2)
    module.register_buffer("canvas", torch.zeros(SHAPE))
    parallel = ff.parallelize(module, x.device_mesh)  # type: ignore[attr-defined]
    return module.get_buffer("canvas"), parallel


def _leaf(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE, requires_grad=True)
    torch.set_grad_enabled(False)
    return canvas, None


def _trained_before(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE, requires_grad=True) * 2
    torch.set_grad_enabled(False)
    return canvas, None


class Image(Tensor):
    """A class of the program's own."""


def _of_a_class(x: Tensor) -> tuple[Tensor, Any]:
    return torch.zeros(SHAPE).as_subclass(Image), None


def _gathered(x: Tensor) -> tuple[Tensor, Any]:
    return (x * 0).full(), None  # type: ignore[attr-defined]


def _local(x: Tensor) -> tuple[Tensor, Any]:
    zeros = ff.shard(torch.zeros(*SHAPE[:-1], 2 * SHAPE[-1]), x.device_mesh)  # type: ignore[attr-defined]
    return zeros.local, zeros


def _part(x: Tensor) -> tuple[Tensor, Any]:
    part = torch.zeros(SHAPE)
    return part, ff.from_local(part, x.device_mesh)  # type: ignore[attr-defined]


def _of_a_part(x: Tensor) -> tuple[Tensor, Any]:
    part = torch.zeros(2, *SHAPE[1:])
    return part[:1], ff.from_local(part, x.device_mesh)  # type: ignore[attr-defined]


def _known_elsewhere(x: Tensor) -> tuple[Tensor, Any]:
    canvas = torch.zeros(SHAPE)
    return canvas, weakref.ref(canvas)


def _flattened(x: Tensor) -> tuple[Tensor, Any]:
    return torch.zeros(2, *SHAPE[1:]).flatten()[5 : 5 + x.numel()].view(SHAPE), None


STAYS = [
    _in_numpy, _of_numpy, _in_a_graph, _viewed_flat, _view_in_a_graph, _viewed_in_numpy, _view_of_a_class, _detached,
    _memory_kept, _shared, _parameter, _buffer, _leaf, _trained_before, _known_elsewhere, _flattened, _of_a_class,
    _gathered, _local, _part, _of_a_part,
]  # fmt: skip


def _refused(number: int) -> list[str]:
    x = ff.shard(torch.ones(SHAPE), mesh(1, 2))
    found = []
    writes: list[Callable[[Tensor], Any]] = [
        lambda t: t.__setitem__(slice(None), x), lambda t: t.add_(x), lambda t: t.__setitem__(x > 0, x[x > 0]),
    ]  # fmt: skip
    for write in writes:
        canvas, held = STAYS[number](x)
        with pytest.raises(ff.UnsupportedOp):
            write(canvas)
        torch.set_grad_enabled(True)
        assert not isinstance(canvas, ff.SpatialTensor) and not canvas.detach().any(), held
    with torch.inference_mode(), pytest.raises(ff.UnsupportedOp, match="inference_mode"):
        canvas = torch.zeros(SHAPE)
        canvas[:, 1:] += x[:, 1:]
    return found


@pytest.mark.parametrize("number", range(len(STAYS)), ids=[make.__name__[1:] for make in STAYS])
def test_what_others_hold_is_refused_and_left_as_it_was(number: int) -> None:
    rank_group(2).run(_refused, number)


def _held_on_one_rank() -> None:
    x, canvas = ff.shard(torch.ones(SHAPE), mesh(1, 2)), torch.zeros(SHAPE)
    held = canvas.detach() if dist.get_rank() else None
    canvas[..., 1:] = x[..., 1:] * 2
    canvas.roll(1, -1)
    assert held is None


def test_what_one_rank_alone_must_refuse_is_told_to_the_others() -> None:
    with pytest.raises(RankFailure) as failure:
        rank_group(2).run(_held_on_one_rank)
    assert "DivergenceError: rank 1 raised UnsupportedOp: torch.Tensor.__setitem__" in str(failure.value)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_view_of_slices_and_numbers_is_found_again(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    base = torch.arange(torch.Size(sizes).numel()).view(sizes).permute(order).clone(memory_format=torch.preserve_format)
    items: list[Any] = []
    for size in base.shape:
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        items.append(data.draw(st.sampled_from([start, slice(start, stop, data.draw(st.integers(1, 3))), slice(None)])))
        items += data.draw(st.sampled_from([[], [], [None]]))
    view = base[tuple(items)]
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    found = _view_of(view, base)
    assert found is not None
    again = found.taken(base)
    assert torch.equal(again, view) and again.data_ptr() == view.data_ptr()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_view_that_is_found_is_the_one_that_it_was(data: st.DataObject) -> None:
    """Of any strides: flattened, diagonal, windows that overlap, expanded."""
    base = torch.arange(60).view(data.draw(st.sampled_from([(60,), (5, 12), (3, 4, 5), (2, 2, 3, 5), (5, 1, 12)])))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=3))
    strides = [data.draw(st.integers(0, 20)) for _ in sizes]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if last < 60:
        view = base.as_strided(sizes, strides, data.draw(st.integers(0, 59 - last)))
        found = _view_of(view, base)
        if found is not None:
            again = found.taken(base)
            assert torch.equal(again, view) and again.data_ptr() == view.data_ptr()


def test_views_that_slices_do_not_say_are_not_found() -> None:
    base = torch.zeros(4, 6, dtype=torch.cfloat)
    for view in (
        base.flatten(),
        base.diagonal(),
        base.unfold(1, 3, 1),
        base[:, :1].expand(4, 3),
        base.conj(),
        base.real,
    ):
        assert _view_of(view, base) is None, view
