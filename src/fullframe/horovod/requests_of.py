"""Requests made of what a user gives, checked as far as one rank can."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fullframe.horovod.process_sets import ProcessSet
from fullframe.horovod.request import ReduceOp, Request

_KEPT = 1024
_known: dict[object, Request] = {}


def request_of(kind: str, tensors: Sequence[Tensor], name: str | None, **details: object) -> Request:
    """A request of these tensors; TypeError or ValueError for what cannot be sent."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{kind} needs a tensor, got {type(tensor).__name__}")
        if getattr(tensor, "spec", None) is not None:
            raise ValueError(f"{kind} of a split tensor: its ranks hold different rows; use .full() or .local")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{kind} needs a dense tensor, got {tensor.layout}; for sparse ones sparse_allreduce_async"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{kind} needs a tensor on the CPU or a CUDA GPU, got {tensor.device}")
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{kind} of a group needs tensors of one device, got {sorted(devices)}")
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    dtypes = tuple(str(tensor.dtype)[6:] for tensor in tensors)  # without "torch."
    device = tensors[0].device.type if tensors else "cpu"
    return Request(kind, name or "", shapes, dtypes, device, **details)  # type: ignore[arg-type]


def allreduce_request(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    terms: str = "",
) -> Request:
    """A request for an allreduce; that of one tensor like another is the very same object, which is found faster."""
    key: tuple[object, ...] | None = None
    if len(tensors) == 1 and type(tensors[0]) is Tensor:
        t = tensors[0]
        key = name, op, prescale, postscale, t.shape, t.dtype, t.device, t.layout, process_set.size(), terms
        found = _known.get(key)
        if found is not None:
            return found
    factors = {"prescale": float(prescale), "postscale": float(postscale)}
    request = request_of("allreduce", tensors, name, op=op, terms=terms, **factors)
    check_allreduce(tensors, op, process_set)
    if key is not None:
        if len(_known) >= _KEPT:
            _known.clear()
        _known[key] = request
    return request


def reduction(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """The reduction meant: `op`, or the old `average`; Average without either. ValueError for both."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
        return ReduceOp.Average if average else ReduceOp.Sum
    return ReduceOp.Average if op is None else ReduceOp(op)


def check_allreduce(tensors: Sequence[Tensor], op: ReduceOp, process_set: ProcessSet) -> None:
    """Raise for reductions that are not there: NotImplementedError, or ValueError of a dtype."""
    size = process_set.size() or 1
    if op == ReduceOp.Adasum and size & (size - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    for tensor in tensors:
        if op == ReduceOp.Adasum and not tensor.is_floating_point():
            raise ValueError(f"Adasum needs floating point, got {tensor.dtype}")
        if tensor.dtype == torch.bool and op == ReduceOp.Average:
            raise ValueError("there is no average of bool; use op=hvd.Sum for any, op=hvd.Product for all")
        if tensor.is_complex() and op not in (ReduceOp.Sum, ReduceOp.Average):
            raise ValueError(f"{tensor.dtype} can only be summed and averaged")


def splits_of(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """How many rows go to each rank of an alltoall; ValueError unless they are those of the tensor."""
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor of at least one dim")
    if splits is None:
        if tensor.shape[0] % size:
            raise ValueError(f"alltoall without splits needs a multiple of {size} rows, got {tensor.shape[0]}")
        return (tensor.shape[0] // size,) * size
    if isinstance(splits, Tensor) and (splits.is_floating_point() or splits.dim() != 1):
        raise ValueError(f"splits must be whole numbers, one for each rank, got {splits}")
    values = tuple(int(value) for value in (splits.tolist() if isinstance(splits, Tensor) else splits))
    if len(values) != size or min(values, default=0) < 0:
        raise ValueError(f"splits must be {size} numbers >= 0, one for each rank, got {values}")
    if sum(values) != tensor.shape[0]:
        raise ValueError(f"splits add up to {sum(values)}, the tensor has {tensor.shape[0]} rows")
    return values
