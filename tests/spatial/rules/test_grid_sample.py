"""grid_sample: a split grid, a split image, and places that are infinite."""

import math
import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fullframe as ff
from fullframe.spatial.tensor import local_of, wrap
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, one, small
from tests.spatial.corners import Corners, autocast, corners_as_in_torch, last, noise, spoiled
from tests.spatial.fake import spatial
from tests.spatial.traffic import bytes_of_messages
from tests.spatial.values import found, on_all_meshes

CASES: dict[str, Case] = {
    "grid_sampler": one(lambda x: torch.grid_sampler(x, x[:, :2].tanh().permute(0, 2, 3, 1), 1, 2, True)),
    "grid_sample": one(lambda x: F.grid_sample(x, x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False)),
    "above the image": small(lambda x: sample(x, x[:, :2].tanh() - torch.tensor([0.0, 9.0]).view(2, 1, 1))),
    "beside the image": small(lambda x: sample(x, x[:, :2].tanh() - torch.tensor([9.0, 0.0]).view(2, 1, 1))),
}  # fmt: skip
CORNERS = Corners()


def sample(image: Tensor, grid: Tensor, **options: Any) -> Tensor:
    """A grid (N, 2, H, W) or (N, 3, D, H, W), so that it is split over the image."""
    return F.grid_sample(image, grid.movedim(1, -1), **options)


def sampling() -> None:
    """Where torch's own CPU kernels do not read wild memory: bilinear and nearest do at NaN and by reflection."""
    image, grid = noise(2, 3, 13, 11), noise(2, 2, 13, 11)
    for mode, value, padding in (
        *product(("bilinear", "nearest"), (math.inf,), ("zeros", "border")),
        *product(("bicubic",), (math.inf, math.nan), ("zeros", "border", "reflection")),
    ):
        places = grid.clone()
        places[0, 0, 3, 4] = places[1, 1, 12, 1] = value
        op = partial(sample, mode=mode, padding_mode=padding, align_corners=False)
        CORNERS.add(f"{mode} {padding} {value}", op, [image, places])
        CORNERS.add(f"{mode} {padding} {value} whole grid", op, [image], [places])
        CORNERS.add(f"{mode} {padding} {value} whole image", swapped(op), [places], [image])
    op = partial(sample, align_corners=True)
    CORNERS.add("channels last", op, [last(image), grid])
    CORNERS.add("autocast", autocast(op), [image.bfloat16(), grid.float()])
    CORNERS.add("a volume", op, [noise(1, 2, 4, 13, 11), noise(1, 3, 3, 12, 9)])
    places = noise(1, 3, 3, 12, 9)
    places[0, 0, 1, 3, 4] = places[0, 2, 2, 11, 1] = math.inf
    for padding in ("zeros", "border", "reflection"):
        op = partial(sample, padding_mode=padding, align_corners=True)
        CORNERS.add(f"a volume {padding} inf", op, [noise(1, 2, 2, 13, 11), places])
    for mode, padding, corners in product(("bilinear", "nearest"), ("zeros", "border", "reflection"), (False, True)):
        op = partial(sample, mode=mode, padding_mode=padding, align_corners=corners)
        name, odd = f"a volume {mode} {padding} {corners} at few", noise(1, 3, 2, 3, 4)
        for n, value in enumerate((math.inf, -math.inf, math.nan, 1e300, -1e300, 3e9, -7e9, 1e20, 1.0)):
            odd.view(-1)[7 * n] = value
        bad = spoiled(1, 2, 11, 13, 12, value=math.inf)
        CORNERS.add(f"{name} odd places", op, [noise(1, 2, 11, 13, 12)], [odd])
        CORNERS.add(f"{name} places of a spoiled image", op, [bad], [noise(1, 3, 2, 3, 4)])
        CORNERS.add(
            f"{name} split places of a spoiled image",
            op,
            [spoiled(1, 2, 4, 13, 12, value=math.inf), noise(1, 3, 3, 12, 9)],
        )
    CORNERS.add("a volume by numbers", by_numbers, [noise(1, 2, 11, 13, 12)], [noise(1, 2, 3, 4, 3)])


