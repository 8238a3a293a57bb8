"""What `F.interpolate` does along one dim: which input rows an output row is made of, read off torch's own results."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fullframe.ranks.exchange import joined
from fullframe.ranks.memory_format import memory_format_of

_LINEAR = {"bilinear": "linear", "trilinear": "linear"}
_FEW = 8
_IDENTITY_ROWS = 256
_AROUND = 5  # rows of a two-dimensional probe: torch's cubic kernels read two rows on either side


@dataclass(frozen=True, eq=False)
class Taps:
    """Output row `o` is the sum over `k` of `weights[o, k]` times input row `rows[o, k]`.

    Read are the very rows that torch reads, some twice or with weight zero: an infinity gives what it gives there.
    """

    rows: Tensor  # (size_out, taps) int64
    weights: Tensor  # (size_out, taps)
    size: int  # input rows

    @property
    def size_out(self) -> int:
        """Output rows."""
        return len(self.rows)

    @cached_property
    @_disable_current_modes()  # a simulation needs the numbers too
    def copies(self) -> bool:
        """Whether each output row is a copy of an input row."""
        return self.rows.shape[1] == 1 and bool((self.weights == 1).all())

    @cached_property
    @_disable_current_modes()
    def copies_all(self) -> bool:
        """Whether the output is the input."""
        return self.copies and torch.equal(self.rows[:, 0], torch.arange(self.size, device="cpu"))

    @_disable_current_modes()
    def reads(self, out: range) -> range:
        """Input rows needed for output rows `out`."""
        rows = self.rows[out.start : out.stop]
        return range(int(rows.min()), int(rows.max()) + 1)

    def share(self, local: Tensor, dim: int, own: range) -> Tensor:
        """What the input rows `own` add to each output row; for few output rows."""
        local = local.to(weights_dtype(local))
        parts = []
        for rows, weights in _within(self, own, local.dtype, local.device):
            column = weights.view(-1, *(1,) * (local.dim() - dim - 1))
            parts.append((local.index_select(dim, rows) * column).sum(dim, keepdim=True))
        return joined(parts, dim)


# What is sent to a device is kept there: each time it were sent the host would wait for the device.


@lru_cache(maxsize=1024)
@_disable_current_modes()
@torch.inference_mode(False)
def _within(taps: Taps, own: range, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """By output row those of its rows that lie in `own`, counted from its start, and their weights."""
    inside = (taps.rows >= own.start) & (taps.rows < own.stop)
    found = [(r[m] - own.start, w[m]) for r, w, m in zip(taps.rows, taps.weights, inside, strict=True)]
    return [(rows.to(device), weights.to(device, dtype)) for rows, weights in found]


@lru_cache(maxsize=1024)
@_disable_current_modes()
@torch.inference_mode(False)
def _of_rows(taps: Taps, out: range, start: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows, counted from `start`, and weights of the output rows `out`."""
    rows = taps.rows[out.start : out.stop] - start
    return rows.to(device), taps.weights[out.start : out.stop].to(device, dtype)


def weighted(local: Tensor, dim: int, taps: Taps, out: range, start: int) -> Tensor:
    """Output rows `out` of a tensor that holds the input from row `start` on; in float32 or wider unless copied."""
    if dim > 1 and memory_format_of(local) != torch.contiguous_format:  # which a gather of rows would lose
        return weighted(local.movedim(1, -1), dim - 1, taps, out, start).movedim(-1, 1)
    rows, weights = _of_rows(taps, out, start, weights_dtype(local), local.device)
    if taps.copies:
        return local.index_select(dim, rows[:, 0])
    return _Weighted.apply(local, dim, rows, weights)  # type: ignore[no-any-return, no-untyped-call]


