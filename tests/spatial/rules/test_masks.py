"""Boolean masks: picked elements, what follows with them, and writes; equal to one process, with tiny messages."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from benchmarks.communication.traffic import counted
from fullframe.spatial.selection import Selection
from fullframe.strategy import Strategy
from tests.collector import tensors_for_the_collector
from tests.exactness import differences_from, mesh, one_process
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, WORLDS, Case, Op, as_in_one_process, raised
from tests.spatial.corners import Corners, noise, require_no_faults
from tests.verification.forked import verified_by_a_fork


def above(x: Tensor, low: float = 0.3) -> Tensor:
    return x.detach() > low


def corner(x: Tensor) -> Tensor:
    """True in the upper left alone, so that other ranks have nothing."""
    high, wide = x.shape[-2:]
    rows, columns = torch.arange(high)[:, None], torch.arange(wide)
    return above(x, -1) & ((rows < high // 4) & (columns < wide // 4))


def scale_invariant(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The loss of Eigen et al. 2014."""
    d = (x.abs().add(0.1).log() - y.abs().add(0.1).log())[mask]
    return (d**2).mean() - 0.5 * d.mean() ** 2


def losses(x: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
    pred, target = x[mask], y[mask]
    return [
        F.l1_loss(pred, target), F.mse_loss(pred, target, reduction="sum"), F.smooth_l1_loss(pred, target, beta=0.2),
        F.huber_loss(pred, target), F.binary_cross_entropy_with_logits(pred, target.sigmoid()),
        F.gaussian_nll_loss(pred, target, target.detach().abs() + 0.1), (pred - target).abs().mean(), pred.var(),
        ((pred - 2 * target) / (1 + target.abs())).norm(), torch.stack([pred, target]).sum(1), pred.sum() / mask.sum(),
        pred.new_tensor([len(pred), pred.numel(), pred.shape[0]]), scale_invariant(x, y, mask),
    ]  # fmt: skip


def of_channels(x: Tensor, weight: Tensor, mask: Tensor) -> list[Tensor]:
    """(N, C, H, W) and (C,) by a mask (N, H, W): vectors (elements, C)."""
    rows = x.permute(0, 2, 3, 1)[mask]
    labels = rows.detach().argmax(1)
    return [
        rows, rows * weight, F.cross_entropy(rows, labels), F.linear(rows, torch.outer(weight, weight)),
        rows.t() @ rows, rows.softmax(1).sum(0), rows.logsumexp(0), rows.amax(0), rows.std(0), rows[:, 1],
        F.cross_entropy(rows, labels, weight.detach().abs(), ignore_index=1), F.layer_norm(rows, (4,), weight),
        F.batch_norm(rows, None, None, weight, training=True), F.normalize(rows), rows.reshape(-1), rows[:, None],
    ]  # fmt: skip


def along_channels(x: Tensor, weight: Tensor, mask: Tensor) -> list[Tensor]:
    """What needs whole vectors of what a mask picked, and takes them where they lie."""
    rows = x.permute(0, 2, 3, 1)[mask]
    small = rows[:, :, None] * torch.outer(weight, weight) + 9 * torch.eye(4, dtype=x.dtype)
    return [
        torch.linalg.norm(rows, dim=-1), torch.linalg.norm(rows, 1, 1), torch.linalg.norm(small, 2, (1, 2)),
        F.cosine_similarity(rows, rows * weight), torch.cdist(rows, torch.outer(weight, weight)), F.glu(rows, 1),
        torch.linalg.vecdot(rows, weight), torch.linalg.det(small), torch.linalg.solve(small, rows), rows.sort(1)[0],
        rows.topk(2)[0], rows.median(1)[0], rows.kthvalue(2)[0], rows.mode(1)[0], rows.quantile(0.3, 1), rows.diff(),
        rows.cumsum(1), rows.cumprod(1), rows.cummax(1)[0], rows.median(), torch.linalg.svdvals(small),
        torch.linalg.lstsq(small, rows).solution, torch.inner(rows, weight), rows.argsort(1) * weight,
        rows.gather(1, rows.argsort(1)[:, :2]), rows.take_along_dim(rows.argmax(1, keepdim=True), 1),
        rows.gather(0, rows[:3].argsort(0)), weight.expand(len(rows), -1).gather(1, rows.argmax(1, keepdim=True)),
    ]  # fmt: skip


def patches(x: Tensor, mask: Tensor) -> list[Tensor]:
    """Small images (elements, C, 6, 6), of which kernels want at least one."""
    small = x.permute(0, 2, 3, 1)[mask[:, 0]][:, :, None, None] * torch.arange(36, dtype=x.dtype).view(6, 6).sin()
    kernel = torch.arange(72, dtype=x.dtype).view(2, 4, 3, 3).sin()
    return [
        F.conv2d(small, kernel), F.conv_transpose2d(small, kernel.transpose(0, 1)), F.max_pool2d(small, 3, 2, 1),
        F.adaptive_avg_pool2d(small, 2), F.interpolate(small, scale_factor=2, mode="bilinear"), F.unfold(small, 3),
        F.pad(small, (1, 1, 1, 1), mode="reflect"), F.scaled_dot_product_attention(small, small, small),
        F.normalize(small), F.pixel_unshuffle(small, 2), F.local_response_norm(small, 2), small.cumprod(1),
        F.layer_norm(small, (6,)), small.amax(), small.softmax(0), small.std((0, 2)), small.norm(math.inf),
    ]  # fmt: skip


def in_order(x: Tensor, mask: Tensor) -> list[Tensor]:
    """What asks for torch's order."""
    picked = x[mask]
    count = torch.arange(len(picked), dtype=x.dtype)
    return [
        picked, picked[2], picked[1:7:2], picked.flip(0), picked.cumsum(0), picked * count, picked.chunk(3)[1],
        picked.argmax()[None], picked.diff(), picked[picked > picked.mean()], picked.view(1, -1),
        torch.cat([picked, -picked]),
    ]  # fmt: skip


AT = torch.tensor([3, 2, 9])


def put_at_places(x: Tensor) -> Tensor:
    picked = x[above(x)].clone()
    picked[AT] = picked[AT.flip(0)] + 1
    return picked


# What needs torch's order, of one function each: what a mask picked must not be taken as it lies.
FOLLOWERS: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "sorted": {
        "sort": lambda p: p.sort().values, "numbers": lambda p: p.sort().indices, "topk": lambda p: list(p.topk(5)),
        "argsort": lambda p: p.argsort(descending=True), "median": lambda p: list(p.median(0)),
        "kthvalue": lambda p: list(p.kthvalue(3)), "mode": lambda p: list(p.mode()),
        "quantile": lambda p: p.quantile(0.3),
        "numbers of rows": lambda p: torch.stack([p, p]).sort(1).indices, "max": lambda p: list(p.max(0)),
        "taken by order": lambda p: p.take_along_dim(p.argsort(), 0), "gathered": lambda p: p.gather(0, p.argsort()),
        "lovasz": lambda p: (p.sort(descending=True).values * p[p.argsort()].cumsum(0)).sum(),
    },
    "at places": {
        "gather": lambda p: p.gather(0, AT), "index_select": lambda p: p.index_select(0, AT),
        "take": lambda p: p.take(AT),
        "index": lambda p: p[AT], "of rows": lambda p: p.reshape(-1, 1)[AT], "turned": lambda p: p.expand(2, -1)[:, AT],
        "flattened": lambda p: torch.stack([p, p]).t().flatten()[AT], "scatter": lambda p: p.scatter(0, AT, 0.0),
        "index_add": lambda p: p.index_add(0, AT, p.new_ones(3)), "index_fill": lambda p: p.index_fill(0, AT, 2.0),
        "index_put": lambda p: p.index_put((AT,), p.new_ones(3)), "select": lambda p: p[5],
        "slice": lambda p: p[3:40:2],
        "split": lambda p: p.split(7)[2], "repeat": lambda p: p.repeat(2), "view": lambda p: p[:10].view(2, 5).sum(0),
    },
    "along": {
        "cumsum": lambda p: p.cumsum(0), "cummax": lambda p: list(p.cummax(0)), "cumprod": lambda p: p.cumprod(0),
        "logcumsumexp": lambda p: p.logcumsumexp(0), "diff": lambda p: p.diff(), "flip": lambda p: p.flip(0),
        "roll": lambda p: p.roll(1, 0), "fft": lambda p: torch.fft.fft(p).abs(), "pad": lambda p: F.pad(p, (1, 2)),
        "gradient": lambda p: torch.gradient(p)[0], "trapezoid": lambda p: torch.trapezoid(p), "dot": lambda p: p @ p,
        "tril": lambda p: p.view(1, -1).tril().sum(0), "unfold": lambda p: p.unfold(0, 3, 2),
        "conv1d": lambda p: F.conv1d(p[None, None], p.new_ones(1, 1, 3)), "softmax": lambda p: p.softmax(0),
        "max_pool1d": lambda p: F.max_pool1d(p[None, None], 3),
        "cdist": lambda p: torch.cdist(p[:, None], p[:, None] + 9),
        "interpolate": lambda p: F.interpolate(p[None, None], size=7, mode="linear"),
        "diag": lambda p: torch.diag(p)[3],
    },
    "as statistics": {
        "cov": lambda p: p.cov(), "corrcoef": lambda p: torch.stack([p, p.sin()]).corrcoef(),
        "stft": lambda p: torch.stft(p, 8, return_complex=True).abs(), "pdist": lambda p: F.pdist(p[:6, None] ** 2),
        "vander": lambda p: torch.vander(p[:5].detach(), 3), "interleave": lambda p: p.repeat_interleave(2),
        "by a tensor": lambda p: p.repeat_interleave((p.detach() > 1).long()), "isin": lambda p: torch.isin(p, p[:5]),
        "searchsorted": lambda p: torch.searchsorted(p.sort().values, p),
        "unique slices": lambda p: (p.detach() * 3).long()[:, None].unique(dim=0),
        "fractional": lambda p: F.fractional_max_pool2d(p[:36].view(1, 1, 6, 6), 2, 3),
        "channels": lambda p: F.conv1d(p[None, :, None], p.new_ones(2, p.numel(), 1)),
        "norm": lambda p: F.batch_norm(torch.stack([p, p.sin(), p.cos() * 2]), None, None, training=True),
    },
}  # fmt: skip


