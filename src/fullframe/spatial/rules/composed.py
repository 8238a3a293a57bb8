"""Functions that are others in another dress: each is written with the torch functions that it stands for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.spatial.operands import aligned, merged
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_SPLIT_ALONG = {"hsplit": 1, "vsplit": 0, "dsplit": 2}


@rule(torch.hsplit, Tensor.hsplit, torch.vsplit, Tensor.vsplit, torch.dsplit, Tensor.dsplit)
def _split_along(func: Any, x: SpatialTensor, sections: Any) -> Any:
    """`tensor_split` along the dim that the name says."""
    dim = _SPLIT_ALONG[func.__name__] if x.dim() > 1 else 0
    return torch.tensor_split(x, sections, dim)


def _raised(x: Tensor, dims: int) -> Tensor:
    """`x` with at least so many dims, ones put where `torch.atleast_*d` puts them."""
    if x.dim() == 0 and dims:
        x = x.reshape(1)
    if x.dim() == 1 and dims > 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(-1) if x.dim() == 2 and dims > 2 else x


# The second are what torch's own call for a list.
_AT_LEAST = [getattr(home, f"atleast_{n}d") for home in (torch, torch._C._VariableFunctions) for n in (1, 2, 3)]


@rule(*_AT_LEAST)
def _at_least(func: Any, *tensors: Any) -> Any:
    """As many dims as the name says; whole tensors among them stay whole."""
    dims = int(func.__name__[-2])
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return _raised(tensors[0], dims)
    given = tensors[0] if len(tensors) == 1 else tensors
    return tuple(_raised(t, dims) for t in given)


@rule(torch.vstack, torch.row_stack, torch.dstack)
def _vstack(func: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Joined along dim 0, or in depth along dim 2."""
    dims, along = (3, 2) if func is torch.dstack else (2, 0)
    return torch.cat([_raised(t, dims) for t in tensors], along)


@rule(torch.hstack)
def _hstack(func: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Joined along dim 1, vectors along dim 0."""
    raised = [_raised(t, 1) for t in tensors]
    return torch.cat(raised, 0 if raised[0].dim() == 1 else 1)


@rule(torch.column_stack)
def _column_stack(func: Any, tensors: Sequence[Tensor]) -> Tensor:
    """Vectors as the columns of a matrix."""
    return torch.cat([t.reshape(-1, 1) if t.dim() < 2 else t for t in tensors], 1)


@rule(torch._C._nn.pad_sequence)
def _pad_sequence(
    func: Any,
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Sequences (L, ...), each padded to the longest, beside each other."""
    longest = max(t.shape[0] for t in sequences)
    beside = [(0, longest - t.shape[0])[:: 1 if padding_side == "right" else -1] for t in sequences]
    rows = [F.pad(t, (0, 0) * (t.dim() - 1) + n, value=padding_value) for t, n in zip(sequences, beside, strict=True)]
    return torch.stack(rows, 0 if batch_first else 1)


@rule(torch.broadcast_tensors)
def _broadcast_tensors(func: Any, *tensors: Any) -> tuple[Tensor, ...]:
    """All operands expanded to one shape."""
    given = tensors[0] if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else tensors
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in given))
    return tuple(t if t.shape == shape else t.expand(shape) for t in given)  # as torch: one of this shape is itself


@rule(Tensor.sum_to_size)
def _sum_to_size(func: Any, x: SpatialTensor, *size: Any) -> Tensor:
    """Summed over what broadcasting to this shape's tensor would have added."""
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = x.dim() - len(shape)
    dims = [*range(lead), *(d + lead for d, n in enumerate(shape) if n == 1 and x.shape[d + lead] != 1)]
    return x.sum(dims, keepdim=True).reshape(shape) if dims else x


