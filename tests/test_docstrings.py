"""What a user reads in `help()`: of every public name, and of what it returns, all that can be asked of a text.

Each has a docstring; each parameter is named in it; so is each error of `fullframe.errors` that the function raises,
itself or through a function of the same file; where tensors go in or out it says shapes, where seconds or bytes do, so.
"""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest

import fullframe
from fullframe import errors

# What the public names return or are given, which a user therefore meets.
RETURNED = {
    "LoopWatch": "fullframe.observation.leaks.watch",
    "Leak": "fullframe.observation.leaks.report",
    "Plan": "fullframe.planning.ranking",
    "Plans": "fullframe.planning.plans",
    "Prediction": "fullframe.simulation.prediction",
    "Moment": "fullframe.simulation.prediction",
    "LiveTensor": "fullframe.simulation.prediction",
    "ParallelModel": "fullframe.model.parallelize",
    "Report": "fullframe.observation.report.report",
    "Finding": "fullframe.observation.summary",
    "StepRecord": "fullframe.training.step",
    "Unrolled": "fullframe.techniques.unrolling.unroll",
    "FixedPoint": "fullframe.techniques.unrolling.fixed_point",
    "Solved": "fullframe.techniques.unrolling.fixed_point",
}
ERRORS = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
# Raised for what only fullframe itself can do wrong, or caught before the user meets it.
INTERNAL: dict[str, set[str]] = {}
_CALLED = ("__init__", "__post_init__", "__call__", "__iter__")  # of a class: what its docstring speaks for


class Public(NamedTuple):
    """A function, class, method or property, with all docstrings that speak for it."""

    name: str
    value: Any
    text: str
    own: str
    bodies: tuple[Callable[..., Any], ...]
    owner: type | None


def _functions(value: Any) -> tuple[Callable[..., Any], ...]:
    if isinstance(value, property):
        return tuple(f for f in (value.fget, value.fset) if f is not None)
    if isinstance(value, (classmethod, staticmethod)):
        return (value.__func__,)
    return (value.func,) if isinstance(value, functools.cached_property) else (value,)


def publics() -> Iterator[Public]:
    """Every public name, and the public members of its class."""
    homes = {**fullframe._HOMES, **RETURNED}
    for name, home in sorted(homes.items()):
        value = getattr(import_module(home), name)
        text = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
        if not inspect.isclass(value):
            yield Public(name, value, text, text, (value,), None)
            continue
        maker = re.search(r"Made by `(?:fullframe\.)?(\w+)`", text)  # whose docstring speaks for its class too
        if maker is not None:
            text += getattr(fullframe, maker[1]).__doc__ or ""
        called = tuple(f for key in _CALLED if inspect.isfunction(f := vars(value).get(key)))
        own = vars(value).get("__doc__") or ""
        yield Public(name, value, text + "".join(f.__doc__ or "" for f in called), own, called, value)
        for key, member in vars(value).items():
            kinds = (property, classmethod, staticmethod, functools.cached_property)
            is_field = key in getattr(value, "__dataclass_fields__", ())
            if key.startswith("_") or is_field or key == "extra_repr":  # which is for nn.Module's repr
                continue
            if not (inspect.isfunction(member) or isinstance(member, kinds)):
                continue
            bodies = _functions(member)
            own = bodies[0].__doc__ or ""
            yield Public(f"{name}.{key}", member, own + text, own, bodies, value)


PUBLICS = {public.name: public for public in publics()}
by_name = pytest.mark.parametrize("name", sorted(PUBLICS))


@by_name
def test_it_has_a_docstring(name: str) -> None:
    assert PUBLICS[name].own.strip(), f"{name} says nothing of itself"


def parameters(public: Public) -> Iterator[inspect.Parameter]:
    """Those a user passes; the fields of a record that only fullframe makes are read, and count too."""
    for body in public.bodies if public.bodies else (public.value,):
        if inspect.isclass(body) and not hasattr(body, "__dataclass_fields__"):
            continue
        for parameter in list(inspect.signature(body).parameters.values()):
            if parameter.name not in ("self", "cls") and not parameter.name.startswith("_"):
                yield parameter