def followers(name: str) -> Callable[[Tensor], list[Tensor]]:
    def run(x: Tensor) -> list[Tensor]:
        found = tree_leaves([follow(x[above(x)]) for follow in FOLLOWERS[name].values()])
        return [t if t.is_floating_point() else t * x.sum() for t in found]  # so that numbers are compared as well

    return run


def nested(x: Tensor, y: Tensor) -> list[Tensor]:
    """Masks of what a mask has picked, as robust losses have them."""
    error = (x[above(x)] - y[above(x)]).abs()
    small, rows = error < error.mean(), x.permute(0, 2, 3, 1)[above(x)[:, 0]]
    inliers = error[small]
    vectors = rows[rows[:, 0] > 0.5]
    again = (error * 2).clone()
    again[~small] = 7.0
    again[small] = y[above(x)][small]
    return [
        inliers, inliers.mean(), error[~small].sum(), inliers[inliers > 0.1], F.l1_loss(inliers, y[above(x)][small]),
        vectors, rows[rows > 0.5], vectors[:, 1] * rows[rows[:, 0] > 0.5, 2], again, small.nonzero(),
        again.masked_select(small), again.masked_scatter(small, inliers.flip(0)), torch.where(small, error, 0)[small],
    ]  # fmt: skip


def two_masks(x: Tensor, y: Tensor) -> list[Tensor]:
    """Masks of one count that pick other elements, which torch pairs in its order."""
    mask = above(x)
    other = mask.flip(-1, -2)
    return [x[mask] * y[other], F.l1_loss(x[mask], x[other]), x[mask] - y[above(x)], torch.cat([x[mask], y[other]])]


