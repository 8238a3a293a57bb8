"""What makes one tensor of those of all ranks: allreduce and reducescatter, in every form that Horovod has.

`op` is Average unless given; `average=` is its old form. Factors scale before and after the reduction. Names are
optional and must be the same on all ranks; ranks may ask for named tensors in different orders.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullframe.horovod.compression import Compression, Compressor
from fullframe.horovod.gradients import Allreduce, Reducescatter, with_gradient
from fullframe.horovod.handles import Handle, begin, complete, first, synchronize
from fullframe.horovod.process_sets import ProcessSet, global_process_set
from fullframe.horovod.request import ReduceOp, Request
from fullframe.horovod.requests_of import allreduce_request, reduction, request_of


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of every rank's `tensor`, a new one of its shape and dtype; has a gradient."""
    op = reduction(op, average)  # here, so that its warning is of the caller's line
    options = None, name, compression, op, prescale_factor, postscale_factor, process_set
    return grouped_allreduce([tensor], *options)[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place."""
    op = reduction(op, average)
    return grouped_allreduce_([tensor], None, name, op, prescale_factor, postscale_factor, process_set)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce`; `synchronize` of the handle gives the result. Leave the tensor alone until then."""
    request = allreduce_request([tensor], name, reduction(op, average), prescale_factor, postscale_factor, process_set)
    return begin(request, [tensor], process_set, first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce_`."""
    request = allreduce_request([tensor], name, reduction(op, average), prescale_factor, postscale_factor, process_set)
    tensors = [tensor]
    return begin(request, tensors, process_set, lambda _: tensor, targets=tensors)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as one: done once all ranks have asked for all of them."""
    small = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in small]
    request = allreduce_request(sent, name, reduction(op, average), prescale_factor, postscale_factor, process_set)
    wholes = with_gradient(Allreduce, request, process_set, sent, list)
    return [compression.decompress(whole, ctx) for whole, (_, ctx) in zip(wholes, small, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place."""
    request = allreduce_request(tensors, name, reduction(op, average), prescale_factor, postscale_factor, process_set)
    complete(request, tensors, process_set, list, targets=tensors)
    return list(tensors)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce`."""
    request = allreduce_request(tensors, name, reduction(op, average), prescale_factor, postscale_factor, process_set)
    return begin(request, tensors, process_set, list)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce_`."""
    request = allreduce_request(tensors, name, reduction(op, average), prescale_factor, postscale_factor, process_set)
    return begin(request, tensors, process_set, lambda _: list(tensors), targets=tensors)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin the Sum or Average of sparse COO tensors, by gathering what they hold; call the result to wait for it."""
    if op not in (ReduceOp.Sum, ReduceOp.Average):
        raise NotImplementedError(f"a sparse allreduce can be Sum or Average, not {ReduceOp(op).name}")
    entries = tensor.coalesce() if tensor.is_sparse else tensor.to_sparse()

    def gathered(what: str, part: Tensor) -> Handle:
        request = request_of("allgather", [part], f"{name}.{what}", terms=f"op={ReduceOp(op).name}")
        return begin(request, [part], process_set, first)

    indices = gathered("indices", entries.indices().t().contiguous())
    values = gathered("values", entries.values())

    def result() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == ReduceOp.Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return result


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction; the first ranks get one row more where they do not divide. Has a gradient."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`."""
    request = _scatter_request([tensor], name, op, prescale_factor, postscale_factor)
    return begin(request, [tensor], process_set, first)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one."""
    small = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in small]
    request = _scatter_request(sent, name, op, prescale_factor, postscale_factor)
    owns = with_gradient(Reducescatter, request, process_set, sent, list)
    return [compression.decompress(own, ctx) for own, (_, ctx) in zip(owns, small, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`."""
    request = _scatter_request(tensors, name, op, prescale_factor, postscale_factor)
    return begin(request, tensors, process_set, list)


def _scatter_request(
    tensors: Sequence[Tensor], name: str | None, op: int, prescale: float, postscale: float
) -> Request:
    if op not in (ReduceOp.Sum, ReduceOp.Average):
        raise ValueError(f"a reducescatter can be Sum or Average, not {ReduceOp(op).name}")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter needs tensors of at least one dim")
    kind, factors = "reducescatter", {"prescale": float(prescale), "postscale": float(postscale)}
    return request_of(kind, tensors, name, op=ReduceOp(op), **factors)
