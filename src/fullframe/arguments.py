"""What a public function is given, held to what it says that it takes: number, names and kinds of its arguments.

So a slip is told in words at the line that made it, before any message is sent. What lies in a list, and what a
function returns, is looked at by who reads it.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cached_property, wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fullframe.errors import ArgumentError
from fullframe.wording import SHOWN, described, indefinite

F = TypeVar("F", bound=Callable[..., Any])

_WIDER: dict[Any, Any] = {int: Integral, float: Real, Path: PathLike}  # numbers of numpy are numbers
_REMEDIES = {
    "DataLoader": "wrap the data set: torch.utils.data.DataLoader(dataset, batch_size)",
    "DeviceMesh": "make it with ff.init_mesh",
    "Recipe": "make it with ff.Recipe, or take what a recipe file's recipe() returns",
    "Strategy": "make it with ff.Strategy, as in ff.Strategy(width=2)",
    "Tensor": "torch.as_tensor makes one of numbers or a numpy array",
}


def checked(function: F) -> F:
    """`function`, or the class that is made by it, which raises ArgumentError for what its signature does not take."""
    return checked_but()(function)


def checked_but(*names: str) -> Callable[[F], F]:
    """`checked`, but for arguments that the function looks at together with the other ranks."""

    def decorate(function: F) -> F:
        call: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        door = _Door(function, call, names)

        @wraps(call)
        def through(*args: Any, **kwargs: Any) -> Any:
            if problem := door.problem(args, kwargs):
                raise ArgumentError(problem)
            return call(*args, **kwargs)

        if isinstance(function, type):
            function.__init__ = through  # type: ignore[misc]
            return function
        return cast(F, through)

    return decorate


class _Door:
    """What a function takes, or a class by its `call`; read when it is first called: that may be the end of imports.

    A dataclass looks at the kinds of its fields by itself.
    """

    def __init__(self, function: Callable[..., Any], call: Callable[..., Any], unseen: Collection[str]):
        self._function, self._call, self._unseen = function, call, unseen

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._call)

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        try:
            return {} if is_dataclass(self._function) else get_type_hints(self._call)
        except NameError:  # of what is imported for type checkers alone
            return {}

    def problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What is wrong with the arguments of a call, "" where nothing is."""
        name = f"ff.{self._function.__name__}"
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            about = (self._function.__doc__ or "").strip().partition("\n")[0]
            said = self._unknown(kwargs) or error  # Python names what is missing, which may be what was misspelt
            return f"{name}: {said}; it is {name}({', '.join(self._parameters)}): {about}"
        for parameter, value in given.items():
            kind = self._kinds.get(parameter, Any)
            many = self._signature.parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL
            for each in value if many else (value,):
                if parameter not in self._unseen and not fits(each, kind):
                    remedy = self._exchanged(parameter, given) or _remedy(each, kind)
                    return f"{name}: {parameter} must be {_named(kind)}, got {described(each)}{remedy}"
        return ""

    def _unknown(self, names: Iterable[str]) -> str:
        """That a name is none of a parameter; "" where the function takes any, or all are."""
        parameters = self._signature.parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return ""
        found = (f"got an unexpected keyword argument {name!r}" for name in names if name not in parameters)
        return next(found, "")

    @property
    def _parameters(self) -> Iterable[str]:
        by_name = False
        for number, (name, parameter) in enumerate(self._signature.parameters.items()):
            if self._function is not self._call and not number:
                continue  # self
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not by_name:
                by_name = True
                yield "*"
            star = "*" * (parameter.kind is inspect.Parameter.VAR_POSITIONAL)
            default = parameter.default
            shown = repr(default) if isinstance(default, SHOWN) else "..."
            yield f"{star}{name}" if default is parameter.empty else f"{name}={shown}"

    def _exchanged(self, parameter: str, given: Mapping[str, Any]) -> str:
        """Where another argument was meant for `parameter`, and this one for it."""
        kind, value = self._kinds[parameter], given[parameter]
        for other, its in given.items():
            of_other = self._kinds.get(other, Any)
            if other != parameter and of_other is not Any and fits(its, kind) and fits(value, of_other):
                return f"; {parameter} and {other} are exchanged"
        return ""


def fits(value: object, kind: Any) -> bool:
    """Whether `value` is what the annotation `kind` says, as far as that can be told without looking into it."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in get_args(kind))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    kind = origin or kind
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # what has no class
    if isinstance(value, str) and kind in (Sequence, Collection, Iterable):
        return False  # one name where several are meant would be taken for its letters
    return isinstance(value, _WIDER.get(kind, kind))


def _named(kind: Any) -> str:
    """'a DeviceMesh', 'a Sequence of str or None', "'error' or 'gather'"."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(_named(each) for each in get_args(kind))
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is type(None):
        return "None"
    if origin is Callable:
        return "a function"
    name = getattr(origin or kind, "__name__", str(kind))
    inside = [getattr(each, "__name__", "") for each in get_args(kind)]
    return indefinite(name) + (f" of {inside[0]}" if len(inside) == 1 and inside[0] not in ("", "Any") else "")


def _remedy(value: object, kind: Any) -> str:
    several = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    kinds = [get_origin(each) or each for each in several]
    names = [getattr(each, "__name__", "") for each in kinds]
    if isinstance(value, type) and any(isinstance(each, type) and issubclass(value, each) for each in kinds):
        return f"; make one: {value.__name__}(...)"
    if isinstance(value, FunctionType):
        return f"; give what it returns: {value.__name__}()"
    if isinstance(value, str) and not {"Sequence", "Collection", "Iterable"}.isdisjoint(names):
        return f"; give [{value!r}]"
    return next((f"; {_REMEDIES[name]}" for name in names if name in _REMEDIES), "")