def written(x: Tensor, y: Tensor, row: Tensor, mask: Tensor) -> list[Tensor]:
    a, b, c, d = (x * n for n in (1, 2, 3, 4))
    a[mask] = 2.5
    b[mask] = y[mask] * 2
    c[mask] = torch.arange(int(mask.sum()), dtype=x.dtype)
    d[:, 1:3, 2:][mask[:, 1:3, 2:]] = row.sum()
    vectors = (x * 5).permute(0, 2, 3, 1)
    vectors[mask[:, 0]] = row
    few = x * 6
    few[1, :, mask[0, 0]] = y[0, :, mask[0, 0]]
    return [a, b, c, d, vectors, few]


def elsewhere(x: Tensor, whole: Tensor) -> list[Tensor]:
    """Masks in other places, whole masks, masks of whole tensors, and one that broadcasts."""
    plane = above(x)[1, 2]
    samples = torch.tensor([True, False])
    return [
        x[:, :, plane], x[0, 1:, plane], x[:, 0, ..., :][above(x)[:, 0], None], x[samples],
        x[..., torch.arange(x.shape[-1]) % 3 == 0], whole.expand(*plane.shape, 3)[plane], torch.masked_select(x, plane),
        x.masked_select(above(x)[:, :1]), x.mT[above(x).mT], x.flatten(2)[above(x).flatten(2)], x[above(x), None],
        x[:, [True, False, True, True]],
    ]  # fmt: skip


