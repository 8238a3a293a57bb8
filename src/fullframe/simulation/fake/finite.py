"""What holds of fake tensors whatever their numbers are, as long as they are finite: a step that asks for NaN goes on.

`if not torch.isfinite(loss): raise` and `assert not x.isnan().any()` have one answer in every step that is worth
simulating, so no note says that it was taken for granted.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.fake.numbers import written_by

Rule = Callable[[Sequence[Any], Tensor], bool | int | None]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le", "mul")},
    **{f"{kind}_{name}": getattr(operator, f"{name}_") for kind in ("logical", "bitwise") for name in ("and", "or")},
}
_NEGATIONS = ("logical_not", "bitwise_not")
_SAME = ("any", "all", "clone", "_to_copy")
_SUMS = ("sum", "count_nonzero")
_ASK_FOR_FAULTS = {  # whether a variance is negative
    ("torch.nn.functional", "gaussian_nll_loss"),
    ("fullframe.spatial.rules.loss", "_gaussian_nll"),
}
_ON_THE_WAY = ("fullframe.", "torch._", "torch.utils.")  # from a program to a mode


def certain(tensor: Tensor) -> bool | int | None:
    """The one value that all elements of a fake tensor have; None where that is not certain."""
    return getattr(tensor, "_fullframe_certain", None)


def follow_certain(func: Any, args: Sequence[Any], out: Any) -> None:
    """After an op that gave `out`: what is certain of that, and no longer of what may have been written to."""
    rule = _rule(func)
    if rule is not None:
        found = rule(args, out)
        if found is not None and isinstance(out, FakeTensor):
            out._fullframe_certain = found  # type: ignore[attr-defined]


@functools.cache
def _rule(func: Any) -> Rule | None:
    """What gives the value of all elements of an op's result, or None; None for an op of which nothing is certain."""
    name = func._opname
    if func.namespace == "c10d":
        return _sent
    if func.namespace != "aten":
        return None
    if written_by(func) or func.is_view:  # through a view it may be written to
        return _forget
    if name in ("isnan", "isinf"):
        return lambda args, out: False
    if name in _COMPARISONS:
        return functools.partial(_compared, _COMPARISONS[name])
    if name in _NEGATIONS:
        return lambda args, out: None if (value := certain(args[0])) is None else not value
    if name in _SAME:
        return lambda args, out: certain(args[0])
    return _summed if name in _SUMS else None


def passes_checks_of_torch() -> bool | None:
    """What a truth is by which torch's own Python code, or ours in its place, would raise if it asks now; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        asks = frame.f_globals.get("__name__", "")
        if asks.startswith("torch.distributions."):
            return True  # all values are valid
        if (asks, frame.f_code.co_name) in _ASK_FOR_FAULTS:
            return False
        if not asks.startswith(_ON_THE_WAY):
            return None
        frame = frame.f_back
    return None


def _forget(args: Sequence[Any], out: Tensor) -> None:
    for arg in args:
        if isinstance(arg, FakeTensor):
            arg.__dict__.pop("_fullframe_certain", None)


def _sent(args: Sequence[Any], out: Any) -> None:
    """Nothing and nothing are nothing, whatever is done with what the ranks have; a count is no longer known."""
    for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
        if isinstance(tensor, FakeTensor) and certain(tensor):
            del tensor._fullframe_certain  # type: ignore[attr-defined]


def _compared(compare: Callable[[Any, Any], Any], args: Sequence[Any], out: Tensor) -> bool | None:
    """Of numbers and themselves, and infinity; and of what is certain already."""
    if out.dtype is not torch.bool:
        return None
    one, other = (certain(arg) if isinstance(arg, Tensor) else arg for arg in args[:2])
    if one is None and (args[0] is args[1] or (isinstance(other, float) and math.isinf(other))):
        return None if args[0].dtype is torch.bool else compare(1, 1 if other is None else other)
    return None if one is None or other is None else bool(compare(one, other))


def _summed(args: Sequence[Any], out: Tensor) -> int | None:
    value = certain(args[0])
    return None if value is None or not out.numel() else value * (args[0].numel() // out.numel())
