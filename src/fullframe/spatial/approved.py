"""Calls that were checked once and need no second check, so that a rule's own time is most of what a call takes.

The general way asks what torch would do with the whole tensors and holds the rule's result to it. For a call like one
before (its operands of equal specs, strides and dtypes, its other arguments equal) the answer is known: the result is
as torch has it, or with other strides of the whole. So the rule is run, and no more.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.expected import PLAIN, autocast_of
from fullframe.spatial.gradients import enters
from fullframe.spatial.tensor import SpatialTensor, shell_of

_AS_IT_IS = object()


class KnownCall:
    """A call as this rank has it; `approved` is None where it was not checked before."""

    __slots__ = ("_key", "_known", "approved")

    def __init__(self, key: Any, known: dict[Any, Any]):
        self._key, self._known = key, known
        self.approved: Any = known.get(key)

    def conformed(self, made: Any) -> Any:
        """What the rule made of an approved call, as torch has it."""
        if self.approved is _AS_IT_IS:
            return made
        before, after = self.approved
        return shell_of(made._local, after if made.spec is before else made.spec.strided(after.strides), None)

    def approve(self, made: Any, result: Any) -> None:
        """Remember the call where `result`, as torch has it, is what the rule made, or differs in strides alone."""
        if result is made:
            self._known[self._key] = _AS_IT_IS
        elif type(result) is type(made) is SpatialTensor and result._local is made._local and _lasts(result):
            self._known[self._key] = made.spec, result.spec


def known_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KnownCall | None:
    """The call, told by all that its result's form depends on; None where each call wants its own checks.

    That is where a split tensor is a copied view or what a mask picked, where a whole one has a gradient that must be
    averaged, where there is `out=`, and where the first operand is not split.
    """
    first = args[0] if args else None
    if (type(first) is list or type(first) is tuple) and first:
        first = first[0]
    if type(first) is not SpatialTensor or not _lasts(first) or "out" in kwargs:
        return None
    local = first._local
    cast = autocast_of([first]) if torch._C._is_any_autocast_enabled() else None
    told: list[Any] = [func, torch.is_grad_enabled(), cast, local.stride(), local.dtype, local.requires_grad]
    rest = args[1:] if args[0] is first else args
    kinds = tuple(map(type, rest))
    if PLAIN.issuperset(kinds):
        told += (kinds, rest)
    elif not _tell(rest, told):
        return None
    if kwargs and not _tell(kwargs.values(), told):
        return None
    return KnownCall((*told, *kwargs), first.spec.approved)


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
        elif isinstance(value, Tensor):
            trains = value.requires_grad
            if trains and enters(value):
                return False
            told += (value.shape, value.stride(), value.dtype, trains)
        elif kind in PLAIN:
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
