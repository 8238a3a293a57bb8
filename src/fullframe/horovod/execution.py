"""What is due, done: each collective on this rank's tensors, or on zeros in place of those it lacks, having joined."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullframe.horovod.collectives import Collectives
from fullframe.horovod.exceptions import RequestError
from fullframe.horovod.request import ReduceOp, Request
from fullframe.horovod.submission import Submission
from fullframe.horovod.table import Due


class Job(NamedTuple):
    """A collective that is due, with this rank's part in it; None where this rank has joined."""

    due: Due
    submission: Submission | None

    @property
    def request(self) -> Request:
        """What this rank asked for, or another, where this one has joined."""
        return self.due.request if self.submission is None else self.submission.request


def batches(jobs: Sequence[Job], fusion_bytes: int) -> Iterator[list[Job]]:
    """Neighbours that are reduced in one buffer, of at most `fusion_bytes` where they are more than one."""
    batch: list[Job] = []
    held = 0
    for job in jobs:
        size = _size(job.request)
        if batch and (held + size > fusion_bytes or not _fit(batch[0], job)):
            yield batch
            batch, held = [], 0
        batch.append(job)
        held += size
    if batch:
        yield batch


def execute(batch: Sequence[Job], collectives: Collectives) -> None:
    """Do the collectives of a batch and hand out their results."""
    error = batch[0].due.error
    if error is not None:
        for job in batch:
            if job.submission is not None:
                job.submission.fail(RequestError(error))
        return
    for job in batch:
        if job.submission is not None:
            job.submission.begin()
    if batch[0].request.kind == "allreduce":
        _allreduce(batch, collectives)
        return
    for job in batch:
        result = _DO[job.request.kind](job, collectives)
        if job.submission is not None:
            job.submission.finish(result)


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; whole numbers are cut off towards zero."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def writing(target: Tensor) -> AbstractContextManager[object]:
    """Within which a caller's tensor may be written by any thread: one of inference mode in that mode alone."""
    return torch.inference_mode() if target.is_inference() else nullcontext()


def rows_of(size: int, ranks: int) -> list[int]:
    """How many of `size` rows each rank gets of a reducescatter: the first ones get one more."""
    return [size // ranks + (rank < size % ranks) for rank in range(ranks)]


def _size(request: Request) -> int:
    sizes = (torch.Size(s).numel() * _dtype(d).itemsize for s, d in zip(request.shapes, request.dtypes, strict=True))
    return sum(sizes)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _fit(first: Job, job: Job) -> bool:
    """Whether two jobs may be reduced in one buffer; what all ranks answer alike."""
    a, b = first.due.request, job.due.request
    if first.due.error or job.due.error or a.kind != "allreduce" or b.kind != "allreduce":
        return False
    same = (a.device, a.op, a.prescale, a.postscale) == (b.device, b.op, b.prescale, b.postscale)
    return same and len({*a.dtypes, *b.dtypes}) == 1


def _inputs(job: Job) -> Sequence[Tensor]:
    if job.submission is not None:
        return job.submission.inputs
    request = job.request
    device = torch.device("cuda", torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")
    shapes = zip(request.shapes, request.dtypes, strict=True)
    return [torch.zeros(shape, dtype=_dtype(dtype), device=device) for shape, dtype in shapes]


def _allreduce(batch: Sequence[Job], collectives: Collectives) -> None:
    inputs = [tensor for job in batch for tensor in _inputs(job)]
    outputs = [tensor for job in batch for tensor in _outputs(job)]
    request = batch[0].request
    if len(inputs) == 1 and outputs[0].is_contiguous():
        with writing(outputs[0]):
            if outputs[0] is not inputs[0]:
                outputs[0].copy_(inputs[0])
            _reduce([outputs[0]], outputs[0], request, collectives)
            finish_reduction(outputs[0], outputs[0], request, collectives.size)
    else:
        for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):  # a group may mix them
            chosen = [i for i, tensor in enumerate(inputs) if tensor.dtype == dtype]
            counts = [inputs[i].numel() for i in chosen]
            flat = collectives.buffer(sum(counts), dtype, inputs[chosen[0]].device)
            pieces = flat.split(counts)
            torch.cat([inputs[i].reshape(-1) for i in chosen], out=flat)
            _reduce(pieces, flat, request, collectives)
            for i, piece in zip(chosen, pieces, strict=True):
                with writing(outputs[i]):
                    finish_reduction(outputs[i], piece.view(inputs[i].shape), request, collectives.size)
    remaining = iter(outputs)
    for job in batch:
        done = [next(remaining) for _ in job.request.shapes]
        if job.submission is not None:
            job.submission.finish(done)


def _outputs(job: Job) -> Sequence[Tensor]:
    if job.submission is None:
        return _inputs(job)
    if job.submission.targets is not None:
        return job.submission.targets
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in job.submission.inputs]


def _reduce(pieces: Sequence[Tensor], flat: Tensor, request: Request, collectives: Collectives) -> None:
    """All but what `finish_reduction` does."""
    scale(flat, request.prescale)
    if request.op == ReduceOp.Adasum:
        for piece in pieces:
            collectives.adasum(piece)
    else:
        collectives.allreduce(flat, request.op)


def finish_reduction(target: Tensor, whole: Tensor, request: Request, size: int) -> None:
    """Write what was reduced into its target, which may be itself, as an average divided on the way, and scaled.

    Whole numbers are cut off towards zero.
    """
    if request.op == ReduceOp.Average and size > 1:
        has_fractions = whole.is_floating_point() or whole.is_complex()
        torch.div(whole, size, rounding_mode=None if has_fractions else "trunc", out=target)
    elif target is not whole:
        target.copy_(whole)
    scale(target, request.postscale)


def _allgather(job: Job, collectives: Collectives) -> list[Tensor]:
    found = []
    for index, tensor in enumerate(_inputs(job)):
        rows = [0 if request is None else request.shapes[index][0] for request in job.due.requests]
        mine = tensor if job.submission is not None else tensor[:0]
        found.append(collectives.allgather(mine, rows))
    return found


def _broadcast(job: Job, collectives: Collectives) -> list[Tensor]:
    assert job.submission is not None
    submission, outputs = job.submission, []
    root = job.request.root
    targets = submission.targets or [torch.empty_like(t) for t in submission.inputs]
    for tensor, target in zip(submission.inputs, targets, strict=True):
        whole = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        with writing(target):
            if collectives.rank == root and whole is not tensor:
                whole.copy_(tensor)
            collectives.broadcast(whole, root)
            if whole is not target:
                target.copy_(whole)
        outputs.append(target)
    return outputs


def _alltoall(job: Job, collectives: Collectives) -> tuple[Tensor, Tensor]:
    (tensor,) = _inputs(job)
    send = [request.splits for request in job.due.requests if request is not None]
    receive = [splits[collectives.rank] for splits in send]
    out = collectives.alltoall(tensor, send[collectives.rank], receive)
    return out, torch.tensor(receive, dtype=torch.int32, device="cpu")


def _reducescatter(job: Job, collectives: Collectives) -> list[Tensor]:
    request, found = job.request, []
    for tensor in _inputs(job):
        if request.prescale != 1.0:
            tensor = tensor.clone()
            scale(tensor, request.prescale)
        out = collectives.reducescatter(tensor, rows_of(tensor.shape[0], collectives.size))
        finish_reduction(out, out, request, collectives.size)
        found.append(out)
    return found


def _barrier(job: Job, collectives: Collectives) -> None:
    """Nothing: that all ranks asked for it is the barrier."""


_DO: dict[str, Callable[[Job, Collectives], Any]] = {
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}