def places(x: Tensor) -> list[Tensor]:
    mask = above(x)
    found: list[Tensor] = [
        mask.nonzero(),
        torch.argwhere(mask).sum(0),
        *torch.where(mask),
        *x.detach().nonzero(as_tuple=True),
    ]
    return found


def beside(x: Tensor, y: Tensor, whole: Tensor) -> list[Tensor]:
    """The score of each true pixel's own class, by a target that the same mask has picked, or by a whole one."""
    scores, mask = x.permute(0, 2, 3, 1), y > 0.3
    target = (y.detach()[mask].abs() * 9).long() % 4
    seen = torch.tensor([True, False])
    return [
        scores[mask, target - 4],
        x[seen, :, :, torch.tensor([3])],
        scores[mask, torch.tensor(2), ...],
        whole[(x[0, :, 0, 0] * 0 + 1 > 0).sum() > torch.arange(5), torch.tensor([0, 3, 1, 1])] * x.mean(),
        scores[:, mask[0, :, 1], torch.tensor([-1]), :],
        x[torch.tensor([1]), :, mask[0]],
        scores[mask[:, :, 0], torch.tensor([4]), target[:1]],
        x[torch.tensor([1]), target[1:2], mask[0]],
    ]


def written_beside(x: Tensor, y: Tensor, whole: Tensor) -> list[Tensor]:
    """Targets of detectors: a one in the column of its class for each token that lies on an object."""
    tokens, scores = x.flatten(2).mT, y.permute(0, 2, 3, 1)
    mask, label = tokens.detach().sum(2) > 0.5, tokens.detach().argmax(2)
    target = torch.zeros_like(tokens)
    target[mask, label[mask]] = 1.0
    one = torch.zeros_like(tokens[0])
    every = torch.arange(one.shape[0]) % 3 == 0
    one[every, torch.arange(one.shape[0])[every] % 4] = whole[0, 0]
    learned = scores * 1
    learned[scores[..., 0] > 0, torch.tensor([-1])] = whole[1]
    learned[y[:, 1] > 0.3, label.view(mask.shape[0], *y.shape[-2:])[y[:, 1] > 0.3]] = y[:, 0][y[:, 1] > 0.3] ** 2
    apart = scores * 1
    apart[torch.tensor([True, False]), :, 1:-2, torch.tensor([3])] = x[:1, 2, :, 1:-2]
    last = y * 1
    last[torch.tensor([1]), :, y[0, 0] > 0] = (x[1, :, y[0, 0] > 0] * 3).mT
    rows = scores * 1
    rows[1, y[1, 0] > 0, torch.tensor([2])] = 7.0
    return [target, one, learned, apart, last, rows]


def put_back(x: Tensor) -> Tensor:
    """A masked autoencoder's: tokens put back to their places among learned ones."""
    tokens = x.flatten(2).mT
    mask = tokens[..., 0] > 0
    out = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
    out[mask] = tokens[mask] ** 2
    out[:, 2:7] += tokens[:, 1:6]
    return out


