"""What a block's functions read that is no argument and no attribute of its modules.

Globals, cells of closures, defaults, and attributes of classes, of the functions that its forwards call, and of those
that these call: found once, by the names in their code. Not seen is what is looked up by a name that the code computes
(`globals()[name]`), and what a library reads: torch, the standard library, and other files of transformers than the
model's own.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial, partialmethod
from itertools import chain
from operator import attrgetter, itemgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

_NAMED = {"fullframe", "numpy", "scipy", "torch", "torchao", "torchvision", "transformers"}
_LIBRARIES = _NAMED | sys.stdlib_module_names
_DATA = {"argparse", "collections", "contextlib", "torchvision", "types"}  # whose objects hold what a program puts in
_DATA_INSIDE = ("torch.distributions.", "transformers.")
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_Cached = type(lru_cache(len))
_FUNCTIONS = (
    FunctionType, MethodType, staticmethod, classmethod, property, cached_property, partial, partialmethod, _Cached,
)  # fmt: skip
_SEEDS = {"fork_rng", "initial_seed", "manual_seed", "set_rng_state"}
_ENVIRONMENT = {"environ", "getenv"}
_MOST = 4000  # functions that are followed, and values of a table that are compared


class Place(NamedTuple):
    """A name that is read, of a module's or a class's table; or a cell, which has none."""

    owner: dict[str, Any] | type | CellType
    name: str
    value: Any
    is_library: bool  # whose tables are its own business

    def put(self, value: Any) -> None:
        """Another value there."""
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, type):
            setattr(self.owner, self.name, value)
        else:
            self.owner[self.name] = value

    @property
    def now(self) -> Any:
        """What is there, or what no place holds."""
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents if _filled(self.owner) else Place
        return (vars(self.owner) if isinstance(self.owner, type) else self.owner).get(self.name, Place)


class Outside:
    """What the functions that are called from the forwards of `modules` read; `places` has each place once, in the
    order in which they were found, equal for modules of equal classes; `caches` are the functions that remember their
    results, `tables` those of the program's own functions, `kinds` its classes. `refusal` says why not all of it
    can be seen.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self.places: list[Place] = []
        self.caches: list[Any] = []
        self.tables: list[dict[str, Any]] = []
        self.refusal = ""
        self._found: set[tuple[int, str]] = set()
        self._seen: set[int] = set()  # the ids of what was followed
        self._kept: list[Any] = []  # so that no other gets the same id
        self._waiting: list[FunctionType] = []
        kinds = dict.fromkeys(c for module in modules for c in _mro(type(module)) if not _is_ours(c))
        self.kinds = [kind for kind in kinds if not _is_library(home_of(kind))]
        self._methods: dict[str, list[type]] = {}
        for kind in kinds:
            for name in vars(kind):
                self._methods.setdefault(name, []).append(kind)
        for kind in self.kinds:  # what Python calls by itself
            for name, item in vars(kind).items():
                if name.startswith("__") and isinstance(item, FunctionType) and name not in ("__init__", "__repr__"):
                    self._note(kind, name, item, (), home_of(kind))
        for module in modules:
            if not _is_ours(next(kind for kind in type(module).__mro__ if "forward" in vars(kind))):
                self._follow(vars(module).get("forward", type(module).forward), is_own=True)
            for value in vars(module).values():
                if isinstance(value, (FunctionType, MethodType, partial, _Cached)) or _is_object(value):
                    self._follow(value)
        while self._waiting:
            self._read(self._waiting.pop())
        self._tables, self.values = self._rows()

    def now(self) -> Iterator[Any]:
        """What is at the places now, as `values` has it; raises KeyError or ValueError where nothing is there."""
        return chain(*[read(table) for read, table in self._tables])

    def _rows(self) -> tuple[list[tuple[Callable[[Any], Any], Any]], list[Any]]:
        """By table, so that C reads a row of names at once."""
        by_table: dict[int, list[Place]] = {}
        for place in self.places:
            by_table.setdefault(id(place.owner), []).append(place)
        rows: list[tuple[Callable[[Any], Any], Any]] = []
        cells: list[CellType] = []
        values: list[Any] = []
        in_cells: list[Any] = []
        for places in by_table.values():
            owner, names = places[0].owner, [place.name for place in places]
            if isinstance(owner, CellType):
                cells.append(owner)
                in_cells.append(places[0].value)
                continue
            more = [names[-1]] if len(names) == 1 else []  # of a single name itemgetter gives no row
            rows.append((itemgetter(*names, *more), vars(owner) if isinstance(owner, type) else owner))
            values += [place.value for place in places] + [places[-1].value] * len(more)
        return [*rows, (partial(map, attrgetter("cell_contents")), cells)], [*values, *in_cells]

    def _read(self, function: FunctionType) -> None:
        names, table = _names(function.__code__), function.__globals__
        home = table.get("__name__", "")
        if not _is_library(home):
            self.tables.append(vars(function))
            if not _SEEDS.isdisjoint(names):
                self.refusal = "it seeds torch's random numbers, or reads their seed"
            if not _ENVIRONMENT.isdisjoint(names):
                self._note(vars(os.environ), "_data", vars(os.environ)["_data"], (), home)
        for name in names:
            if name in table:
                self._note(table, name, table[name], names, home)
            for imported in (name, f"{table.get('__package__')}.{name}") if name not in table else ():
                if imported in sys.modules:  # inside the function
                    self._follow(sys.modules[imported], names, home)
            for kind in self._methods.get(name, ()):
                self._note(kind, name, vars(kind)[name], names, home_of(kind))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _filled(cell) and not (name == "__class__" and isinstance(cell.cell_contents, type)):
                self._note(cell, name, cell.cell_contents, names, home)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._kept.append(apart := {"a default": value})
            self._note(apart, "a default", value, names, home)

    def _note(self, owner: Any, name: str, value: Any, names: Sequence[str], home: str) -> None:
        if (id(owner), name) in self._found:
            return
        self._found.add((id(owner), name))
        self.places.append(Place(owner, name, value, _is_library(home)))
        if isinstance(value, CONTAINERS):
            if len(value) > _MOST and not _is_library(home):
                self.refusal = f"it reads {name}, a {type(value).__name__} of {len(value)} values"
            if len(value) > _MOST:
                return
            for item in value.values() if isinstance(value, Mapping) else value:
                if isinstance(item, _FUNCTIONS) or (isinstance(item, type) and not _is_library(home_of(item))):
                    self._follow(item, names, home)
        else:
            self._follow(value, names, home, is_own=isinstance(owner, type))

    def _follow(self, value: Any, names: Sequence[str] = (), home: str = "", is_own: bool = False) -> None:
        """What `value` reads when it is called, or by these names; of a library, where it is its `home` or a method."""
        if isinstance(value, ModuleType):
            if not _is_library(value.__name__):
                for name in names:
                    if name in vars(value):
                        self._note(vars(value), name, vars(value)[name], names, value.__name__)
            return
        if id(value) in self._seen:
            return
        inner = _inside(value)
        if inner is not None:
            self._see(value)
            self._follow(inner, names, home, is_own)
        if isinstance(value, _Cached):
            self.caches.append(value)
        if isinstance(value, MethodType):
            self._follow(value.__self__, names, home)
        if isinstance(value, FunctionType):
            if isinstance(registry := vars(value).get("registry"), Mapping):  # of functools.singledispatch
                for registered in registry.values():
                    self._follow(registered, names, home)
            of = value.__globals__.get("__name__", "")
            if is_own or of == home or not _is_library(of):
                self._see(value)
                self._waiting.append(value)
                if len(self._kept) > _MOST:
                    self.refusal = f"it calls more than {_MOST} functions"
                    self._waiting.clear()
        elif isinstance(value, type) and not issubclass(value, nn.Module):
            if not _is_library(home_of(value)):
                self._see(value)
                own = [kind for kind in _mro(value) if not _is_library(home_of(kind))]
                self.kinds += own
                for kind in own:
                    for name, item in vars(kind).items():
                        if not name.startswith("__") or isinstance(item, _FUNCTIONS):
                            self._note(kind, name, item, names, home_of(kind))
        elif _is_object(value):
            self._see(value)
            self._follow(type(value), names, home)

    def _see(self, value: Any) -> None:
        self._seen.add(id(value))
        self._kept.append(value)