def by_numbers(image: Tensor, grid: Tensor) -> Tensor:
    return torch.grid_sampler_3d(image, grid, 0, 2, False)


def swapped(op: Op) -> Op:
    return lambda a, b: op(b, a)


sampling()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


POINTS = torch.tensor([[-0.3, 0.61], [0.999, -1.0], [1.0, 1.0], [-1.4, 0.2], [0.13, 2.7], [0.5, -0.5], [0, 0]])


def few(mode: str, padding: str, corners: bool) -> Op:
    """An image (N, C, H, W), positions (P, 2)."""
    return lambda x, p: F.grid_sample(
        x, p.expand(2, 1, *p.shape), mode=mode, padding_mode=padding, align_corners=corners
    )


def aligned_points(x: Tensor) -> Tensor:
    """Positions on rows and borders, where floor and gradient jump."""
    return torch.stack([torch.linspace(-1, 1, 11, dtype=x.dtype), torch.linspace(1, -1, 11, dtype=x.dtype)], -1)


WAYS = list(product(("nearest", "bilinear", "bicubic"), ("zeros", "border", "reflection"), (False, True)))


def _at_points(world: int) -> list[str]:
    x, wrong = torch.randn(2, 3, 13, 51, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []
    volume = x.view(2, 3, 13, 17, 3).movedim(-1, 2)
    places = POINTS.double()
    for mode, padding, corners in WAYS:
        name = f"{mode} {padding} {corners}"
        cases = {name: (few(mode, padding, corners), [x], [places]),
                 f"{name} on rows": (few(mode, padding, corners), [x], [aligned_points(x)])}  # fmt: skip
        if mode == "bicubic" or padding != "reflection":  # where torch's kernel reads inside the image
            for what, value in (("far away", math.inf), ("NaN in the image", math.nan)):
                cases[f"{name} {what}"] = far(mode, padding, corners), [spoiled(2, 3, 13, 51, value=value)], [FAR]
        if mode != "bicubic":
            cases[f"{name} volume"] = (few(mode, padding, corners), [volume], [_lifted(places)])
        wrong += found(cases, 1e-12, world)
    return wrong


FAR = torch.tensor([[math.inf, 0.3], [0.1, -math.inf], [1e30, 0.2], [-0.96, 0.9], [0.0, -0.35]], dtype=torch.float64)


def far(mode: str, padding: str, corners: bool) -> Op:
    """Of bicubic weights beside an infinite pixel torch's gradients are infinite and fullframe's NaN."""
    op = few(mode, padding, corners)
    return op if mode != "bicubic" else lambda x, p: op(x, p.detach())


def by_a_split_grid(x: Tensor) -> Tensor:
    """7 x 11 split positions in an image of 56 x 88."""
    return F.grid_sample(F.interpolate(x, scale_factor=8), x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=True)


def in_float32(x: Tensor, places: Tensor) -> Tensor:
    return few("bilinear", "zeros", False)(x.float(), places.float())


def by_planes(x: Tensor, warp: Tensor) -> Tensor:
    """A plane sweep by whole positions, of warps (N, 2, 3), as of several views; its volume lies where the map lies."""
    n, c, *sizes = x.shape
    grid = torch.cat([F.affine_grid(scale * warp, [n, c, *sizes], align_corners=True) for scale in (1.0, 0.8, 0.6)], 1)
    return F.grid_sample(x, grid, align_corners=True).view(n, c, 3, *sizes).var(2) * x


def _others(world: int) -> list[str]:
    x, warp = noise(2, 3, 13, 51), torch.eye(2, 3, dtype=torch.float64) + 0.1 * noise(2, 2, 3)
    return found({"by a split grid": (by_a_split_grid, [noise(2, 3, 7, 11)], []),
                  "by planes": (by_planes, [x], [warp]),
                  "a volume's warp": (sample, [noise(1, 2, 4, 13, 11)], [noise(1, 3, 8, 13, 11)]),
                  "channels last": (lambda x, p: few("bilinear", "zeros", False)(last(x), p), [x], [POINTS.double()]),
                  }, 1e-12, world) + found({"float32": (in_float32, [x], [POINTS.double()])}, 1e-6, world)  # fmt: skip


def test_split_grids_and_other_images() -> None:
    assert not on_all_meshes(_others)


def deformable(x: Tensor, queries: Tensor, mix: Tensor) -> Tensor:
    """Deformable DETR's cross-attention: (N, Q, heads * 2 levels * 2 points * 2) positions for Q queries."""
    sizes = [(24, 36), (12, 18)]
    levels = [F.interpolate(x, sizes[0], mode="bilinear"), F.interpolate(x, sizes[1], mode="bilinear")]
    value = torch.cat([level.flatten(2).mT for level in levels], 1) @ mix  # (N, tokens, C)
    count, heads = len(queries), 2
    points = queries.view(count, -1, heads, 2, 2, 2)
    sampled = []
    for n, (level, (h, w)) in enumerate(zip(value.split([h * w for h, w in sizes], 1), sizes, strict=True)):
        maps = level.transpose(1, 2).reshape(count * heads, -1, h, w)
        grid = points[:, :, :, n].tanh().transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False))
    weights = points[..., 0].softmax(-1).permute(0, 2, 1, 3, 4).reshape(count * heads, 1, -1, 4)
    return (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1).view(count, 4, -1).mT