TWO = ((17, 50), (8, 11))
CASES: dict[str, Case] = {
    "tokens put back": Case(put_back, sizes=((7, 11),)),
    "tokens put back, of one sample": Case(lambda x: put_back(x[:1]), sizes=((7, 11),)),
    **{
        f"{name}, {where}": Case(lambda *t, op=op, mask=mask: op(*t, mask(t[0])), split, whole)
        for where, mask in {"anywhere": above, "on one rank": corner, "everywhere": lambda x: above(x, -9)}.items()
        for name, op, split, whole, sizes in (
            ("losses", losses, ((2, 4), (2, 4)), (), TWO),
            ("of channels", lambda x, w, mask: of_channels(x, w, mask[:, 0]), ((2, 4),), ((4,),), TWO),
            ("along channels", lambda x, w, mask: along_channels(x, w, mask[:, 0]), ((2, 4),), ((4,),), TWO),
            ("patches", patches, ((2, 4),), (), ((5, 8),)),
            ("in order", in_order, ((2, 4),), (), TWO),
            ("written", written, ((2, 4), (2, 4)), ((4,),), TWO),
        )
    },
    "masks of what a mask picked": Case(nested, ((2, 4), (2, 4)), sizes=TWO),
    "two masks": Case(two_masks, ((2, 4), (2, 4)), sizes=TWO),
    "elsewhere": Case(elsewhere, whole=((3,),), sizes=TWO),
    "places": Case(places, sizes=TWO),
    "written at places": Case(put_at_places, sizes=TWO),
    **{f"what follows: {name}": Case(followers(name), sizes=((9, 26), (8, 11))) for name in FOLLOWERS},
    "masked_scatter of whole maps": Case(
        lambda x, y: [torch.masked_scatter(y, above(x), y.flip(2)), x[above(x)].sum()], ((2, 4),),
        whole=((2, 4, 7, 11),), sizes=((7, 11),)
    ),
    "masked_scatter": Case(
        lambda x, y: [x.masked_scatter(above(x), y), x.masked_scatter(above(x)[0, 0], y[above(y, -9)]),
                      (x * 1).masked_scatter_(above(x), y.flip(2))], ((2, 4), (2, 4)), sizes=TWO
    ),
    "index tensors beside a mask": Case(beside, ((2, 4), (2,)), whole=((5, 4),), sizes=((8, 11),)),
    "written beside a mask": Case(written_beside, ((2, 4), (2, 4)), whole=((2, 1),), sizes=TWO),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def some(x: Tensor, count: int) -> Tensor:
    """A mask of so many elements, at the end of the tensor."""
    return (torch.arange(x.numel()) >= x.numel() - count).view(x.shape) & above(x, -9)


def spread(x: Tensor, count: int) -> list[Tensor]:
    mask = some(x, count)
    return [(x[mask] - 1).abs().sum(), x[mask].mean(), x[mask], torch.masked_select(x, mask), mask.nonzero(),
            x.masked_fill(mask, 0), torch.stack([mask.any(), mask.all()])]  # fmt: skip


X = noise(1, 2, 13, 11)
CORNERS = Corners()
for number in (0, 1, 2, 3, 4, 5):
    CORNERS.add(f"{number} elements", lambda x, number=number: spread(x, number), [X])
SPOILED = X.clone()
SPOILED[0, 0, 3, 3:6] = torch.tensor([math.nan, math.inf, -math.inf])
CORNERS.add("NaN and infinities are left out", lambda x: F.mse_loss(x[x.isfinite()], x[x.isfinite()] * 2), [SPOILED])
CORNERS.add("NaN and infinities are picked", lambda x: [x[~x.isfinite()], x[x != 0].max(), x[x != 0].mean()], [SPOILED])
CORNERS.add("ties", lambda x: [x[above(x, -1)].max(), x[above(x, -1)].amin()], [X.round()])
CORNERS.add(
    "integers", lambda x: [x[x > 99], x[x > 99].sum(), x[x > 99].float().mean()], [(X * 60 + 128).to(torch.uint8)]
)
CORNERS.add("half", lambda x: [x[above(x)].sum(), x[above(x)].mean()], [X.to(torch.bfloat16)])
CORNERS.add("channels last", lambda x: x[above(x)] * 2, [X.contiguous(memory_format=torch.channels_last)])
CORNERS.add("write numbers", lambda x: [_put(x, x > 0, 2), _put(x, above(x, 9), 7), _put(x, x > 0, -1.0)], [X])


def _put(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    x = x.clone()
    x[mask] = value
    return x


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_corners(height: int, width: int) -> None:
    require_no_faults(__name__, height, width)


def _beside(x: Tensor, mask: Tensor, index: Tensor, value: Any) -> None:
    (x.permute(0, 2, 3, 1) * 1)[mask[:, 0], index] = value


REFUSED_BY_TORCH: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mask of another size": lambda x, mask: x[mask[:, :1]],
    "mask of too many dims": lambda x, mask: x[mask[None]],
    "too few values": lambda x, mask: _put(x, mask, torch.ones(3)),
    "vectors of another length": lambda x, mask: _put(x.permute(0, 2, 3, 1), mask[:, 0], torch.ones(5)),
    "too few elements to scatter": lambda x, mask: x.masked_scatter(mask, torch.ones(3, dtype=x.dtype)),
    "numbers as a mask": lambda x, mask: torch.masked_select(x, mask.int()),
    "another dtype": lambda x, mask: _put(x, mask, x[mask].float()),
    "a number outside beside it": lambda x, mask: _beside(x, mask, torch.tensor([9]), 1.0),
    "too few numbers beside it": lambda x, mask: _beside(x, mask, torch.tensor([0, 1, 2]), 1.0),
    "too few values beside it": lambda x, mask: _beside(x, mask, torch.tensor([1]), torch.ones(5)),
    "a leaf": lambda x, mask: x.requires_grad_().__setitem__(mask, 1.0),
}


def _errors(height: int, width: int) -> list[tuple[str, str, str]]:
    on = mesh(height, width)
    mask = torch.zeros(X.shape, dtype=torch.bool)
    mask[..., 0, :4] = True
    return [
        (name, *raised((partial(op, X.clone(), mask), partial(op, ff.shard(X, on), ff.shard(mask, on)))))
        for name, op in REFUSED_BY_TORCH.items()
    ]


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_what_torch_refuses_is_refused_on_all_ranks(height: int, width: int) -> None:
    for answers in rank_group(height * width).run(_errors, height, width):
        assert [a for a in answers if a[1] != a[2]] == []


def _refusals() -> list[str]:
    on = mesh(1, 2)
    x, mask = ff.shard(X, on), ff.shard(X > 0, on)
    index = torch.tensor([0])
    whole = torch.nn.Parameter(X.clone(), requires_grad=False)
    calls: dict[str, Op] = {
        "beside": lambda: x[index.view(1, 1), :, mask[0, 0]], "whole": lambda: whole.__setitem__(mask, x[mask]),
    }  # fmt: skip
    return raised(calls.values())


def test_what_is_not_exact_is_refused_on_all_ranks() -> None:
    assert rank_group(2).run(_refusals) == [["UnsupportedOp"] * 2] * 2


def _traffic(height: int, width: int) -> tuple[int, int]:
    on = mesh(height, width)
    generator = torch.Generator().manual_seed(2)
    x, y = (ff.shard(torch.rand(1, 1, 256, 512, generator=generator), on) for _ in range(2))
    x = x.detach().requires_grad_()

    def trimmed() -> None:
        error = (x[y > 0.5] - 1).abs()
        error[error < error.mean()].mean().backward()

    def of_vectors() -> None:
        rows = torch.cat([x, y, x * y], 1).permute(0, 2, 3, 1)[y[:, 0] > 0.5]
        best, like = rows.gather(1, rows.argmax(1, keepdim=True)), F.cosine_similarity(rows, rows.cos())
        (torch.linalg.norm(rows, dim=-1) * best[:, 0] * like * rows.sort(1)[0].cumsum(1)[:, 1]).mean().backward()

    vectors = counted(of_vectors)
    one = counted(lambda: F.smooth_l1_loss(x[y > 0.5], y[y > 0.5]).backward())
    other = counted(lambda: scale_invariant(x, y, y > 0.5).backward())
    robust = counted(trimmed)
    gathered = counted(lambda: x[y > 0.5].full())
    return one.total() + other.total() + robust.total() + vectors.total(), gathered.total()


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_a_loss_sends_next_to_nothing(height: int, width: int) -> None:
    """The map has 512 KiB; a rank tells each other how many elements it has, and its sums."""
    for loss, gathered in rank_group(height * width).run(_traffic, height, width):
        assert loss < 1500 * (height * width - 1)
        assert gathered > 20000


def _shared(height: int, width: int) -> list[bool]:
    on = mesh(height, width)
    x, y = ff.shard(X, on), ff.shard(X * 2, on)

    def selection(t: Any) -> Selection:
        found: Selection = t.placements[0].order
        return found

    a, b, c = x[y > 0], y[y > 0], x[y > 0.5]
    again = x[y > 0.5]
    mask = y > 0
    d = x[mask]
    mask.logical_not_()
    e = x[mask]
    kept = selection(a) is selection(b) is selection(d), selection(c) is selection(again)
    return [*kept, selection(c) is selection(a), selection(d) is selection(e), torch.equal(e.full(), X[~(X > 0)])]


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_equal_masks_are_one_selection(height: int, width: int) -> None:
    for answers in rank_group(height * width).run(_shared, height, width):
        assert answers == [True, True, False, False, True]


def selections(parts: list[Tensor]) -> set[int]:
    return {id(p.placements[0].order) for p in parts if isinstance(p, ff.SpatialTensor)}


def labelled(deep: Tensor, labels: Tensor) -> list[Tensor]:
    """A map that a network leaves at other boundaries than the labels', and a loss of what their mask picks of both."""
    pred, mask = F.interpolate(deep, scale_factor=32.0)[:, 1], labels > 0
    parts = [pred[mask], labels[mask], torch.masked_select(pred, mask)]
    assert len(selections(parts)) <= 1
    return [F.mse_loss(parts[0], parts[1]), (parts[2] * parts[1]).mean(), pred[None, :, mask[0]].square().sum()]


def _cut_otherwise(height: int, width: int) -> dict[str, float]:
    tensors = [noise(1, 2, 3, 5), noise(1, 32 * 3, 32 * 5)]
    return differences_from(one_process(labelled, tensors, []), labelled, tensors, [], height, width)


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_what_a_mask_picks_is_cut_as_the_mask(height: int, width: int) -> None:
    for differences in rank_group(height * width).run(_cut_otherwise, height, width):
        assert max(differences.values()) < 1e-12


def _of_another_world(world: int) -> list[str]:
    """In a batch after batch the masks change, and nothing of them is kept."""
    on = mesh(1, world)
    kept = []
    for number in range(20):
        x = ff.shard(noise(1, 1, 9, 30) * (number + 1), on)
        picked = x[x > 0.7]
        assert F.conv1d(picked[:, None, None].expand(-1, 1, 3), torch.ones(1, 1, 2, dtype=x.dtype)).shape[2] == 2
        kept.append(picked.placements[0].order.specs)  # type: ignore[attr-defined]
        del picked
    return [str(len(specs)) for specs in kept]


@pytest.mark.parametrize("world", WORLDS)
def test_a_mask_is_forgotten_with_what_it_picked(world: int) -> None:
    for answers in rank_group(world).run(_of_another_world, world):
        assert set(answers) == {"0"}


def _for_the_collector() -> list[str]:
    """The cases after which a tensor is left that only Python's garbage collector frees."""
    found = []
    for name in (
        "losses, anywhere",
        "in order, anywhere",
        "masks of what a mask picked",
        "index tensors beside a mask",
        "written beside a mask",
    ):
        case, generator = CASES[name], torch.Generator().manual_seed(1)
        split, whole = (
            [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
            for shapes in ([(*lead, *case.sizes[-1]) for lead in case.split], case.whole)
        )
        here = one_process(case.op, split, whole)
        if tensors_for_the_collector(partial(differences_from, here, case.op, split, whole, 1, 2)):
            found.append(name)
    return found


def test_no_tensor_waits_for_the_garbage_collector() -> None:
    """On a device it would take memory for as long as the host has little to do."""
    assert rank_group(2).run(_for_the_collector) == [[], []]


RECIPE = """
import torch
import torch.nn.functional as F
from torch import nn
import fullframe as ff

class Picked(nn.Module):
    def forward(self, x, mask):
        return x.permute(0, 2, 3, 1)[mask]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.picked, self.norm = nn.Conv2d(3, 8, 3, padding=1), Picked(), nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, mask):
        return self.head(self.norm(self.picked(self.stem(x).relu(), mask)))

def loss(model, batch):
    mask = batch["depth"] > 0.2
    return F.l1_loss(model(batch["image"], mask)[:, 0], batch["depth"][mask])

def samples():
    generator = torch.Generator().manual_seed(0)
    return [{"image": torch.randn(3, 20, 26, generator=generator), "depth": torch.rand(20, 26, generator=generator)}
            for _ in range(4)]

def recipe():
    return ff.Recipe(model=Model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.1), data=samples, batch_size=2)
"""


def _verdict(path: str, height: int, width: int) -> tuple[bool, str]:
    verdict = verified_by_a_fork(Path(path), Strategy(height=height, width=width))
    return verdict.exact, verdict.to_json()


def test_verify_looks_into_modules_that_work_on_what_a_mask_picked(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    for exact, verdict in rank_group(4).run(_verdict, str(path), 2, 2):
        assert exact, verdict
