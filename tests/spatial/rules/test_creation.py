"""Tensors of a given size that a program fills with split values: cost volumes, accumulators, first states."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, small

SHIFTS = 4


def concatenated(left: Tensor, right: Tensor) -> Tensor:
    """PSMNet's cost volume: both maps, one of them shifted, for each disparity."""
    n, c, h, w = left.shape
    volume = left.new_zeros([n, 2 * c, SHIFTS, h, w])
    for shift in range(SHIFTS):
        if shift:
            volume[:, :c, shift, :, shift:] = left[:, :, :, shift:]
            volume[:, c:, shift, :, shift:] = right[:, :, :, :-shift]
        else:
            volume[:, :c, 0], volume[:, c:, 0] = left, right
    return volume.contiguous()


def correlated(left: Tensor, right: Tensor) -> Tensor:
    """GwcNet's: the mean of products, group by group."""
    n, c, h, w = left.shape
    volume = torch.Tensor.new_full(left, size=(n, 2, SHIFTS, h, w), fill_value=-1.0)
    for shift in range(SHIFTS):
        products = left[..., shift:] * right[..., : w - shift]
        volume[:, :, shift, :, shift:] = products.view(n, 2, c // 2, h, w - shift).mean(2)
    return volume


def by_windows(x: Tensor) -> Tensor:
    """Inference by windows that overlap: a sum, and how often each pixel was in it."""
    *_, h, w = x.shape
    summed, count = x.new_zeros(x.shape), x.new_zeros(1, 1, h, w)
    for top in (0, h // 2 - 1):
        for left in (0, w // 3, w // 2):
            window = slice(top, top + h // 2 + 1), slice(left, left + w // 2 + 1)
            summed[..., window[0], window[1]] += x[..., window[0], window[1]].sin()
            count[..., window[0], window[1]] += 1
    return summed / count.clamp(min=1)


def recurrent(x: Tensor, weight: Tensor) -> Tensor:
    state = x.new_empty((x.shape[0], 3, *x.shape[2:])).fill_(0.5)
    for _ in range(2):
        state = torch.tanh(F.conv2d(torch.cat([state, x], 1), weight, padding=1))
    return state


def over_frames(x: Tensor, weight: Tensor) -> Tensor:
    """A video network's state, which is asked of all frames (N, T, C, H, W)."""
    n, t, _, h, w = x.shape
    state, seen = x.new_zeros(n, 3, h, w), x.new_ones(1, 1, h, w)
    for frame in range(t):
        state = torch.tanh(F.conv2d(torch.cat([x[:, frame], state], 1), weight, padding=1)) * seen
        seen = seen.roll(1, -1) * 0.5
    return state


def of_tokens(x: Tensor) -> Tensor:
    tokens = x.flatten(2).mT  # (N, H * W, C)
    ones = tokens.new_ones(3, *tokens.shape)
    ones[1:] = tokens
    return ones * x.new_ones((), dtype=torch.float64) + x.new_zeros(x.shape[1])


def spectral(x: Tensor, weight: Tensor) -> Tensor:
    """A layer of a Fourier neural operator: few frequencies are kept, in a tensor of another shape."""
    n, _, h, w = x.shape
    found = torch.fft.rfft2(x)
    kept = torch.zeros(n, 3, h, w // 2 + 1, dtype=found.dtype, device=x.device)
    for rows in (slice(3), slice(-3, None)):
        kept[:, :, rows, :4] = torch.einsum("bixy,ioxy->boxy", found[:, :, rows, :4], weight.to(kept.dtype))
    return torch.fft.irfft2(kept, s=(h, w))


def by_wavelets(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    out = torch.zeros(n, c, 2 * h, 2 * w, dtype=x.dtype, device=x.device)
    for number in range(4):
        out[:, :, number // 2 :: 2, number % 2 :: 2] = x * number + 1
    return out


def added_to_views(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    out = torch.full((n, c + 5, h, w), 0.5, dtype=x.dtype, device=x.device)
    out[:, 1 : c + 1] += x
    out[1] -= out[0] * 0.5
    wider = torch.ones(n, c, h, 2 * w + 3, dtype=x.dtype, device=x.device)
    wider[..., 1:-2:2] *= x
    return out * wider.sum()


def beside_a_token(x: Tensor, token: Tensor) -> Tensor:
    """A vision transformer's tokens behind its own: what has been written already has a gradient, and is not split."""
    n, c, h, w = x.shape
    out = torch.zeros(n, h * w + 1, c, dtype=x.dtype, device=x.device)
    out[:, 0] = token * 2
    first = out * 3
    out[:, 1:] = x.flatten(2).mT
    return out.exp() + first


def at_places(x: Tensor) -> Tensor:
    points = x.flatten(2)[0]
    out = torch.zeros(len(points), 2 * points.shape[1], dtype=x.dtype, device=x.device)
    out[:, 2 * torch.arange(points.shape[1], device=x.device).flip(0)] = points
    sums = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums.copy_(x).scatter_add_(1, (x.detach() > 0).long(), x * x)
    return out.view(len(points), -1, 2).sum(2) @ sums.flatten(2).mT


def by_the_old_constructor(x: Tensor) -> list[Tensor]:
    made = [x.new(*x.shape).fill_(2), x.new(3).long().zero_()]
    return [x * made[0], x.sum() + made[1]]


CASES: dict[str, Case] = {
    "concatenated cost volume": Case(concatenated, ((2, 3), (2, 3))),
    "correlated cost volume": Case(correlated, ((2, 4), (2, 4))),
    "windows": Case(by_windows),
    "recurrent": Case(recurrent, whole=((3, 7, 3, 3),)),
    "over frames": Case(lambda x, weight: over_frames(x.unflatten(0, (2, 2)), weight), ((4, 4),), ((3, 7, 3, 3),)),
    "tokens": Case(of_tokens),
    "a spectral layer": Case(spectral, whole=((4, 3, 3, 4),)),
    "wavelets": small(by_wavelets),
    "added to views": Case(added_to_views),
    "at places": small(at_places),
    "by the old constructor": Case(by_the_old_constructor),
    "tokens behind one": Case(beside_a_token, whole=((4,),), sizes=((7, 11),)),
}

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _of_a_size() -> bool:
    x = ff.shard(torch.zeros(2, 3, 6, 8), mesh(1, 2))
    made = x.new(x.size())
    assert x.new([1.0, 2.0]).tolist() == [1.0, 2.0]
    return isinstance(made, ff.SpatialTensor) and made.spec.placements == x.spec.placements and made.shape == x.shape


def test_the_old_constructor_takes_a_size_or_data() -> None:
    assert all(rank_group(2).run(_of_a_size))


def _how_they_lie() -> list[Any]:
    x = ff.shard(torch.zeros(2, 3, 6, 8), mesh(1, 2))
    scores = x.flatten(2)  # (2, 3, 48)
    found = [
        x.new_zeros(5, 4, 6, 8, dtype=torch.int32, device=x.device, requires_grad=False),
        x.mT.new_ones((1, 8, 6)),  # fewer dims
        x.new_full((7, 1, 6, 8), torch.nan),
        x.movedim(1, -1).new_empty(1, 6, 8, 9),
        x.movedim(1, -1).new_empty(1, 6, 8, 3),
        scores.new_zeros(1, 4, 3, 48),
        x.new_zeros(size=(2, 3, 6, 7)),
        x.new_zeros(2, 3, 6, 8, device="meta"),
        x.new_zeros(x.shape[1:]),
        x[0, 0].new_ones(6, 8),
        x.unsqueeze(1).new_zeros(2, 5, 6, 8),  # a state of frames (N, T, C, H, W)
        x.unsqueeze(1).new_zeros(3, 6, 8),
        x.new_tensor([1.0]),
        x[x == 0].new_zeros(288),
    ]
    assert found[0].dtype is torch.int32 and found[2].full().isnan().all()
    return [(tuple(t.shape), tuple(t.local.shape) if isinstance(t, ff.SpatialTensor) else None) for t in found]


def test_what_is_as_wide_is_split() -> None:
    expected = [
        ((5, 4, 6, 8), (5, 4, 6, 4)),
        ((1, 8, 6), None),
        ((7, 1, 6, 8), (7, 1, 6, 4)),
        ((1, 6, 8, 9), None),
        ((1, 6, 8, 3), (1, 6, 4, 3)),
        ((1, 4, 3, 48), (1, 4, 3, 24)),
        ((2, 3, 6, 7), None),
        ((2, 3, 6, 8), None),
        ((3, 6, 8), None),
        ((6, 8), None),
        ((2, 5, 6, 8), (2, 5, 6, 4)),
        ((3, 6, 8), None),
        ((1,), None),
        ((288,), None),
    ]
    assert rank_group(2).run(_how_they_lie) == [expected, expected]