@rule(torch.rot90, Tensor.rot90)
def _rot90(func: Any, x: SpatialTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turned by quarters in the plane of two dims, by flips and transposes."""
    a, b = dims
    turns = k % 4
    if turns == 2:
        return x.flip((a, b))
    if turns == 0:
        return x.clone()
    return x.flip(b if turns == 1 else a).transpose(a, b)


@rule(torch.tril, Tensor.tril, torch.triu, Tensor.triu, Tensor.tril_, Tensor.triu_)
def _triangle(func: Any, x: SpatialTensor, diagonal: int = 0) -> Tensor:
    """Of a part that begins at row r and column c, the diagonal lies r - c further right."""
    spec, local = x.spec, local_of(x)
    result = func(local, diagonal + spec.held(-2).start - spec.held(-1).start)
    return x if result is local else wrap(result, spec)


@rule(torch.cross, Tensor.cross, torch.linalg.cross)
def _cross(func: Any, a: Tensor, b: Tensor, dim: int | None = None) -> Tensor:
    """The cross product along a dim of size 3; of a split one the split moves to another dim."""
    spec = merged([a, b])
    if dim is None:
        dim = -1 if func is torch.linalg.cross else next(d for d, size in enumerate(a.shape) if size == 3)
    if spec.is_split(dim):
        a, b = (moved_from(t, dim) if isinstance(t, SpatialTensor) else t for t in (a, b))
        return torch.linalg.cross(a, b, dim=dim)  # type: ignore[no-any-return]
    return wrap(torch.linalg.cross(aligned(a, spec), aligned(b, spec), dim=dim), spec)


@rule(torch.view_as_real)
def _view_as_real(func: Any, x: SpatialTensor) -> Tensor:
    """Complex (...) as real (..., 2)."""
    spec = x.spec
    return wrap(func(local_of(x)), spec.with_((*spec.shape, 2), spec.placements))


@rule(torch.view_as_complex)
def _view_as_complex(func: Any, x: SpatialTensor) -> Tensor:
    """Real (..., 2) as complex (...); of a split last dim the split moves to another one."""
    if x.spec.is_split(-1):
        return func(moved_from(x, -1))  # type: ignore[no-any-return]
    spec = x.spec
    return wrap(func(local_of(x)), spec.with_(spec.shape[:-1], spec.placements))


_COMPLEX = {"cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32}


@rule(*(getattr(Tensor, name) for name in _COMPLEX))
def _as_complex(func: Any, x: Tensor, *, memory_format: Any = torch.preserve_format) -> Tensor:
    """Real numbers as complex ones."""
    return x.to(_COMPLEX[func.__name__], memory_format=memory_format)


@rule(torch.frexp, Tensor.frexp)
def _frexp(func: Any, x: SpatialTensor) -> Any:
    """Mantissa and exponent of each element."""
    mantissa, exponent = parts = func(local_of(x))
    return type(parts)((wrap(mantissa, x.spec), wrap(exponent, x.spec)))


@rule(F.normalize)
def _normalize(func: Any, x: SpatialTensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    """Divided by the p-norm along dims, split or whole."""
    return x / torch.linalg.vector_norm(x, p, dim, True).clamp_min(eps)  # type: ignore[no-any-return]


@rule(F.pairwise_distance, torch.pairwise_distance)
def _pairwise_distance(
    func: Any, x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The p-norm of differences along the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)  # type: ignore[no-any-return]


@rule(torch.vander, torch.linalg.vander)
def _vander(func: Any, x: SpatialTensor, N: int | None = None, increasing: bool = False) -> Tensor:
    """(..., n) to its powers (..., n, N), falling in `torch.vander` unless `increasing`."""
    count = x.shape[-1] if N is None else N
    powers = torch.ones_like(x)[..., None].expand(*x.shape, min(count, 1))
    if count > 1:  # as torch multiplies them
        powers = torch.cat([powers, x[..., None].expand(*x.shape, count - 1).cumprod(-1)], -1)
    return powers.flip(-1) if func is torch.vander and not increasing else powers


@rule(torch.unravel_index)
def _unravel_index(func: Any, indices: SpatialTensor, shape: Any) -> tuple[Tensor, ...]:
    """Positions in a tensor of `shape` flattened to those along each of its dims."""
    found: list[Tensor] = []
    rest: Tensor = indices.long()
    for size in reversed([shape] if isinstance(shape, int) else list(shape)):
        found.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    return tuple(reversed(found))


_COPIES = """
    detach expand permute select split split_with_sizes squeeze t transpose unbind unsqueeze view view_as_real
    view_as_complex unfold
"""
_UNSAFE: dict[Any, Callable[..., Any]] = {torch.unsafe_chunk: torch.chunk, torch.unsafe_split: torch.split}
_UNSAFE |= {Tensor.unsafe_chunk: torch.chunk, Tensor.unsafe_split: torch.split}


def _copied() -> dict[Any, Callable[..., Any]]:
    """The functions `..._copy` of torch, and the functions whose results they copy."""
    pairs = ((getattr(torch, f"{name}_copy", None), name) for name in _COPIES.split())
    return {copy: getattr(torch, name, None) or getattr(Tensor, name) for copy, name in pairs if copy}


_BASES = _copied()


@rule(*_BASES)
def _copy(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the function of the name without `_copy` gives, copied."""
    return tree_map_only(Tensor, torch.clone, _BASES[func](*args, **kwargs))


@rule(torch.slice_copy)
def _slice_copy(func: Any, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """A slice, copied."""
    return x[_rows_of(x, dim, slice(start, end, step))].clone()


@rule(torch.slice_scatter, Tensor.slice_scatter)
def _slice_scatter(
    func: Any, x: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    """`x` with other rows; refuses split rows for a whole tensor."""
    result = x.clone()
    result[_rows_of(x, dim, slice(start, end, step))] = src
    return result


@rule(torch.select_scatter, Tensor.select_scatter)
def _select_scatter(func: Any, x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """`x` with another row; refuses a split row for a whole tensor."""
    result = x.clone()
    result[_rows_of(x, dim, index)] = src
    return result


def _rows_of(x: Tensor, dim: int, rows: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * (dim % x.dim()), rows)


@rule(torch.constant_pad_nd)
def _constant_pad(func: Any, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Padded with one value."""
    if isinstance(value, complex) and value.imag:
        raise Unsupported("it pads with a complex number")
    return F.pad(x, list(pad), "constant", value.real)


@rule(*_UNSAFE)
def _unsafe_chunk(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the function of the name without `unsafe_` gives."""
    return _UNSAFE[func](*args, **kwargs)
