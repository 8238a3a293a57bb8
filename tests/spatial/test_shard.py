"""Cutting a whole tensor, and the ranks' agreement on what they cut."""

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import ShapeError
from fullframe.spatial.shard import even_spec, shard
from tests.exactness import relative
from tests.rank_group import rank_group
from tests.spatial.fake import spatial


def test_the_last_two_dims_are_cut_evenly() -> None:
    with spatial(2, 2) as on:
        cut = even_spec((3, 7, 9), on.mesh)
        assert [(p.axis, p.dim, p.extents.bounds) for p in cut.placements] == [
            ("height", 1, (0, 4, 7)),
            ("width", 2, (0, 5, 9)),
        ]
    with spatial(1, 1) as on:
        assert [p.extents.bounds for p in even_spec((7, 9), on.mesh).placements] == [(0, 9)]


def test_a_dim_with_fewer_rows_than_ranks_stays_whole() -> None:
    with spatial(2, 2) as on:
        assert [(p.axis, p.dim) for p in even_spec((3, 1, 9), on.mesh).placements] == [("width", 2)]
        assert even_spec((3, 1, 1), on.mesh).placements == ()


def test_with_depth_the_last_three_dims_are_cut() -> None:
    with spatial(2, 1, depth=2) as on:
        for shape, dims in [((1, 4, 5, 7, 9), (2, 3)), ((1, 5, 7, 9), (1, 2))]:  # a volume, and its labels
            assert [(p.axis, p.dim, p.extents.bounds) for p in even_spec(shape, on.mesh).placements] == [
                ("depth", dims[0], (0, 3, 5)),
                ("height", dims[1], (0, 4, 7)),
            ]
        assert [p.axis for p in even_spec((7, 9), on.mesh).placements] == ["height"]
    with spatial(3, 3, depth=3) as on:
        for few in range(3):
            shape = tuple(2 if dim == few else 9 for dim in range(3))
            names = [p.axis for p in even_spec((1, 4, *shape), on.mesh).placements]
            assert names == [name for dim, name in enumerate(("depth", "height", "width")) if dim != few]


def test_what_has_no_rows_and_columns_is_refused() -> None:
    with spatial(2, 2) as on, pytest.raises(ShapeError, match=r"dims .*H, W.* is needed"):
        even_spec((5,), on.mesh)


def _small(height: int, width: int, size: tuple[int, int]) -> list[float]:
    """Of a small image: what convolutions, a norm, a resize and a sum make of it, and every gradient."""
    on, found = ff.init_mesh(height, width), []
    for is_split in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.Upsample(scale_factor=4, mode="bilinear"),
            torch.nn.Conv2d(4, 2, 3, padding=1),
        ).double()
        image = torch.randn(2, 3, *size, dtype=torch.float64).requires_grad_()
        x = shard(image, on) if is_split else image
        out = (ff.parallelize(net, on) if is_split else net)(x)
        weights = torch.randn(2, 2, 4 * size[0], 4 * size[1], dtype=torch.float64)
        (out * (shard(weights, on) if is_split else weights)).sum().backward()
        whole = out.full() if isinstance(out, ff.SpatialTensor) else out
        found.append([whole.detach(), image.grad, *(p.grad for p in net.parameters())])
    return [relative(here, there) for here, there in zip(*found, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 2), (2, 9)])
@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 1), (2, 2), (1, 3)])
def test_small_images_are_exact(height: int, width: int, size: tuple[int, int]) -> None:
    for found in rank_group(height * width).run(_small, height, width, size):
        assert max(found) < 1e-11


def _refused(kind: str) -> str:
    mesh, second = ff.init_mesh(width=2), dist.get_rank() == 1
    x = torch.arange(2 * 600 * 600.0).view(2, 600, 600)
    if kind == "shape":
        x = x[:, : 600 - second]
    elif kind == "dtype":
        x = x.double() if second else x
    elif kind == "values" and second:
        x[1, 599 // (600 // 12 | 1) * (600 // 12 | 1), 0] += 1  # a place that is looked at
    elif kind == "split":
        x = shard(x, mesh)
    elif kind == "nan":
        x[0, 0, 0] = torch.nan
    try:
        shard(x, mesh)
    except ShapeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", "rank 0: (2, 600, 600), rank 1: (2, 599, 600)"),
        ("dtype", "shapes or dtypes differ"),
        ("values", "their values differ on ranks [0, 1]"),
        ("split", "is split already"),
    ],
)
def test_ranks_that_pass_different_tensors_are_told(kind: str, said: str) -> None:
    assert all(said in found for found in rank_group(2).run(_refused, kind))


def test_nan_is_equal_to_itself() -> None:
    assert rank_group(2).run(_refused, "nan") == ["", ""]


def _cut() -> tuple[bool, bool, list[int]]:
    x = torch.arange(12.0).view(1, 1, 2, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    split = shard(x, ff.init_mesh(width=2), check=False)
    (split * 2).sum().backward()
    own = split.local.data_ptr() != x.data_ptr()
    return own, bool((x.grad == 2).all()), split.local.flatten().tolist()  # type: ignore[union-attr]


def test_a_part_is_a_copy_and_its_gradient_is_the_whole_one_s() -> None:
    first, second = rank_group(2).run(_cut)
    assert first == (True, True, [0, 1, 2, 6, 7, 8]) and second == (True, True, [3, 4, 5, 9, 10, 11])


def _in_another_order() -> tuple[bool, tuple[int, ...]]:
    image = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    mine = image.to(memory_format=torch.channels_last) if dist.get_rank() else image
    x = ff.shard(mine, ff.init_mesh(width=2))
    return torch.equal(x.full(), image), x.stride()


def test_strides_are_the_same_on_all_ranks_where_the_tensors_lie_in_memory_in_different_orders() -> None:
    assert rank_group(2).run(_in_another_order) == [(True, (72, 24, 6, 1))] * 2


def _conjugate() -> bool:
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 4, 6, dtype=torch.complex64).conj()
    return all(torch.equal(ff.shard(each, ff.init_mesh(width=2)).full(), each) for each in (whole, whole.imag))


def test_conjugates_are_sharded() -> None:
    assert rank_group(2).run(_conjugate) == [True, True]


def _made_whole() -> list[float]:
    mesh = ff.init_mesh(width=2)
    image = torch.rand(1, 2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    split = shard(image, mesh)
    assert ff.full(image) is image and ff.full(split.sum()).dim() == 0
    whole = ff.full(split)
    assert type(whole) is torch.Tensor and torch.equal(whole, image)
    (whole * torch.arange(7)).square().sum().backward()
    return [relative(image.grad, 2 * image * torch.arange(7) ** 2)]


def test_what_is_split_is_made_whole_and_what_is_whole_is_left() -> None:
    for found in rank_group(2).run(_made_whole):
        assert found[0] < 1e-12
