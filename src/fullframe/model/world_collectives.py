"""A user's own collectives over all ranks of the job, where the ranks of a replica hold the same whole values.

A sum over the job counts such a value once a rank, and a gathered list has it as often: contrastive losses, codebooks
and counts would be wrong without a word. A mean is right.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

_SUMS = ("all_reduce", "reduce")
_LISTS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object")
# What is the same of a value and of copies of it.
_BLIND_TO_COPIES = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
# Stand between a user's line and the collective, in those forms that have a gradient.
_BETWEEN = ("torch.distributed.nn.functional", "torch.autograd.function", "fullframe.spatial.function_guard")
_METRICS = ("torchmetrics", "lightning_utilities", "contextlib")  # likewise, in torchmetrics

_said: set[tuple[CodeType, int]] = set()
_ranks_of_a_replica = 1


def watch_collectives(mesh: DeviceMesh) -> None:
    """Warn from now on, once of each of the user's lines, where it sums or gathers over ranks that share samples."""
    global _ranks_of_a_replica
    _ranks_of_a_replica = mesh.size() // mesh.size(0)
    for name in _SUMS + _LISTS:
        collective = getattr(dist, name)
        if _ranks_of_a_replica > 1 and collective.__module__ != __name__:
            setattr(dist, name, _watched(collective))


def _watched(collective: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @wraps(collective, assigned=("__name__", "__qualname__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        if _ranks_of_a_replica == 1 or is_dynamo_compiling():
            return collective(*args, **kwargs)
        caller = sys._getframe(1)
        frame = _users_frame(caller)
        if frame is not None and (frame.f_code, frame.f_lineno) not in _said:
            given = signature.bind(*args, **kwargs).arguments
            if _ranks_of_a_replica <= dist.get_world_size(given.get("group")) == dist.get_world_size():
                _look(collective.__name__, given.get("op"), frame, _is_of_metrics(caller))
        return collective(*args, **kwargs)

    return call


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The line of the user's that calls; None where torch or fullframe does, which know what they add up."""
    while frame is not None and (frame.f_globals.get("__name__") in _BETWEEN or _is_of_metrics(frame)):
        frame = frame.f_back
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return None if name.partition(".")[0] in ("torch", "fullframe") else frame


def _is_of_metrics(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _METRICS


def _look(name: str, op: Any, frame: FrameType, of_metric: bool) -> None:
    """Warn, on the job's first rank, of a sum that is not made a mean, or of a list."""
    _said.add((frame.f_code, frame.f_lineno))
    if dist.get_rank() or (name in _SUMS and (op in _BLIND_TO_COPIES or _asks_for_world_size(frame))):
        return
    does, divide = ("adds up", "divide by the world's size, or ") if name in _SUMS else ("gathers", "")
    what = "this metric gathers" if of_metric else f"dist.{name} {does}"
    remedy = (
        "give it process_group=mesh.get_group('data') when it is made, if it counts or adds up (a ratio is right)"
        if of_metric
        else f"{divide}pass group=mesh.get_group('data') (sums over x.local are right as they are)"
    )
    ranks = _ranks_of_a_replica
    warnings.warn_explicit(
        f"{what} over all {dist.get_world_size()} ranks, and the {ranks} ranks of a replica have the same whole "
        f"values, so each comes {ranks} times; {remedy}",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


def _asks_for_world_size(frame: FrameType) -> bool:
    """Whether the function, or the one that called it, has the size of the world, by which a mean is divided."""
    codes = [at.f_code for at in (frame, frame.f_back) if at is not None]
    return any("world_size" in name for code in codes for name in (*code.co_names, *code.co_varnames))
