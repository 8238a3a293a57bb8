"""The one table from torch function to rule; a second rule for the same function is an error.

Beside it: the short ways of functions that are called so often that microseconds count, and which functions write.
"""

import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from fullframe.errors import ArgumentError

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

# Modules, and single rules, that see to it that rows which a mask picked lie in another order; for others they are put
# in order.
_IN_ANY_ORDER = {
    "composed", "distances", "embedding", "extremes", "gradient_hooks", "indexing", "joining", "linear_algebra", "loss",
    "masks", "matmul", "moments", "normalization", "order", "pointwise", "products", "quantiles", "reduction",
    "reshape", "scan", "softmax", "points._gather", "points._take_along_dim",
}  # fmt: skip

RULES: dict[Any, Rule] = {}
NAMED: dict[str, Rule] = {}  # of ops by their names: their libraries may be loaded later, or never
UNCHECKED: set[Any] = set()  # functions whose calls are not held to what torch does with the whole tensors
COMPOSED: set[Any] = set()  # functions whose rules call torch's, each of which autocast casts by itself
QUICK: dict[Any, Rule] = {}  # (func, args, kwargs) -> the result, or NotImplemented for the general way
general: list[Rule] = []  # the general way, put in by `dispatch`; in a list, as it needs the tensor that calls it


class Unsupported(Exception):
    """Raised by a rule, from facts all ranks know and before any message, when it has no exact way: (reason, fix)."""

    def __init__(
        self,
        reason: str,
        fix: str = "Gather first with .full(), or give parallelize or ff.Recipe unsupported='gather'.",
    ):
        self.reason, self.fix = reason, fix
        super().__init__(reason)


class Merged(Unsupported):
    """Raised where a rule needs the rows of a dim that is merged from split and other factors."""

    def __init__(self, spec: Any, dim: int):
        self.spec, self.dim = spec, dim
        super().__init__(f"dim {dim} is merged from split and other dims", "Undo the flatten before this op.")


class TooSmall(Unsupported):
    """Raised where a map has fewer rows than ranks; the dispatch makes it whole along those mesh axes and calls again.

    `spec` is that of the operand in question, None for all operands that are split over the axes.
    """

    def __init__(self, axes: Sequence[str], spec: Any = None):
        self.axes, self.spec = axes, spec
        super().__init__(f"the map has too few rows for the ranks of {' and '.join(axes)}")


def takes_any_order(rule: Rule) -> bool:
    """Whether a rule takes what a mask picked as it lies on the ranks."""
    home, _, module = (rule.__module__ or "").rpartition(".")  # code that was executed has none
    return home == __package__ and (module in _IN_ANY_ORDER or f"{module}.{rule.__name__}" in _IN_ANY_ORDER)


def getter(name: str) -> Any:
    """What torch passes as the function when the property `name` of a tensor is read."""
    return getattr(Tensor, name).__get__


def setters(name: str) -> tuple[Any, Any]:
    """What torch passes as the function when the property `name` of a tensor is set, and when it is deleted."""
    return getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__


def kept_back(function: Any, name: str) -> Any:
    """An argument of the running call of a function that torch does not hand on to rules; None where none runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame.f_locals.get(name) if frame.f_code is function.__code__ else None


def rule_of(function: Any) -> Rule | None:
    """The rule of a function, or None; of an op of another library that of its name, by the op itself from then on."""
    found = RULES.get(function)
    if found is None and isinstance(function, (OpOverload, OpOverloadPacket)):
        packet = function.overloadpacket if isinstance(function, OpOverload) else function
        found = NAMED.get(packet._qualified_op_name) or _rule_of_operator(packet)
        if found is not None:
            RULES[function] = found
            UNCHECKED.add(function)
    return found


def _rule_of_operator(packet: Any) -> Rule | None:
    """Of one of torch's own operators, as exported programs call them: its function, where that has a rule.

    Only of those that are bound to the operator itself, and so take its arguments in its order; for others see the
    rules in `operators`.
    """
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace != "aten":
        return None
    bound = (getattr(home, name, None) for home in (torch, torch._C._nn, Tensor))
    function = next((f for f in bound if isinstance(f, _BOUND) and f in RULES), None)
    return function and calling(function)


def calling(function: Callable[..., Any]) -> Rule:
    """The rule of an operator that this function of the same arguments stands for."""
    return lambda operator, *args, **kwargs: function(*args, **kwargs)


_BOUND = BuiltinFunctionType, MethodDescriptorType


def rule(*functions: Any, checked: bool = True) -> Callable[[R], R]:
    """Register a rule for torch functions: it is called as `rule(function, *args, **kwargs)` on every rank.

    The arguments are those the user gave, with `SpatialTensor`s among them; the result is a `SpatialTensor` or a
    plain tensor that is equal on all ranks. Before a rule is called the function itself is run on meta tensors of the
    global shapes: what torch refuses is refused, and the result is held to torch's shape and dtype. `checked=False`
    leaves that out, for functions that cannot run on meta tensors or have side effects; functions that are not
    torch's are never so run. An op of a library that need not be there is given by its name, "library::op". A function
    that has a rule already raises ArgumentError, and so does what is no function.
    """

    wrong = [f for f in functions if not (callable(f) or (isinstance(f, str) and "::" in f))]
    if wrong or not functions:
        got = repr(wrong[0]) if wrong else "none"
        raise ArgumentError(f'ff.rule: functions must be torch functions or names "library::op", got {got}')

    def register(function_rule: R) -> R:
        if not callable(function_rule):
            raise ArgumentError(f"ff.rule: a rule is a function, got {function_rule!r}")
        for function in dict.fromkeys(functions):  # some names of torch are the same function
            table: dict[Any, Rule] = NAMED if isinstance(function, str) else RULES
            if function in table:
                raise ArgumentError(f"{function} has a rule already: {table[function].__qualname__}")
            table[function] = function_rule
            if table is RULES and not (checked and _of_torch(function)):
                UNCHECKED.add(function)
        return function_rule

    return register


def _of_torch(function: Any) -> bool:
    function = getattr(function, "__self__", None) or function  # of a `getter` the property
    home = getattr(function, "__module__", None) or getattr(getattr(function, "__objclass__", None), "__module__", "")
    return not home or home.partition(".")[0] == "torch"


_OPERATORS = "add sub mul matmul div truediv floordiv mod pow and or xor lshift rshift"
IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _OPERATORS.split())  # torch has no `__imatmul__`


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `func` writes into its first operand, by its name and the option `inplace`."""
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in IN_PLACE_OPERATORS or name == "__setitem__"
    return bool(kwargs.get("inplace")) or name.endswith("_")