def _inside(value: Any) -> Any:
    """The function that another wraps; None where there is none."""
    if isinstance(value, (partial, partialmethod, cached_property)):
        return value.func
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        return value.__func__
    return None if isinstance(value, (type, nn.Module)) else getattr(value, "__dict__", {}).get("__wrapped__")


def is_data(value: Any) -> bool:
    """Whether an object is one that a program has made to hold values, which can be compared one by one."""
    home = home_of(type(value))
    if isinstance(value, (type, ModuleType, nn.Module, Tensor, *_FUNCTIONS)):
        return False
    return home.partition(".")[0] in _DATA or home.startswith(_DATA_INSIDE) or not _is_library(home)


def _is_object(value: Any) -> bool:
    """Of a class of the program's own, whose methods may be called."""
    return not isinstance(value, (type, nn.Module, Tensor, *_FUNCTIONS)) and not _is_library(home_of(type(value)))


def _is_ours(kind: type) -> bool:
    """Of torch, or of this package, whose files do not change."""
    return kind is object or home_of(kind).partition(".")[0] in ("torch", "fullframe")


def _mro(kind: type) -> tuple[type, ...]:
    """The classes in which Python looks for an attribute of the class."""
    return (*kind.__mro__, *(meta for meta in type.mro(type(kind)) if meta not in (type, object)))


def home_of(kind: Any) -> str:
    """The name of the file that defines a class."""
    return str(getattr(kind, "__module__", ""))


def _is_library(home: str) -> bool:
    return home.partition(".")[0] in _LIBRARIES


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@lru_cache(maxsize=1 << 14)
def _names(code: CodeType) -> tuple[str, ...]:
    """All names that the code and the functions in it look up, by getattr too."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            names[constant] = None
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names(constant))
    return tuple(names)