def without_a_word(public: Public) -> list[str]:
    """The parameters that the docstring does not name; those of a class that others make are not asked for."""
    if public.owner is not None and public.name in RETURNED and not hasattr(public.owner, "__dataclass_fields__"):
        return []
    if (
        public.owner is not None
        and hasattr(public.owner, "__dataclass_fields__")
        and public.name == public.owner.__name__
    ):
        names = [name for name in public.owner.__dataclass_fields__]
        source = inspect.getsource(public.owner)
        return [
            n for n in names if not _says(public.text, n) and not re.search(rf"(?m)^    {n}: [^#\n]*  # \S", source)
        ]
    return [p.name for p in parameters(public) if not _says(public.text, p.name)]


def _says(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


@by_name
def test_every_parameter_is_named(name: str) -> None:
    assert without_a_word(PUBLICS[name]) == [], f"help(fullframe.{name}) does not say what they are"


@functools.cache
def _module_tree(module: str) -> dict[str, ast.AST]:
    """The functions of a module by name, and its classes."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def raised(public: Public) -> set[str]:
    """The errors that the bodies raise, or functions and methods of the same file that they call."""
    found: set[str] = set()
    for body in map(inspect.unwrap, public.bodies):
        if not inspect.isfunction(body) or body.__code__.co_filename == "<string>":  # of a dataclass
            continue
        tree = _module_tree(body.__module__)
        methods = {}
        if public.owner is not None and (own := tree.get(public.owner.__name__)) is not None:
            methods = {n.name: n for n in ast.walk(own) if isinstance(n, ast.FunctionDef)}
        nodes: list[ast.AST] = [ast.parse(textwrap.dedent(inspect.getsource(body)))]
        seen: set[str] = {body.__name__}
        for node in nodes:  # grows while it is walked
            caught = {ast.unparse(h.type) for h in ast.walk(node) if isinstance(h, ast.ExceptHandler) and h.type}
            for inner in ast.walk(node):
                if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
                    found |= {ast.unparse(inner.exc.func)} - caught
                if not isinstance(inner, ast.Call):
                    continue
                target = ast.unparse(inner.func)
                if target == "require_count":
                    found.add(ast.unparse(inner.args[0]))
                called = methods.get(target.removeprefix("self.")) if target.startswith("self.") else tree.get(target)
                if isinstance(called, ast.ClassDef) and called.name in fullframe.__all__:
                    continue  # says it itself
                if called is not None and target not in seen:
                    seen.add(target)
                    if isinstance(called, ast.ClassDef):
                        nodes += [n for n in called.body if isinstance(n, ast.FunctionDef) and n.name in _CALLED]
                    else:
                        nodes.append(called)
    return found & (ERRORS | {"ValueError"})


@by_name
def test_every_error_is_named(name: str) -> None:
    public = PUBLICS[name]
    missing = {error for error in raised(public) if not _says(public.text, error)} - INTERNAL.get(name, set())
    assert missing == set(), f"help(fullframe.{name}) does not say that it raises them"


def test_what_is_raised_is_found() -> None:
    assert raised(PUBLICS["Recipe"]) == {"RecipeError"}
    assert raised(PUBLICS["Strategy.from_json"]) == {"StrategyError"}
    assert {"ShapeError"} <= raised(PUBLICS["shard"]), "through a function of the same file"


_SHAPE = re.compile(r"\(\.\.\.|\(N\b|\bshapes?\b|\bdims?\b|\bscalar\b|\bnumbers? of elements\b", re.IGNORECASE)


@by_name
def test_tensors_have_shapes(name: str) -> None:
    public = PUBLICS[name]
    for body in public.bodies:
        if not inspect.isfunction(body):
            continue
        hints = [str(hint) for hint in inspect.get_annotations(body).values()]
        if any(re.search(r"\bTensor\b", hint.replace("SpatialTensor", "Tensor")) for hint in hints):
            assert _SHAPE.search(public.text), f"help(fullframe.{name}) does not say which shapes"


UNITS = {"seconds": "second", "bytes": "byte", "timeout": "second"}


@by_name
def test_units_are_said(name: str) -> None:
    public = PUBLICS[name]
    for word, unit in UNITS.items():
        names = [p.name for p in parameters(public)] if public.bodies else []
        if any(word in each.split("_") for each in [*names, name.rpartition(".")[2]]):
            assert unit in public.text.lower(), f"help(fullframe.{name}) gives no unit of {word}"