def weights_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which rows of `x` are weighted and added up."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Weighted(torch.autograd.Function):
    """A sum of weighted row gathers that keeps nothing but its tables, and adds up in place."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.where = dim, rows, weights, local.shape, local.dtype
        behind = (1,) * (local.dim() - dim - 1)
        if rows.shape[1] > _FEW:  # windows of many rows: one gather of about the input's size
            chosen = local.index_select(dim, rows.flatten()).to(weights.dtype).unflatten(dim, rows.shape)
            summed: Tensor = chosen.mul_(weights.view(*weights.shape, *behind)).sum(dim + 1)
            return summed
        result: Tensor | None = None
        for tap in range(rows.shape[1]):
            chosen = local.index_select(dim, rows[:, tap]).to(weights.dtype)
            column = weights[:, tap].view(-1, *behind)
            result = chosen.mul_(column) if result is None else result.addcmul_(chosen, column)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        dim, rows, weights, shape, dtype = ctx.where
        behind = (1,) * (len(shape) - dim - 1)
        result = torch.zeros(shape, dtype=weights.dtype, device=gradient.device)
        for tap in range(rows.shape[1]):
            result.index_add_(dim, rows[:, tap], gradient * weights[:, tap].view(-1, *behind))
        return result.to(dtype), None, None, None


@lru_cache(maxsize=256)
@_disable_current_modes()
@torch.inference_mode(False)  # what is kept from an evaluation serves in training too
def nearest_rows(size: int, size_out: int, mode: str, scale: float | None, kind: torch.dtype, dims: int = 1) -> Tensor:
    """(size_out,) input rows that the nearest modes copy, for numbers of the type `kind` in images of `dims` dims.

    Torch rounds otherwise in planes than in lines and volumes: of 26 rows made 22, row 11 is a copy of row 12 or of 13.
    """
    options: dict[str, Any] = {"size": (1, size_out)} if scale is None else {"scale_factor": (1.0, scale)}
    row = torch.arange(size, dtype=kind, device="cpu").view(1, 1, 1, size)
    if dims != 2:
        row, options = row[0], {name: value[1] for name, value in options.items()}
    with torch.no_grad():
        return F.interpolate(row, mode=mode, **options).flatten().long()


@lru_cache(maxsize=256)
@_disable_current_modes()
def repeats(size: int, size_out: int, mode: str, scale: float | None, kind: torch.dtype, dims: int = 1) -> bool:
    """Whether a nearest mode repeats each row equally often; by some factors (41) rounding has it otherwise."""
    rows = nearest_rows(size, size_out, mode, scale, kind, dims)
    return torch.equal(rows, torch.arange(size_out, device="cpu") // (size_out // size))


@lru_cache(maxsize=256)
@_disable_current_modes()
@torch.inference_mode(False)
@torch.no_grad()
def taps_of(size: int, size_out: int, mode: str, align_corners: bool | None, scale: float | None, antialias: bool,
            kind: torch.dtype, dims: int = 1) -> Taps:  # fmt: skip
    """The taps of `F.interpolate` of `dims` dims along one of `size` rows; `kind` is float32 or float64."""
    if mode.startswith("nearest"):
        rows = nearest_rows(size, size_out, mode, scale, kind, dims)[:, None]
        return Taps(rows, torch.ones(rows.shape, dtype=kind, device="cpu"), size)
    options: dict[str, Any] = {"align_corners": align_corners, "antialias": antialias, "mode": mode}
    plane = antialias or mode == "bicubic"
    if not plane:
        options["mode"] = _LINEAR.get(mode, mode)
    sizes = (_AROUND, size_out) if plane else (size_out,)
    options |= {"size": sizes} if scale is None else {"scale_factor": (1.0, scale) if plane else (scale,)}
    found = []
    for start in range(0, size, _IDENTITY_ROWS):
        height = min(_IDENTITY_ROWS, size - start)
        block = torch.zeros(height, 1, _AROUND if plane else 1, size, dtype=kind, device="cpu")
        middle = block[:, :, block.shape[2] // 2]  # views of the rows that hold the probe
        diagonal = middle.diagonal(start, 0, 2)
        answers = []
        for value in (1.0, torch.inf):
            diagonal.fill_(value)
            answer = F.interpolate(block if plane else middle, **options)
            answers.append(answer[:, 0, _AROUND // 2] if plane else answer[:, 0])  # (height, size_out)
        weight, spoiled = answers
        place, out = ((spoiled != 0) | (weight != 0)).nonzero(as_tuple=True)  # NaN is not zero either
        found.append((out, place + start, weight[place, out], spoiled[place, out].isnan()))
    out, row, weight, spoils = (torch.cat(column) for column in zip(*found, strict=True))
    return Taps(*_table(size_out, out, row, weight, spoils & (weight != 0)), size)


def _table(size_out: int, out: Tensor, row: Tensor, weight: Tensor, spoils: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, weights) of what was found: output row `out` reads input row `row`.

    Where infinity times the weight is NaN in torch, which adds up several weights there, the row is read once more by
    weight zero. Output rows that read fewer rows than others read their first one in several equal shares.
    """
    out, row = torch.cat([out, out[spoils]]), torch.cat([row, row[spoils]])
    weight = torch.cat([weight, weight.new_zeros(int(spoils.sum()))])
    order = out.argsort(stable=True)
    out, row, weight = out[order], row[order], weight[order]
    counts = out.bincount(minlength=size_out)
    first = counts.cumsum(0) - counts
    taps = int(counts.max())
    column = torch.arange(len(out), device="cpu") - first[out]
    rows = row[first][:, None].repeat(1, taps)
    weights = (weight[first] / (taps - counts + 1))[:, None].repeat(1, taps)
    rows[out, column] = row
    others = column > 0
    weights[out[others], column[others]] = weight[others]
    return rows, weights
