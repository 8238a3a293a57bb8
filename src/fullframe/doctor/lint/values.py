"""What an expression may stand for, and what was done with it, as far as one file tells.

A `Value` is made once where the interpreter meets an expression, and names, attributes and containers then hold it. It
knows the values it was made of (`inputs`), so that a question such as "does this hold a graph?" follows the data, not
names. Whoever calls a method of a value leaves the method's name in `uses`: a parameter with `zero_grad` among them is
an optimizer or a model, whatever it is called.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Optional

_POSSIBILITIES = 12  # of one name; more are not told apart by any rule
NOTHING: Any = object()  # no constant: None is one


class Origin(Enum):
    """How a value came to be; in brackets what `inputs` holds and what `text` says."""

    CONSTANT = "constant"  # a literal of Python; `constant` holds it
    PATH = "path"  # an imported module or what lies in one [text: dotted path]
    PARAMETER = "parameter"  # [text: its name]
    CALL = "call"  # [function, *positional and keyword arguments]
    ATTRIBUTE = "attribute"  # [base; text: the attribute's name]
    ITEM = "item"  # [base, key]
    ELEMENT = "element"  # what a loop takes from [the iterable]
    OPERATION = "operation"  # [operands; text: the operator's name in `ast`]
    CONTAINER = "container"  # [elements; text: list, dict, tuple, set or starred]
    EITHER = "either"  # one of [the possibilities]
    FUNCTION = "function"  # defined in this file; `definition` holds it [the object it is bound to]
    CLASS = "class"  # defined in this file; `definition` holds it
    INSTANCE = "instance"  # of a class of this file; `definition` holds the class
    UNKNOWN = "unknown"


@dataclass(eq=False, repr=False, slots=True)
class Value:
    """What an expression may stand for; see the module's docstring."""

    origin: Origin
    inputs: "tuple[Value, ...]" = ()
    text: str = ""
    _: KW_ONLY
    node: ast.AST | None = None
    born: int = 0  # the number of events before it
    grad: bool | None = True  # whether autograd was on; None: unknown
    constant: Any = NOTHING
    definition: "Definition | None" = None
    keywords: "dict[str, Value]" = field(default_factory=dict)  # of a call
    uses: set[str] = field(default_factory=set)  # attributes read of it; shared by names of one object
    fields: "dict[object, Value]" = field(default_factory=dict, init=False)  # attributes, items: stored or read

    @property
    def function(self) -> "Value":
        """Of a call: what is called."""
        return self.inputs[0]

    @property
    def arguments(self) -> "tuple[Value, ...]":
        """Of a call: the positional arguments."""
        return self.inputs[1 : len(self.inputs) - len(self.keywords)]

    @property
    def receiver(self) -> "Value | None":
        """Of a call of a method: the object; of anything else None."""
        if self.origin is Origin.CALL and self.function.origin is Origin.ATTRIBUTE:
            return self.function.inputs[0]
        return None

    @property
    def method(self) -> str:
        """Of a call of a method: its name; of anything else ""."""
        is_method = self.origin is Origin.CALL and self.function.origin is Origin.ATTRIBUTE
        return self.function.text if is_method else ""

    @property
    def path(self) -> str:
        """The dotted path of an import, or of what a call calls; "" where it is none."""
        if self.origin is Origin.PATH:
            return self.text
        if self.origin is Origin.CALL and self.function.origin is Origin.PATH:
            return self.function.text
        return ""

    def use(self, name: str) -> None:
        """Note that attribute `name` is read."""
        self.uses.add(name)
        if self.origin is Origin.EITHER:
            for member in self.inputs:
                member.uses.add(name)

    def argument(self, position: int, name: str) -> Optional["Value"]:
        """Of a call: the argument at `position` or called `name`; None where it is not given."""
        if name in self.keywords:
            return self.keywords[name]
        arguments = self.arguments
        return arguments[position] if 0 <= position < len(arguments) else None

    def members(self) -> "Iterator[Value]":
        """Itself, or its possibilities."""
        if self.origin is not Origin.EITHER:
            yield self
            return
        seen: set[int] = set()
        stack = [self]
        while stack:
            value = stack.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if value.origin is Origin.EITHER:
                stack.extend(value.inputs)
            else:
                yield value


@dataclass(eq=False, slots=True)
class Definition:
    """A function, lambda or class of this file, with the names it sees."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    scope: "Scope"
    bases: tuple[Value, ...] = ()  # of a class
    members: dict[str, Value] | None = None  # of a class
    owner: "Definition | None" = None  # the class that a method lies in
    decorators: tuple[Value, ...] = ()

    @property
    def name(self) -> str:
        """As it is defined; "<lambda>" for a lambda."""
        return getattr(self.node, "name", "<lambda>")

    def lookup(self, name: str) -> Value | None:
        """Of a class: the member `name`, its own or of a base in this file."""
        for definition in self.lineage():
            found = (definition.members or {}).get(name)
            if found is not None:
                return found
        return None

    def lineage(self) -> "Iterator[Definition]":
        """Of a class: itself and its bases in this file, nearest first."""
        stack = [self]
        while stack:
            definition = stack.pop(0)
            yield definition
            for base in definition.bases:
                stack.extend(m.definition for m in base.members() if m.origin is Origin.CLASS and m.definition)

    def base_paths(self) -> set[str]:
        """Of a class: the dotted paths of the imported bases, its own and its bases'."""
        return {base.path for definition in self.lineage() for base in definition.bases if base.origin is Origin.PATH}


class Scope:
    """The names of a module, a class or one call of a function."""

    __slots__ = ("elsewhere", "is_class", "names", "parent")

    def __init__(self, parent: "Scope | None" = None, is_class: bool = False):
        self.names: dict[str, Value] = {}
        self.parent, self.is_class = parent, is_class
        self.elsewhere: dict[str, Scope] = {}  # names declared global or nonlocal

    def get(self, name: str) -> Value | None:
        """What `name` stands for here; a function does not see the names of a class around it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                return scope.names[name]
            scope = scope.parent
        return None

    def home(self, name: str) -> "Scope":
        """The scope that an assignment of `name` here writes to."""
        return self.elsewhere.get(name, self)

    @property
    def module(self) -> "Scope":
        """The module's own names."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


def either(values: Iterable[Value], born: int = 0) -> Value:
    """One value that stands for any of `values`."""
    unique = list({id(value): value for value in values}.values())
    if len(unique) == 1:
        return unique[0]
    return Value(Origin.EITHER, tuple(unique[:_POSSIBILITIES]), born=born)


def cone(values: Iterable[Value], limit: int = 2000) -> Iterator[Value]:
    """`values` and all they were made of, nearest first; at most `limit`."""
    seen: set[int] = set()
    queue = list(values)
    position = 0
    while position < len(queue) and position < limit:
        value = queue[position]
        position += 1
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        queue.extend(value.inputs)
