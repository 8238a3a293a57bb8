"""What moves tensors between ranks without adding them: allgather, broadcast, alltoall, barrier and join."""

from collections.abc import Sequence

from torch import Tensor

from fullframe.horovod.context import world
from fullframe.horovod.gradients import Allgather, Alltoall, Broadcast, with_gradient
from fullframe.horovod.handles import Handle, begin, complete, first
from fullframe.horovod.process_sets import ProcessSet, global_process_set
from fullframe.horovod.request import Request
from fullframe.horovod.requests_of import request_of, splits_of
from fullframe.horovod.submission import Submission


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, one after the other: (rows of all, ...). Rows may differ; has a gradient."""
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin an `allgather`."""
    return begin(_gather_request([tensor], name), [tensor], process_set, first)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one."""
    return list(with_gradient(Allgather, _gather_request(tensors, name), process_set, tensors, list))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin a `grouped_allgather`."""
    return begin(_gather_request(tensors, name), tensors, process_set, list)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with the numbers of rank `root_rank` of the job; has a gradient."""
    request = _broadcast_request(tensor, root_rank, name, process_set)
    result = with_gradient(Broadcast, request, process_set, [tensor], first)
    assert isinstance(result, Tensor)
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast` in place."""
    tensors = [tensor]
    complete(_broadcast_request(tensor, root_rank, name, process_set), tensors, process_set, first, targets=tensors)
    return tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin a `broadcast`."""
    return begin(_broadcast_request(tensor, root_rank, name, process_set), [tensor], process_set, first)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin a `broadcast_`."""
    request, tensors = _broadcast_request(tensor, root_rank, name, process_set), [tensor]
    return begin(request, tensors, process_set, lambda _: tensor, targets=tensors)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send `splits[rank]` rows to each rank, in order; the rows received, and with `splits` how many from each rank.

    Without `splits` each rank gets as many. Has a gradient.
    """
    request = _alltoall_request(tensor, splits, name, process_set)
    out, received = with_gradient(Alltoall, request, process_set, [tensor], tuple)
    return out if splits is None else (out, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `alltoall`."""
    request = _alltoall_request(tensor, splits, name, process_set)
    return begin(request, [tensor], process_set, first if splits is None else tuple)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the process set have come here."""
    complete(Request("barrier", ""), [], process_set, lambda _: None)


def join(device: int = -1) -> int:
    """Wait until all ranks have joined; the last one that did.

    Until then zeros stand in for this rank in the others' allreduces, and no rows in their allgathers. `device` is
    there for Horovod's sake: zeros are made on the current GPU.
    """
    made = world()
    engine = made.engine(global_process_set)
    submission = Submission(Request("join", "join"), 0)
    engine.join(submission)
    last = engine.wait(submission)
    assert isinstance(last, int)
    made.restart_numbers()  # the ranks have asked for unequally many
    return last


def _gather_request(tensors: Sequence[Tensor], name: str | None) -> Request:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather needs tensors of at least one dim; a number is tensor.reshape(1)")
    return request_of("allgather", tensors, name)


def _broadcast_request(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Request:
    world()
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank {root_rank} is not one of the ranks {process_set.ranks}")
    return request_of("broadcast", [tensor], name, root=process_set.ranks.index(root_rank))


def _alltoall_request(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Request:
    world()
    return request_of("alltoall", [tensor], name, splits=splits_of(tensor, splits, process_set.size() or 1))
