"""Evaluates the expressions of a file to `Value`s, and notes calls and assignments as events."""

import ast
import builtins
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from fullframe.doctor.lint.program import Call, Frame, FrameKind, Program, Store
from fullframe.doctor.lint.values import Definition, Origin, Scope, Value, either

_BUILTINS = frozenset(dir(builtins))
# Their result is the object itself where that is a module, and of the same data where it is a tensor.
SAME_OBJECT = frozenset({"to", "cuda", "cpu", "half", "float", "double", "bfloat16", "train", "eval", "requires_grad_",
                         "apply", "xpu", "contiguous", "type"})  # fmt: skip


class Evaluator:
    """Where the program is: its scope and frame, and whether autograd is on."""

    def __init__(self, program: Program):
        self.program = program
        self.scope = Scope()
        self.frame = Frame(FrameKind.MODULE, program.tree, None)
        program.frames.append(self.frame)
        self.grad: bool | None = True
        self.yields: list[Value] = []
        self._evaluators: dict[type[ast.AST], Callable[[Any], Value]] = {
            ast.Name: self._name, ast.Constant: self._constant, ast.Attribute: self._attribute, ast.Call: self._call,
            ast.Subscript: self._subscript, ast.BinOp: self._operation, ast.UnaryOp: self._operation,
            ast.BoolOp: self._operation, ast.Compare: self._operation, ast.IfExp: self._conditional,
            ast.Tuple: self._sequence, ast.List: self._sequence, ast.Set: self._sequence, ast.Dict: self._dict,
            ast.ListComp: self._comprehension, ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension, ast.DictComp: self._comprehension, ast.Lambda: self._lambda,
            ast.Starred: self._starred, ast.NamedExpr: self._named, ast.Await: self._inner, ast.Yield: self._yield,
            ast.YieldFrom: self._yield, ast.JoinedStr: self._text, ast.FormattedValue: self._inner,
            ast.Slice: self._operation,
        }  # fmt: skip

    @abstractmethod
    def follow(self, call: Call, function: Value, arguments: Sequence[Value], keywords: dict[str, Value]) -> Value:
        """What the call gives; runs functions of this file."""

    def value(self, origin: Origin, inputs: tuple[Value, ...] = (), text: str = "", **more: Any) -> Value:
        """A new value, made now."""
        return Value(origin, inputs, text, born=len(self.program.events), grad=self.grad, **more)

    def evaluate(self, node: ast.expr | None) -> Value:
        """What `node` stands for."""
        if node is None:
            return self.value(Origin.CONSTANT, constant=None)
        evaluator = self._evaluators.get(type(node))
        return self.value(Origin.UNKNOWN, node=node) if evaluator is None else evaluator(node)

    def push(self, kind: FrameKind, node: ast.AST, value: Value | None, **more: Any) -> Frame:
        """Enter a block."""
        events, frames = self.program.events, self.program.frames
        self.frame = Frame(kind, node, self.frame, value, start=len(events), **more)
        frames.append(self.frame)
        return self.frame

    def pop(self) -> None:
        """Leave the innermost block."""
        self.frame.stop = len(self.program.events)
        assert self.frame.parent is not None
        self.frame = self.frame.parent

    # Attributes, items and elements

    def path(self, dotted: str) -> Value:
        """What lies at a dotted path of imports: one value for one path."""
        found = self.program.paths.get(dotted)
        if found is None:
            found = self.program.paths[dotted] = self.value(Origin.PATH, text=dotted)
        return found

    def attribute(self, base: Value, name: str, node: ast.AST | None = None) -> Value:
        """`base.name`."""
        if base.origin is Origin.PATH:
            return self.path(f"{base.text}.{name}")
        base.use(name)
        if name in base.fields:
            return base.fields[name]
        if base.origin in (Origin.INSTANCE, Origin.CLASS) and base.definition is not None:
            member = base.definition.lookup(name)
            if member is not None:
                return self._member(base, member)
        if base.origin is Origin.EITHER and any(m.origin is Origin.INSTANCE or m.fields for m in base.members()):
            return either([self.attribute(m, name, node) for m in base.members()], len(self.program.events))
        found = self.value(Origin.ATTRIBUTE, (base,), name, node=node)
        base.fields[name] = found
        return found

    def _member(self, base: Value, member: Value) -> Value:
        definition = member.definition
        if member.origin is not Origin.FUNCTION or definition is None or base.origin is Origin.CLASS:
            return member
        names = {decorator.text.rpartition(".")[2] for decorator in definition.decorators}
        if "staticmethod" in names:
            return member
        bound = self.value(Origin.FUNCTION, (base,), member.text, definition=definition, node=member.node)
        if names & {"property", "cached_property"}:
            read = ast.Call(
                ast.Name(definition.name, ast.Load()), [], [], lineno=getattr(member.node, "lineno", 1), col_offset=0
            )
            call = self.value(Origin.CALL, (bound,), node=read)
            return self.follow(Call(call, read, self.frame, len(self.program.events), call), bound, (), {})
        return bound

    def item(self, base: Value, key: Value) -> Value:
        """`base[key]`."""
        named = _named(key)
        held = self._held(base, named)
        if held is not None:
            return held
        found = self.value(Origin.ITEM, (base, key), uses=base.uses if base.origin is Origin.UNKNOWN else set())
        base.fields[named] = found
        return found

    def _held(self, base: Value, named: tuple[object, ...]) -> Value | None:
        """The item of this key, where it was stored or written down in a literal."""
        if named in base.fields:
            return base.fields[named]
        position = named[-1]
        if base.origin is not Origin.CONTAINER or base.text not in ("tuple", "list") or not isinstance(position, int):
            return None
        is_there = -1 < position < len(base.inputs) and not any(i.text == "starred" for i in base.inputs)
        return base.inputs[position] if is_there else None

    def element(self, iterable: Value) -> Value:
        """What a loop over `iterable` takes from it."""
        if iterable.origin is Origin.CONTAINER and iterable.inputs and iterable.text != "dict":
            return either(iterable.inputs, len(self.program.events))
        if iterable.path == "builtins.enumerate" and iterable.arguments:
            return self._tuple(self.value(Origin.UNKNOWN), self.element(iterable.arguments[0]))
        if iterable.path == "builtins.zip":
            return self._tuple(*map(self.element, iterable.arguments))
        if iterable.method == "items" and iterable.receiver is not None:
            return self._tuple(self.value(Origin.UNKNOWN), self.value(Origin.ELEMENT, (iterable.receiver,)))
        return self.value(Origin.ELEMENT, (iterable,))

    def _tuple(self, *values: Value) -> Value:
        return self.value(Origin.CONTAINER, values, "tuple")

    # Assignment

    def assign(self, target: ast.expr, new: Value, node: ast.AST) -> None:
        """Let `target` stand for `new`."""
        if isinstance(target, ast.Name):
            scope = self.scope.home(target.id)
            self._store(("name", id(scope), target.id), target.id, scope.names.get(target.id), new, None, node)
            scope.names[target.id] = new
        elif isinstance(target, ast.Attribute):
            base = self.evaluate(target.value)
            self._store_field(base, target.attr, target.attr, new, node)
        elif isinstance(target, ast.Subscript):
            base, key = self.evaluate(target.value), self.evaluate(target.slice)
            self._store_field(base, _named(key, target.slice), "[]", new, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, self.value(Origin.CONTAINER, (new,), "list"), node)
        elif isinstance(target, ast.Tuple | ast.List):
            for position, part in enumerate(target.elts):
                self.assign(part, self.item(new, self.value(Origin.CONSTANT, constant=position)), node)

    def _store_field(self, base: Value, key: object, name: str, new: Value, node: ast.AST) -> None:
        old = self._held(base, key) if isinstance(key, tuple) else base.fields.get(key)
        if old is None and isinstance(key, str) and base.definition is not None:
            old = base.definition.lookup(key)
        self._store(("field", id(base), key), name, old, new, base, node)
        base.fields[key] = new

    def _store(
        self,
        place: tuple[str, int, object],
        name: str,
        old: Value | None,
        new: Value,
        holder: Value | None,
        node: ast.AST,
    ) -> None:
        events = self.program.events
        events.append(Store(place, name, old, new, holder, node, self.frame, len(events)))

    # Expressions

    def _name(self, node: ast.Name) -> Value:
        found = self.scope.get(node.id)
        if found is None:
            if node.id in _BUILTINS:
                return self.path(f"builtins.{node.id}")
            found = self.scope.module.names[node.id] = self.value(Origin.UNKNOWN, text=node.id, node=node)
        return found

    def _constant(self, node: ast.Constant) -> Value:
        return self.value(Origin.CONSTANT, constant=node.value, node=node)

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr, node)

    def _subscript(self, node: ast.Subscript) -> Value:
        base, key = self.evaluate(node.value), self.evaluate(node.slice)
        return self.item(base, key if _named(key, node.slice) == _named(key) else self.value(Origin.UNKNOWN))

    def _operation(self, node: ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.Slice) -> Value:
        parts = list(ast.iter_child_nodes(node))
        operands = tuple(self.evaluate(part) for part in parts if isinstance(part, ast.expr))
        operator = next((part for part in parts if not isinstance(part, ast.expr)), node)  # a slice has none
        return self.value(Origin.OPERATION, operands, type(operator).__name__, node=node)

    def _conditional(self, node: ast.IfExp) -> Value:
        self.evaluate(node.test)
        values = [self.evaluate(node.body), self.evaluate(node.orelse)]
        return either(values, len(self.program.events))

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        return self.value(
            Origin.CONTAINER, tuple(map(self.evaluate, node.elts)), type(node).__name__.lower(), node=node
        )

    def _dict(self, node: ast.Dict) -> Value:
        found = self.value(Origin.CONTAINER, tuple(map(self.evaluate, node.values)), "dict", node=node)
        for key, held in zip(node.keys, found.inputs, strict=True):
            if isinstance(key, ast.Constant):
                found.fields[("item", key.value)] = held
        return found

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        outer, self.scope = self.scope, Scope(self.scope)
        for generator in node.generators:
            iterable = self.evaluate(generator.iter)
            self.push(FrameKind.COMPREHENSION, node, iterable)
            self.assign(generator.target, self.element(iterable), node)
            for test in generator.ifs:
                self.evaluate(test)
        held = self.evaluate(node.value if isinstance(node, ast.DictComp) else node.elt)
        for _ in node.generators:
            self.pop()
        self.scope = outer
        text = "dict" if isinstance(node, ast.DictComp) else "list"
        return self.value(Origin.CONTAINER, (held,), text, node=node)

    def _lambda(self, node: ast.Lambda) -> Value:
        definition = Definition(node, self.scope)
        return self.value(Origin.FUNCTION, definition=definition, node=node, text="<lambda>")

    def _starred(self, node: ast.Starred) -> Value:
        return self.value(Origin.CONTAINER, (self.evaluate(node.value),), "starred", node=node)

    def _named(self, node: ast.NamedExpr) -> Value:
        found = self.evaluate(node.value)
        self.assign(node.target, found, node)
        return found

    def _inner(self, node: ast.Await | ast.FormattedValue) -> Value:
        return self.evaluate(node.value)

    def _yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        self.yields.append(self.evaluate(node.value))
        return self.value(Origin.UNKNOWN, node=node)

    def _text(self, node: ast.JoinedStr) -> Value:
        return self.value(Origin.CONTAINER, tuple(map(self.evaluate, node.values)), "text", node=node)

    def _call(self, node: ast.Call) -> Value:
        function = self.evaluate(node.func)
        arguments = tuple(map(self.evaluate, node.args))
        keywords = {keyword.arg or "**": self.evaluate(keyword.value) for keyword in node.keywords}
        is_same = function.origin is Origin.ATTRIBUTE and function.text in SAME_OBJECT
        uses = function.inputs[0].uses if is_same else set[str]()
        inputs = (function, *arguments, *keywords.values())
        made = self.value(Origin.CALL, inputs, node=node, keywords=keywords, uses=uses)
        function.use("()")
        call = Call(made, node, self.frame, len(self.program.events), made)
        self.program.events.append(call)
        call.result = self.follow(call, function, arguments, keywords)
        return call.result


def _named(key: Value, node: ast.expr | None = None) -> tuple[object, ...]:
    """What stands for a key in `fields`; a number held by a name may be another one next time round."""
    known = key.origin is Origin.CONSTANT and isinstance(key.constant, str | int)
    if known and (node is None or isinstance(node, ast.Constant) or isinstance(key.constant, str)):
        return ("item", key.constant)
    return ("item",)
