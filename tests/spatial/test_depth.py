"""Volumes (N, C, D, H, W) with a split depth: their ops, one network whole, and images, which have no depth."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import UnsupportedOp
from fullframe.geometry.extents import Extents
from fullframe.geometry.window import TransposedWindow, Window
from tests.exactness import differences_from, mesh, one_process, relative
from tests.rank_group import RankGroup, rank_group
from tests.spatial.cases import TOLERANCE, VOLUME_MESHES, Case, as_in_one_process, differences_of
from tests.spatial.sent import elements_sent

SIZES = ((5, 7),)


def volume(op: Callable[..., Any], *whole: tuple[int, ...], lead: tuple[int, ...] = (2, 4, 5)) -> Case:
    """An op on (2, 4, 5, 5, 7), which no mesh cuts evenly."""
    return Case(op, (lead,), whole, SIZES)


def slices(x: Tensor) -> Tensor:
    """(N, C, D, H, W) to (N D, C, H, W), as networks for images take them."""
    return x.transpose(1, 2).flatten(0, 1)


def classes(x: Tensor) -> Tensor:
    """(N, D, H, W) of four classes and pixels without one."""
    found = (x[:, 0].detach().abs() * 7).long() % 5
    return torch.where(found == 4, -100, found)


def dice(x: Tensor) -> Tensor:
    wanted = F.one_hot(classes(x).clamp(min=0), 4).movedim(-1, 1).to(x.dtype)
    found = x.softmax(1)
    both, each = (found * wanted).sum((2, 3, 4)), (found + wanted).sum((2, 3, 4))
    return 1 - ((2 * both + 1) / (each + 1)).mean()


def windows(x: Tensor) -> Tensor:
    """(N, C, D, H, W) to shifted windows of 2 x 3 x 4 tokens, attention within each, and back, as in Video Swin."""
    n, c, *size = x.shape
    parts = (2, 3, 4)
    x = F.pad(x, [m for s, p in zip(reversed(size), reversed(parts), strict=True) for m in (0, -s % p)])
    grid = [s // p for s, p in zip(x.shape[2:], parts, strict=True)]
    x = x.roll((-1, -1, -2), (2, 3, 4)).view(n, c, grid[0], 2, grid[1], 3, grid[2], 4)
    tokens = x.permute(0, 2, 4, 6, 3, 5, 7, 1).reshape(-1, 24, c)
    tokens = F.scaled_dot_product_attention(tokens, tokens, tokens)
    x = tokens.view(n, *grid, *parts, c).permute(0, 7, 1, 4, 2, 5, 3, 6)
    x = x.reshape(n, c, *(g * p for g, p in zip(grid, parts, strict=True))).roll((1, 1, 2), (2, 3, 4))
    return x[:, :, : size[0], : size[1], : size[2]]


def attended(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens.tanh(), tokens)


def written(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :, 1:4, :, 2] = x[:, :, 2:, :, 3]
    x[x > 1] = 0.5
    return x


def penalised(x: Tensor) -> Tensor:
    out = F.conv3d(x.tanh(), x.new_ones(1, 4, 3, 3, 3), padding=1).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return slope.square().sum()


CASES: dict[str, Case] = {
    "conv": volume(lambda x, w: F.conv3d(x, w, None, (2, 1, 3), (1, 2, 0), (1, 2, 1)), (3, 4, 3, 3, 2)),
    "conv depthwise": volume(lambda x, w: F.conv3d(x, w, None, 1, 3, groups=4), (4, 1, 7, 7, 7)),
    "conv same": volume(lambda x, w: F.conv3d(x, w, padding="same"), (3, 4, 2, 4, 5)),
    "conv unbatched": volume(lambda x, w: F.conv3d(x[0], w, None, 1, 1), (3, 4, 3, 3, 3)),
    "conv of slices": volume(lambda x, w: F.conv2d(slices(x), w, None, 1, 1), (3, 4, 3, 3)),
    "transposed conv": volume(lambda x, w: F.conv_transpose3d(x, w, None, (2, 1, 3), 1, (1, 0, 2)), (4, 3, 3, 4, 3)),
    "batch norm": volume(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4,), (4,)),
    "norms of slices": volume(
        lambda x, w, b: [F.group_norm(slices(x), 2, w, b), F.instance_norm(slices(x), None, None, w, b)], (4,), (4,)
    ),
    "channels of slices dropped": volume(lambda x: F.dropout2d(slices(x), 0.4)),
    "instance norm": volume(lambda x, w, b: F.instance_norm(x, None, None, w, b), (4,), (4,)),
    "group norm": volume(lambda x, w, b: F.group_norm(x, 2, w, b), (4,), (4,)),
    "layer norm": volume(lambda x, w, b: F.layer_norm(x.movedim(1, -1), (4,), w, b), (4,), (4,)),
    "max pool": volume(lambda x: F.max_pool3d(x, 3, 2, 1, ceil_mode=True)),
    "max pool, back": volume(
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2, output_size=x.shape[2:])
    ),
    "average pool": volume(lambda x: F.avg_pool3d(x, (3, 2, 3), 2, 1, True, False)),
    "adaptive": volume(
        lambda x: [F.adaptive_avg_pool3d(x, (2, 3, 5)), F.adaptive_max_pool3d(x, 2), F.adaptive_avg_pool3d(x, 1)]
    ),
    "twice as large": volume(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False)),
    "larger": volume(lambda x: F.interpolate(x, size=(9, 8, 15), mode="trilinear", align_corners=True)),
    "smaller": volume(lambda x: F.interpolate(x, size=(3, 2, 4), mode="trilinear")),
    "nearest": volume(lambda x: [F.interpolate(x, size=(9, 5, 3), mode=mode) for mode in ("nearest", "area")]),
    "padded": volume(
        lambda x: [F.pad(x, (1, 2, 0, 3, 2, 1), mode) for mode in ("constant", "reflect", "replicate", "circular")]
    ),
    "sums": volume(
        lambda x: [x.sum(dims) for dims in ((2,), (2, 3), (2, 4), (3, 4), (1, 2, 3), (2, 3, 4), (0, 1, 2, 3, 4))]
    ),
    "spread": volume(lambda x: [x.std((2, 4)), x.amax((2, 3)), x.logsumexp((3, 2)), x.norm(), x.var()]),
    "softmax of voxels": volume(lambda x: [x.flatten(2).softmax(-1), x.softmax(2)]),
    "order": volume(
        lambda x: [x.sort(2)[0], x.flatten(2).topk(9)[0], x.median(2)[0], x.flatten(1).argmax(1), x.cumsum(2)]
    ),
    "turned": volume(lambda x: [x.flip(2), x.roll((2, 3), (2, 4)), x.transpose(2, 4) * 2, x.rot90(1, (2, 3))]),
    "cut": volume(
        lambda x: [
            x[:, :, 1:-1, ::2] * x[:, :, :3, ::2],
            x[:, :, 2].exp(),
            torch.cat([x, x[:, :, :2]], 2),
            *x.chunk(2, 2),
        ]
    ),
    "stacked": volume(lambda x: [torch.stack(x.unbind(2), 1), x.unfold(2, 3, 1).mean(-1), x.repeat_interleave(2, 2)]),
    "reshaped": volume(
        lambda x: [
            x.flatten(2).relu(),
            x.flatten(1, 2).mean(1),
            x.permute(0, 2, 3, 4, 1).flatten(1, 3) @ x.new_ones(4, 2),
        ]
    ),
    "broadcast": volume(
        lambda x: x * x.mean((3, 4), keepdim=True) + x.mean(2, keepdim=True) - x[:, :, :, :1] + x[0, 0, 0]
    ),
    "masked": volume(
        lambda x: [
            x[x > 0.3],
            x[x > 0.3].mean(),
            x[:, :, (x > 0)[0, 0]].sum(2),
            x.masked_select(x[:, :1] > 0).square().sum(),
        ]
    ),
    "masked images of slices": volume(
        lambda x: [x[..., (x > 0)[0, 0, 0]].exp(), x.transpose(2, 4)[..., (x > 0)[0, 0, :, :, 0].T] * 2]
    ),
    "written": volume(written),
    "positions": volume(lambda x: x[:, :, [0, 4, 2], [1, 1, 3], [6, 0, 2]] + x.gather(2, x.argsort(2))[:, :, 0, 0, :3]),
    "grid sample": volume(lambda x, g: F.grid_sample(x, g.tanh() * 1.1, align_corners=False), (2, 4, 3, 6, 3)),
    "warped": volume(lambda x: F.grid_sample(x, (x[:, :3] * 0.3).movedim(1, -1), align_corners=True)),
    "cross entropy": volume(
        lambda x: F.cross_entropy(x, classes(x), x.new_tensor([1.0, 2.0, 0.5, 3.0]), label_smoothing=0.1)
    ),
    "Dice": volume(dice),
    "attention": volume(attended),
    "shifted windows": volume(windows),
    "einsum": volume(
        lambda x: torch.einsum("ncdhw,nkdhw->nck", x, x.sin()) + torch.einsum("ncdhw,ncehw->nde", x, x.cos()).sum()
    ),
    "a gradient of a gradient": volume(penalised),
    "images of one slice each": volume(lambda x: x.mean(2).relu() @ x.new_ones(7, 3)),
    "few slices": volume(
        lambda x, w: F.conv3d(F.max_pool3d(F.conv3d(x, w, None, 2, 1), 2, ceil_mode=True), w, None, 1, 1),
        (4, 4, 3, 3, 3),
    ),
}


test_as_in_one_process = pytest.mark.filterwarnings("ignore")(as_in_one_process(__name__, CASES))


EIGHT = ("sums", "spread", "conv", "masked images of slices", "broadcast", "Dice", "warped", "attention", "order")


def _on_eight(names: tuple[str, ...]) -> list[tuple[str, float]]:
    return [found for name in names for found in differences_of(CASES[name], [(2, 2, 2)], SIZES)]


@pytest.mark.further
def test_all_three_axes_split() -> None:
    """Where a value lies along two of them alone, ranks that are neither one axis nor all combine it."""
    group = RankGroup(8)
    try:
        for answers in group.run(_on_eight, EIGHT):
            assert not {what: error for what, error in answers if not error <= TOLERANCE}
    finally:
        group.close()


def _sent() -> int:
    x, w = ff.shard(torch.ones(1, 2, 6, 5, 8), mesh(1, 2, 2)), torch.ones(2, 2, 3, 3, 3)
    return elements_sent(lambda: F.conv3d(x, w, padding=1))


def test_edges_travel_with_the_strips_of_the_cut_before() -> None:
    """Of 3 slices of 5 x 4 voxels: one slice along depth, then a column of the 4 slices that it has by then."""
    assert rank_group(4).run(_sent) == [2 * 5 * 4 + 2 * 4 * 5] * 4


class VolumeUNet(nn.Module):
    """Two resolutions and a third by pooling: every layer of a 3-D UNet, skips concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.down, self.down_norm = nn.Conv3d(4, 6, 3, 2, 1), nn.InstanceNorm3d(6, affine=True)
        self.wide, self.wide_norm = nn.Conv3d(6, 6, 3, padding=2, dilation=2), nn.GroupNorm(2, 6)
        self.up, self.join = nn.ConvTranspose3d(6, 4, 2, 2), nn.Conv3d(8, 4, 3, padding=1)
        self.pooled, self.head = nn.Conv3d(4, 8, 3, padding=1), nn.Conv3d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.enter(x)).relu()
        second = self.down_norm(self.down(first)).relu()
        second = self.up(self.wide_norm(self.wide(second)).relu())
        joined = self.join(torch.cat([first, second[:, :, : x.shape[2], : x.shape[3], : x.shape[4]]], 1)).relu()
        third = self.pooled(F.max_pool3d(joined, 2, ceil_mode=True)).relu()
        third = F.interpolate(third, size=x.shape[2:], mode="trilinear", align_corners=False)
        return self.head(torch.cat([joined, third], 1))  # type: ignore[no-any-return]


