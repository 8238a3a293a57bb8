"""Fourier transforms of split images: every dim, cropped and padded lengths, both parts of the numbers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fft

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, small
from tests.spatial.corners import F32, ODD, Corners, corners_as_in_torch, merged, noise, spoiled
from tests.spatial.sent import elements_sent

Transform = Callable[..., Tensor]


def seen(transform: Transform, *options: Any, **named: Any) -> Op:
    """The transform, with both parts of its numbers."""

    def op(x: Tensor) -> Tensor:
        result = transform(x, *options, **named)
        return torch.view_as_real(result) if result.is_complex() else result

    return op


def of_complex(transform: Transform, *options: Any, **named: Any) -> Op:
    return lambda x: seen(transform, *options, **named)(torch.complex(x, x.flip(1)))


def spectral(x: Tensor, weight: Tensor) -> Tensor:
    """A layer of a Fourier neural operator: low frequencies are weighted, the others dropped."""
    spectrum = fft.rfft2(x, norm="ortho")
    rows, columns = weight.shape[-2:]
    kept = torch.einsum("bihw,iohw->bohw", spectrum[:, :, :rows, :columns], weight.to(spectrum.dtype))
    pad = (0, spectrum.shape[-1] - columns, 0, spectrum.shape[-2] - rows)
    return fft.irfft2(torch.nn.functional.pad(kept, pad), s=x.shape[-2:], norm="ortho") + x


def seen_parts(found: Tensor) -> Tensor:
    return torch.view_as_real(found)


CASES: dict[str, Case] = {
    "fft of columns": small(seen(fft.fft)),
    "fft of rows": small(seen(fft.fft, dim=2, norm="ortho")),
    "fft of channels": small(seen(fft.fft, dim=1)),
    "fft2": small(seen(fft.fft2)),
    "ifft2": small(of_complex(fft.ifft2)),
    "fftn": small(seen(fft.fftn)),
    "ifftn, cropped and padded": small(of_complex(fft.ifftn, (5, 16))),
    "rfft2": small(seen(fft.rfft2)),
    "irfft2": small(of_complex(fft.irfft2, (7, 11))),
    "rfftn of (1, 3)": small(seen(fft.rfftn, dim=(1, 3), norm="forward")),
    "irfftn of (3, 2)": small(of_complex(fft.irfftn, (11, 8), (3, 2))),
    "hfft2": small(of_complex(fft.hfft2)),
    "ihfft2": small(seen(fft.ihfft2)),
    "hfftn": small(of_complex(fft.hfftn, s=(8, 9))),
    "ihfftn": small(seen(fft.ihfftn, dim=(2, 0, 3))),
    "shifted": small(lambda x: torch.view_as_real(fft.ifftshift(fft.fftshift(fft.fft2(x), (2, 3)) * x))),
    "shift of all": small(fft.fftshift),
    "a spectral layer": Case(spectral, ((2, 3),), ((3, 3, 5, 6),), ((17, 20), (13, 11))),
    "stft": small(lambda x: [
        seen_parts(torch.stft(x.flatten()[:300], 16, return_complex=True)),
        torch.stft(x.flatten(1), 12, 5, 10, x[0, 0, 0, :10].detach().abs(), False, normalized=True,
                   return_complex=False),
        seen_parts(torch.stft(x[0, 0], 6, 2, onesided=False, pad_mode="constant", return_complex=True)),
        seen_parts(torch.stft(torch.complex(x[0, 0], x[0, 1]), 6, 2))]),
}  # fmt: skip
CORNERS = Corners()


def corners() -> None:
    for value in (math.inf, math.nan):
        CORNERS.add(f"{value}", seen(fft.fft), [spoiled(*ODD, value=value)])
    CORNERS.add("an image without channels", seen(fft.fft2), [noise(7, 9)])
    CORNERS.add("few", seen(fft.fft2), [noise(2, 3)])
    CORNERS.add("few channels", seen(fft.rfft2), [noise(1, 1, 3, 4)])
    CORNERS.add("one frequency is left", seen(fft.rfft2, (1, 1)), [noise(*ODD)])
    CORNERS.add("fp32", seen(fft.fft2), [noise(*ODD, dtype=F32)])
    CORNERS.add("integers", seen(fft.fft2), [noise(*ODD).mul(9).long()])
    CORNERS.add("merged", merged(seen(fft.fft)), [noise(1, 3, 2, 6, 8)])


corners()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _sent(_: int) -> int:
    x = ff.shard(noise(1, 4, 12, 16), mesh(1, 2))
    return elements_sent(partial(fft.fft, x))


def test_half_of_a_part_is_sent_each_way() -> None:
    assert rank_group(2).run(_sent, 0) == [2 * 4 * 12 * 16 // 4] * 2


def _too_long(_: int) -> None:
    with pytest.raises(RuntimeError):
        fft.fft(ff.shard(noise(1, 1, 6, 6), mesh(1, 2)), 0)


def test_what_torch_refuses() -> None:
    rank_group(2).run(_too_long, 0)
