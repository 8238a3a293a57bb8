"""Fourier transforms, dim by dim: along a split dim the split moves to another one meanwhile."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.transposing import along
from fullframe.spatial.tensor import SpatialTensor

_fft = torch.fft
_LINES = (_fft.fft, _fft.ifft, _fft.rfft, _fft.irfft, _fft.hfft, _fft.ihfft)


@rule(*_LINES)
def _line(func: Any, input: SpatialTensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
    """The transform along one dim, of `n` elements of it."""
    return along(input, dim, lambda local: func(local, n, dim, norm))


class _Lines(NamedTuple):
    """A transform over several dims: what is done along the last of them, and along the others before or after."""

    last: Any
    others: Any
    last_comes_first: bool = True


_PLANES: dict[Any, _Lines] = {
    **dict.fromkeys((_fft.fft2, _fft.fftn), _Lines(_fft.fft, _fft.fft)),
    **dict.fromkeys((_fft.ifft2, _fft.ifftn), _Lines(_fft.ifft, _fft.ifft)),
    **dict.fromkeys((_fft.rfft2, _fft.rfftn), _Lines(_fft.rfft, _fft.fft)),
    **dict.fromkeys((_fft.ihfft2, _fft.ihfftn), _Lines(_fft.ihfft, _fft.ifft)),
    **dict.fromkeys((_fft.irfft2, _fft.irfftn), _Lines(_fft.irfft, _fft.ifft, False)),
    **dict.fromkeys((_fft.hfft2, _fft.hfftn), _Lines(_fft.hfft, _fft.fft, False)),
}
_TWO_DIMS = (_fft.fft2, _fft.ifft2, _fft.rfft2, _fft.irfft2, _fft.hfft2, _fft.ihfft2)


@rule(*_PLANES)
def _plane(func: Any, input: Tensor, s: Any = None, dim: Any = (), norm: str | None = None) -> Tensor:
    """The transform over two dims or more, one after the other, of `s` elements of each; -1 for all."""
    if dim == ():
        dim = (-2, -1) if func in _TWO_DIMS else None
    sizes = None if s is None else [s] if isinstance(s, int) else list(s)
    dims = [dim] if isinstance(dim, int) else _all_or_last(input, sizes) if dim is None else list(dim)
    counts = [None if n == -1 else n for n in (sizes or [-1] * len(dims))]
    steps = list(zip(dims, counts, strict=True))
    if not steps:
        return input.to(torch.promote_types(input.dtype, torch.complex64))
    lines = _PLANES[func]
    if lines.last_comes_first:
        input = lines.last(input, counts[-1], dims[-1], norm)
    for along_dim, count in steps[:-1]:
        input = lines.others(input, count, along_dim, norm)
    return input if lines.last_comes_first else lines.last(input, counts[-1], dims[-1], norm)


def _all_or_last(x: Tensor, sizes: Sequence[int] | None) -> list[int]:
    count = x.dim() if sizes is None else len(sizes)
    return list(range(x.dim() - count, x.dim()))


@rule(torch.stft, Tensor.stft)
def _stft(
    func: Any, input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, pad_mode: str = "reflect", normalized: bool = False,
    onesided: bool | None = None, return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Tensor:  # fmt: skip
    """(B, T) or (T,) to (B, frequencies, frames): the frames of a split T borrow what lies beyond it."""
    if align_to_window is not None:
        raise Unsupported("it aligns frames to the window")
    if input.dim() == 1:
        options = (n_fft, hop_length, win_length, window, center, pad_mode, normalized, onesided, return_complex)
        return torch.stft(input[None], *options).squeeze(0)
    length = n_fft if win_length is None else win_length
    shape = torch.ones(length, dtype=input.dtype, device=input.device) if window is None else window
    shape = F.pad(shape, ((n_fft - length) // 2, n_fft - length - (n_fft - length) // 2))
    if center:
        input = F.pad(input[None], (n_fft // 2,) * 2, pad_mode)[0]
    frames = input.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length) * shape
    real = not frames.is_complex()
    transform = _fft.rfft if real and onesided is not False else _fft.fft
    found = transform(frames, norm="ortho" if normalized else None).transpose(1, 2)
    return found if return_complex or (return_complex is None and not real) else torch.view_as_real(found)


@rule(_fft.fftshift, _fft.ifftshift)
def _shift(func: Any, input: Tensor, dim: Any = None) -> Tensor:
    """The zero frequency moved to the middle, or back, by a roll."""
    dims = list(range(input.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    shifts = [(input.shape[d] + (func is _fft.ifftshift)) // 2 for d in dims]
    return torch.roll(input, shifts, dims) if dims else input