def _segmented(size: tuple[int, ...], on: tuple[int, int, int] | None) -> list[Tensor]:
    """Logits, loss, gradients and buffers of one step with cross entropy and Dice."""
    torch.manual_seed(0)
    net, image = VolumeUNet().double(), torch.randn(2, 1, *size, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 3, (2, *size))
    model, x, wanted = net, image, labels
    if on is not None:
        made = mesh(*on)
        model, x, wanted = ff.parallelize(net, made), ff.shard(image, made), ff.shard(labels, made)  # type: ignore[assignment]
    logits = model(x)
    found, truth = logits.softmax(1), F.one_hot(wanted, 3).movedim(-1, 1).double()
    both, each = (found * truth).sum((2, 3, 4)), (found + truth).sum((2, 3, 4))
    loss = F.cross_entropy(logits, wanted) + 1 - ((2 * both + 1) / (each + 1)).mean()
    loss.backward()
    logits = logits.full() if isinstance(logits, ff.SpatialTensor) else logits
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    assert image.grad is not None and len(gradients) == len(list(net.parameters()))
    return [logits.detach(), loss.detach(), image.grad, *gradients, *net.buffers()]


def _apart(meshes: list[tuple[int, int, int]], sizes: list[tuple[int, int, int]]) -> dict[str, float]:
    found = {}
    for size in sizes:
        here = _segmented(size, None)
        for on in meshes:
            there = _segmented(size, on)
            found[f"{size} on {on}"] = max(relative(a, b) for a, b in zip(here, there, strict=True))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_volume_network_is_exact(ranks: int) -> None:
    """Also with fewer slices, rows or columns than ranks."""
    meshes = [on for on in (*VOLUME_MESHES, (1, 1, 4), (2, 2, 1)) if on[0] * on[1] * on[2] == ranks]
    for found in rank_group(ranks).run(_apart, meshes, [(9, 11, 13), (5, 8, 7), (3, 10, 9), (2, 3, 9), (7, 1, 6)]):
        assert len(found) == 5 * len(meshes) and not {name: error for name, error in found.items() if error > 1e-11}


