"""The one table from torch function to rule; a second rule for the same function is an error."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

RULES: dict[Any, Rule] = {}


class Refused(Exception):
    """Raised by a rule, from facts all ranks know and before any message, when it has no exact way: (reason, fix)."""

    def __init__(self, reason: str, fix: str = "Gather first with .full(), or parallelize(..., unsupported='gather')."):
        self.reason, self.fix = reason, fix
        super().__init__(reason)


def getter(name: str) -> Any:
    """What torch passes as the function when the property `name` of a tensor is read."""
    return getattr(Tensor, name).__get__


def rule(*functions: Any) -> Callable[[R], R]:
    """Register a rule for torch functions: it is called as `rule(function, *args, **kwargs)` on every rank.

    The arguments are those the user gave, with `SpatialTensor`s among them; the result is a `SpatialTensor` or a
    plain tensor that is equal on all ranks. A function that has a rule already raises ValueError.
    """

    def register(function_rule: R) -> R:
        for function in dict.fromkeys(functions):  # some names of torch are the same function
            if function in RULES:
                raise ValueError(f"{function} has a rule already: {RULES[function].__qualname__}")
            RULES[function] = function_rule
        return function_rule

    return register
