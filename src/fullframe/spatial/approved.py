"""Calls that were checked once and need no second check, so that a rule's own time is most of what a call takes.

The general way asks what torch would do with the whole tensors and holds the rule's result to it. For a call like one
before (its operands of equal specs, strides and dtypes, its other arguments equal) the answer is known: the result is
as torch has it, or with other strides of the whole. So the rule is run, and no more.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fullframe.spatial.expected import PLAIN, autocast_of
from fullframe.spatial.gradients import enters
from fullframe.spatial.tensor import SpatialTensor, shell_of

AS_IT_IS = object()  # approved: the rule's result is as torch has it


# The call as this rank has it, and the calls checked before on its first operand's spec. A plain tuple is made quicker.
KnownCall = tuple[tuple[Any, ...], dict[Any, Any]]


def approve(call: KnownCall, made: Any, result: Any) -> None:
    """Remember the call where `result`, as torch has it, is what the rule made, or differs in strides alone."""
    form, checked = call
    if result is made:
        checked[form] = AS_IT_IS
    elif type(result) is type(made) is SpatialTensor and result._local is made._local and _lasts(result):
        checked[form] = made.spec, result.spec


def conformed(made: Any, approved: Any) -> Any:
    """What the rule made of a call that was approved with other strides, as torch has it."""
    before, after = approved
    return shell_of(made._local, after if made.spec is before else made.spec.strided(after.strides), None)


def known_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KnownCall | None:
    """The call, told by all that its result's form depends on; None where each call wants its own checks.

    That is where a split tensor is a copied view or what a mask picked, where a whole one has a gradient that must be
    averaged, where there is `out=`, and where the first operand is not split.
    """
    first: Any = args[0] if args else None
    kind = type(first)
    if (kind is list or kind is tuple) and first:
        first = first[0]
        kind = type(first)
    if kind is not SpatialTensor or first._view is not None or "out" in kwargs:
        return None
    spec = first.spec
    if spec.fleeting:
        return None
    local = first._local
    cast = autocast_of([first]) if torch._C._is_any_autocast_enabled() else None
    teller = _TELLERS.get(func)
    form = None if teller is None else teller(args, kwargs)
    if form is not None:
        by = func, torch.is_grad_enabled(), cast, local.stride(), local.dtype, local.requires_grad, form
        return by, spec.approved
    told: list[Any] = [func, torch.is_grad_enabled(), cast, local.stride(), local.dtype, local.requires_grad]
    rest = args[1:] if args[0] is first else args
    if kwargs:
        told += kwargs
        rest = (*rest, *kwargs.values())
    return (tuple(told), spec.approved) if _tell(rest, told) else None


Teller = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]
_TELLERS: dict[Any, Teller] = {}


def tells(*functions: Any) -> Callable[[Teller], Teller]:
    """Marks what tells calls of these functions, as modules make them, by all but their first operand.

    It takes arguments and keywords, and gives None for a call in another form or with a gradient to be averaged.
    """

    def mark(teller: Teller) -> Teller:
        _TELLERS.update(dict.fromkeys(functions, teller))
        return teller

    return mark


def _lasts(shell: SpatialTensor) -> bool:
    return shell._view is None and not shell.spec.fleeting


def _tell(values: Iterable[Any], told: list[Any]) -> bool:
    """Add to `told` what the form of a result depends on; False for what cannot be told."""
    for value in values:
        kind = type(value)
        if kind is SpatialTensor:
            if not _lasts(value):
                return False
            local = value._local
            told += (value.spec, local.stride(), local.dtype, local.requires_grad)
        elif kind is Parameter or kind is Tensor or (kind not in PLAIN and isinstance(value, Tensor)):
            trains = value.requires_grad
            if (trains and enters(value)) or value.layout is not torch.strided:
                return False
            told += (value.shape, value.stride(), value.dtype, trains)
        elif kind in PLAIN or kind is torch.Size:
            told += (kind, value)
        elif kind is tuple and PLAIN.issuperset(kinds := tuple(map(type, value))):
            told += (kind, kinds, value)
        elif kind is tuple or kind is list:
            told.append(kind)
            if not _tell(value, told):
                return False
            told.append(None)
        else:
            return False
    return True