triples = st.tuples(*(st.integers(1, 9),) * 3)
geometries = st.fixed_dictionaries(
    {
        "mesh": st.sampled_from(VOLUME_MESHES),
        "size": triples,
        "extra": st.tuples(*(st.integers(0, 4),) * 3),  # rows sliced off the start, so that the cuts are uneven
        "kernel": st.tuples(*(st.integers(1, 5),) * 3),
        "stride": st.tuples(*(st.integers(1, 3),) * 3),
        "padding": st.tuples(*(st.integers(0, 3),) * 3),
        "dilation": st.tuples(*(st.integers(1, 2),) * 3),
        "kind": st.sampled_from(["convolution", "transposed", "max", "average"]),
    }
)


def _windowed(g: dict[str, Any]) -> dict[str, float]:
    x = torch.randn(1, 2, *map(sum, zip(g["size"], g["extra"], strict=True)), dtype=torch.float64,
                    generator=torch.Generator().manual_seed(1))  # fmt: skip
    weight = torch.randn(2, 2, *g["kernel"], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    d, h, w = g["extra"]
    options = g["stride"], g["padding"]
    halves = tuple(min(p, k // 2) for p, k in zip(g["padding"], g["kernel"], strict=True))
    op = {
        "convolution": lambda x, w: F.conv3d(x, w, None, *options, g["dilation"]),
        "transposed": lambda x, w: F.conv_transpose3d(x, w, None, *options, 0, 1, g["dilation"]),
        "max": lambda x, w: F.max_pool3d(x, g["kernel"], g["stride"], halves) * w.sum(),
        "average": lambda x, w: F.avg_pool3d(x, g["kernel"], g["stride"], halves) * w.sum(),
    }[g["kind"]]
    cut: Callable[..., Tensor] = lambda x, weight: op(x[:, :, d:, h:, w:], weight)  # noqa: E731
    height, width, depth = g["mesh"]
    return differences_from(one_process(cut, [x], [weight]), cut, [x], [weight], height, width, depth=depth)


@settings(max_examples=50)
@given(geometries)
def test_any_window(g: dict[str, Any]) -> None:
    pooled = g["kind"] in ("max", "average")
    kind: Any = TransposedWindow if g["kind"] == "transposed" else Window
    for kernel, stride, dilation, padding, size in zip(
        g["kernel"], g["stride"], g["dilation"], g["padding"], g["size"], strict=True
    ):
        window = kind(kernel, stride, 1 if pooled else dilation, min(padding, kernel // 2) if pooled else padding)
        assume(window.output_size(size) >= 1 and (size >= kernel or g["kind"] != "average"))  # torch refuses that
    for found in rank_group(g["mesh"][0] * g["mesh"][1] * g["mesh"][2]).run(_windowed, g):
        assert all(error <= 1e-11 for error in found.values()), found


def _beside(on: tuple[int, int, int]) -> list[float]:
    """A volume, and an image cut along its rows and columns alone: outputs, input gradients, weight gradients."""
    generator, found = torch.Generator().manual_seed(1), []
    scan, image, w3, w2 = (torch.randn(shape, generator=generator, dtype=torch.float64)
                           for shape in ((1, 2, 5, 7, 9), (1, 3, 7, 9), (4, 2, 3, 3, 3), (4, 3, 3, 3)))  # fmt: skip
    for is_split in (False, True):
        leaves = [t.clone().requires_grad_() for t in (scan, image, w3, w2)]
        x, y = leaves[:2]
        if is_split:
            made = mesh(*on)
            x = ff.shard(x, made)
            rows = [Extents.even(7, on[0]).ranges[made.get_local_rank("height")],
                    Extents.even(9, on[1]).ranges[made.get_local_rank("width")]]  # fmt: skip
            part = y[:, :, rows[0].start : rows[0].stop, rows[1].start : rows[1].stop].detach().requires_grad_()
            y = ff.from_local(part, made, placements={"height": 2, "width": 3})
        features = F.conv3d(x, leaves[2], None, 1, 1) * F.conv2d(y, leaves[3], None, 1, 1)[:, :, None]
        loss = (features.sigmoid().mean(2) - y.mean(1, keepdim=True)).square().mean() + features.std()
        loss.backward()
        gradients = [leaf.grad for leaf in leaves]
        if is_split:
            gradients[1] = ff.from_local(part.grad, made, placements={"height": 2, "width": 3}).full()  # type: ignore[attr-defined, arg-type]
        found.append([loss.detach(), *gradients])
    return [relative(a, b) for a, b in zip(*found, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize("on", [(2, 1, 2), (1, 2, 2)])
def test_an_image_beside_a_volume_is_cut_by_its_placements(on: tuple[int, int, int]) -> None:
    for found in rank_group(4).run(_beside, on):
        assert len(found) == 5 and max(found) < 1e-12, found


def _image() -> tuple[list[str], list[float]]:
    on, said, apart = mesh(1, 1, 2), [], []
    image, w = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
                for shape in ((1, 4, 6, 8), (4, 4, 3, 3)))  # fmt: skip
    refused: list[Callable[[Tensor], Tensor]] = [lambda x: F.conv_transpose2d(x, w), lambda x: F.unfold(x, 3)]
    for op in refused:
        with pytest.raises(UnsupportedOp) as caught:
            op(ff.shard(image, on))
        said.append(str(caught.value))
    exact: list[Callable[..., Tensor]] = [
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: F.batch_norm(x, None, None, w[0, :, 0, 0], training=True),
        lambda x, w: F.group_norm(x, 2, w[0, :, 0, 0]),
        lambda x, w: F.max_pool2d(x, 3, 2) * w.sum(),
        lambda x, w: F.conv2d(x[:, :1], w[:, :1]),  # of one channel, which two ranks do not share
    ]
    for op in exact:
        apart += differences_from(one_process(op, [image], [w]), op, [image], [w], 1, 1, depth=2).values()
    return said, apart


def test_images_on_a_mesh_with_depth_are_exact_or_refused_by_name() -> None:
    for said, apart in rank_group(2).run(_image):
        assert len(apart) == 15 and max(apart) < TOLERANCE
        assert len(said) == 2
        for text in said:
            assert "channels are split" in text
            assert "split images over a mesh without depth, init_mesh(height=..., width=...)" in text


def _merged_voxels() -> str:
    with pytest.raises(UnsupportedOp) as caught:
        torch.linalg.svdvals(ff.shard(torch.ones(2, 3, 4, 5, 6), mesh(1, 1, 2)).flatten(2))
    return str(caught.value)


def test_of_a_volume_s_voxels_no_mesh_without_depth_is_advised() -> None:
    for text in rank_group(2).run(_merged_voxels):
        assert "whole matrices" in text and "Gather first with .full()" in text and "without depth" not in text
