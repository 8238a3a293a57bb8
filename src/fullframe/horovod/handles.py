"""Requests under way: begun here, known to the user by a number, ended by `synchronize`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fullframe.horovod.context import world
from fullframe.horovod.engine import Engine
from fullframe.horovod.process_sets import ProcessSet
from fullframe.horovod.request import Request
from fullframe.horovod.submission import Submission

Handle = int
_Finish = Callable[[Any], Any]

_numbers = itertools.count()
_pending: dict[Handle, tuple[Engine, Submission, _Finish]] = {}


def begin(
    request: Request,
    inputs: Sequence[Tensor],
    process_set: ProcessSet,
    finish: _Finish,
    targets: Sequence[Tensor] | None = None,
    checksum: int = 0,
) -> Handle:
    """Ask for a collective; `finish` makes the result that the user gets of the engine's.

    `checksum`: where it has a name, of what all ranks must have in common by now.
    """
    engine, submission = _submission(request, inputs, process_set, targets, checksum)
    engine.submit(submission)
    handle = next(_numbers)
    _pending[handle] = engine, submission, finish
    return handle


def complete(
    request: Request,
    inputs: Sequence[Tensor],
    process_set: ProcessSet,
    finish: _Finish,
    targets: Sequence[Tensor] | None = None,
) -> Any:
    """`begin` and `synchronize` in one: the fastest way for what is waited for at once."""
    engine, submission = _submission(request, inputs, process_set, targets)
    if not engine.attempt(submission):
        engine.submit(submission, waits=True)
    return finish(engine.wait(submission))


def _submission(
    request: Request,
    inputs: Sequence[Tensor],
    process_set: ProcessSet,
    targets: Sequence[Tensor] | None,
    checksum: int = 0,
) -> tuple[Engine, Submission]:
    made = world()
    engine = made.engine(process_set)
    number = checksum if request.name else made.number(process_set)
    inside = [_numbers_of(tensor) for tensor in inputs]
    outside = inside if targets is inputs else None if targets is None else [_numbers_of(tensor) for tensor in targets]
    return engine, Submission(request, number, inside, outside)


def first(found: Sequence[Tensor]) -> Tensor:
    """How `begin` and `complete` finish what is asked of one tensor."""
    return found[0]


def _numbers_of(tensor: Tensor) -> Tensor:
    """Without its gradient: whoever does the collective knows no autograd."""
    return tensor.detach() if tensor.requires_grad else tensor


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return without waiting."""
    return _known(handle)[1].done


def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Wait for what was begun; its result. HorovodInternalError where it failed, ValueError for an unknown handle."""
    if callable(handle):  # of sparse_allreduce_async
        return handle()
    engine, submission, finish = _known(handle)
    try:
        return finish(engine.wait(submission))
    finally:
        del _pending[handle]


def _known(handle: Handle) -> tuple[Engine, Submission, _Finish]:
    if handle not in _pending:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _pending[handle]