def _deformable(world: int) -> list[str]:
    case = deformable, [noise(2, 4, 12, 18)], [noise(2, 5, 16), noise(4, 4)]
    return found({"deformable attention": case}, 1e-12, world)


def test_deformable_attention() -> None:
    assert not on_all_meshes(_deformable)


def by_many(mode: str, padding: str, corners: bool, reach: float) -> Op:
    """Each pixel of a map (N, 2, H, W) sampled from an image (N, C, H, W), at most `reach` of the image away."""

    def op(x: Tensor, shift: Tensor) -> Tensor:
        h, w = shift.shape[2:]
        y, x_ = torch.meshgrid(*(torch.linspace(-1, 1, size, dtype=x.dtype) for size in (h, w)), indexing="ij")
        grid = torch.stack([x_, y], -1) + reach * shift.tanh().permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)

    return op


def _by_many(world: int) -> list[str]:
    x, shift, none = noise(2, 3, 13, 51), noise(2, 2, 9, 33), noise(2, 2, 13, 51) * 0
    cases: dict[str, Any] = {}
    for mode, padding, corners in WAYS:
        name = f"{mode} {padding} {corners}"
        cases[f"{name} near"] = by_many(mode, padding, corners, 0.2), [x, shift], []
        cases[f"{name} anywhere"] = by_many(mode, padding, corners, 3.0), [x, shift], []
        cases[f"{name} on rows"] = by_many(mode, padding, corners, 1.0), [x, none], []
    cases["few rows"] = by_many("bilinear", "zeros", False, 0.5), [noise(1, 2, 2, 3), noise(1, 2, 21, 17)], []
    cases["all outside"] = lambda a, b: F.grid_sample(a, b.permute(0, 2, 3, 1) + 9), [x, shift], []
    cases["a volume"] = (sample, [noise(1, 2, 4, 13, 11), noise(1, 3, 3, 12, 9)], [])
    return found(cases, 1e-12, world)


@pytest.mark.further
def test_at_many_positions_that_are_split() -> None:
    assert not on_all_meshes(_by_many)


def _borrowed(height: int, width: int) -> list[float]:
    """Bytes sent over those of the image, by split positions and by whole ones; nothing is said to be gathered."""
    x = ff.shard(noise(1, 16, 120, 120).detach(), mesh(height, width)).requires_grad_()
    shift = ff.shard(noise(1, 2, 120, 120).detach(), mesh(height, width))
    op, warp = by_many("bilinear", "border", False, 0.02), torch.eye(2, 3, dtype=x.dtype)[None]
    samples = (lambda: op(x, shift), lambda: op(x, whole), lambda: by_planes(x, warp))
    whole, image = shift.detach().full(), x.numel() * x.local.element_size()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [bytes_of_messages(lambda f=f: f().sum().backward()) / image for f in samples]  # type: ignore[misc]


def test_near_positions_borrow_few_rows() -> None:
    for shape in ((1, 2), (2, 1), (2, 2)):
        for shares in rank_group(shape[0] * shape[1]).run(_borrowed, *shape):
            assert all(0 < share < 0.1 for share in shares), shares


def test_a_simulation_takes_any_row_to_be_read() -> None:
    with spatial(2, 2):
        x, shift = (ff.shard(torch.empty(1, n, 20, 21), mesh(2, 2)) for n in (3, 2))
        with FakeTensorMode():
            image, where = (wrap(torch.empty(t.local.shape, requires_grad=True), t.spec) for t in (x, shift))
            y = sample(image, where, align_corners=False)
            y.sum().backward()
    assert y.shape == x.shape
    assert local_of(y).shape == x.local.shape


def _of_a_batch(world: int) -> list[str]:
    """RAFT's lookup: each pixel has a map of its own, so that image and grid are split along the batch."""

    def op(x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        volume = (x.flatten(2).mT @ F.adaptive_avg_pool2d(x, (4, 5)).flatten(2)).reshape(n * h * w, 1, 4, 5)
        grid = x[:, :2].permute(0, 2, 3, 1).reshape(n * h * w, 1, 1, 2)
        return F.grid_sample(volume, grid, align_corners=True).view(n, h, w)

    def by_places(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x[..., :2], grid[: len(x)], align_corners=True)

    places = noise(13, 4, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cases = {"a batch of maps": (op, [noise(2, 3, 7, 11)], []),
                 "a whole grid": (lambda x, grid: by_places(x.movedim(2, 0), grid), [noise(2, 3, 13, 11)], [places]),
                 "split channels": (lambda x, grid: by_places(x.movedim(2, 1), grid), [noise(13, 3, 13, 11)], [places]),
                 }  # fmt: skip
        return found(cases, 1e-12, world)


def test_an_image_split_along_its_batch_or_channels() -> None:
    assert not on_all_meshes(_of_a_batch)


def _sent(height: int, width: int) -> list[float]:
    torch.manual_seed(0)
    x = ff.shard(torch.randn(1, 64, 40, 41), mesh(height, width)).requires_grad_()
    grid = x.detach()[:, :2, 20:23, 20:23].tanh().permute(0, 2, 3, 1)
    samples = (
        lambda: F.grid_sample(x, torch.rand(1, 20, 1, 2), align_corners=False),
        lambda: F.grid_sample(x, grid, align_corners=False),
    )
    return [bytes_of_messages(lambda f=f: f().sum().backward()) / (x.numel() * 4) for f in samples]  # type: ignore[misc]


def test_the_image_is_not_sent() -> None:
    for shape in ((1, 2), (2, 2)):
        for shares in rank_group(shape[0] * shape[1]).run(_sent, *shape):
            assert all(0 < share < 0.05 for share in shares), shares


def _by_a_whole_grid(mode: str) -> list[bool]:
    """A whole grid of the image's size, or of a multiple of its rows, is cut as the image; a smaller one's is whole."""
    x = noise(2, 3, 8, 10)
    split = ff.shard(x, mesh(1, 2))
    places = [noise(2, rows, columns, 2).tanh() for rows, columns in ((8, 10), (16, 10), (3, 4))]
    results = [F.grid_sample(image, at, mode, align_corners=False) for at in places for image in (split, x)]
    for sampled, other in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(ff.full(sampled), other, rtol=1e-12, atol=1e-12)
    return [isinstance(result, ff.SpatialTensor) for result in results[::2]]


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_of_a_whole_grid_as_large_as_the_image_the_result_is_split(mode: str) -> None:
    assert rank_group(2).run(_by_a_whole_grid, mode) == [[True, True, False]] * 2


def _lifted(places: Tensor) -> Tensor:
    """(1, P, 3), with depths of its own."""
    return torch.cat([places, places[:, :1].flip(0)], -1)[None]


@pytest.mark.further
def test_at_few_positions() -> None:
    assert not on_all_meshes(_at_points)
