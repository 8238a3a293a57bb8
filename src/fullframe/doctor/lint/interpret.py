"""Runs a file in the abstract: each statement once, calls of the file's own functions followed where they stand.

A loop's body is run once; where a name may stand for several things it stands for either. What no call reached is run
afterwards by itself, with parameters about which nothing is known. Nothing of the file is executed.
"""

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fullframe.doctor.lint.expressions import Evaluator
from fullframe.doctor.lint.grad_mode import SETS_GRAD, grad_within
from fullframe.doctor.lint.program import Call, FrameKind, Program
from fullframe.doctor.lint.values import Definition, Origin, Scope, Value, either

_DEPTH = 6  # calls within calls that are followed
_STATEMENTS, _STATEMENTS_A_LINE = 2_000, 3  # run in one file before calls are no longer followed

Function = ast.FunctionDef | ast.AsyncFunctionDef


def interpret(source: str, tree: ast.Module, wanted: Callable[[ast.AST], bool] = lambda node: True) -> Program:
    """Run the file. `wanted`: whether a function that nothing calls is to be run as well."""
    program = Program(source, tree)
    _Interpreter(program).run_file(tree, wanted)
    program.index()
    return program


class _Interpreter(Evaluator):
    def __init__(self, program: Program):
        super().__init__(program)
        self._active: list[Definition] = []
        self._run_texts: set[int] = set()  # ids of the functions and classes that were run
        self._left = _STATEMENTS + _STATEMENTS_A_LINE * len(program.lines)
        self._runners: dict[type[ast.AST], Callable[[Any], bool | None]] = {
            ast.Expr: self._expression, ast.Assign: self._assignment, ast.AugAssign: self._augmented,
            ast.AnnAssign: self._annotated, ast.For: self._for, ast.AsyncFor: self._for, ast.While: self._while,
            ast.If: self._if, ast.With: self._with, ast.AsyncWith: self._with, ast.Try: self._try,
            ast.TryStar: self._try, ast.Return: self._return, ast.Raise: self._raise,
            ast.FunctionDef: self._function, ast.AsyncFunctionDef: self._function, ast.ClassDef: self._class,
            ast.Import: self._import, ast.ImportFrom: self._import_from, ast.Global: self._global,
            ast.Nonlocal: self._nonlocal, ast.Break: self._ends, ast.Continue: self._ends, ast.Match: self._match,
            ast.Assert: self._assert, ast.Delete: self._delete,
        }  # fmt: skip

    def run_file(self, tree: ast.Module, wanted: Callable[[ast.AST], bool]) -> None:
        """The module's own statements, then what they did not reach."""
        self._run(tree.body)
        position = 0
        while position < len(self.program.definitions):  # grows: functions hold functions
            definition = self.program.definitions[position]
            position += 1
            # A function that is run again defines its inner functions again, as other definitions of the same text.
            if id(definition.node) in self._run_texts or isinstance(definition.node, ast.Lambda):
                continue
            if not wanted(definition.node):
                continue
            if isinstance(definition.node, ast.ClassDef):
                self._instantiate(definition, (), {}, definition.node, unknown=True)
            else:
                self._run_alone(definition)
        self.frame.stop = len(self.program.events)

    def _run_alone(self, definition: Definition) -> None:
        bound: tuple[Value, ...] = ()
        if definition.owner is not None:
            if id(definition.owner) not in self.program.generic:
                self._instantiate(definition.owner, (), {}, definition.node, unknown=True)
            bound = (self.program.generic[id(definition.owner)],)
            if id(definition.node) in self._run_texts:
                return
        function = self.value(Origin.FUNCTION, bound, definition=definition)
        self._left = max(self._left, _STATEMENTS // 2)
        self._enter(function, None, {}, definition.node)

    def _run(self, body: Iterable[ast.stmt]) -> bool:
        """Run statements; True where the block is left before its end."""
        for statement in body:
            self._left -= 1
            runner = self._runners.get(type(statement))
            if runner is not None and runner(statement):
                return True
        return False

    # Plain statements

    def _expression(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Attribute):
            self.program.bare.append((node.value, self.evaluate(node.value.value)))
        found = self.evaluate(node.value)
        if found.path in SETS_GRAD:
            self.grad = grad_within(found, self.grad)

    def _assignment(self, node: ast.Assign) -> None:
        new = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, new, node)

    def _augmented(self, node: ast.AugAssign) -> None:
        old, added = self.evaluate(node.target), self.evaluate(node.value)
        self.assign(node.target, self.value(Origin.OPERATION, (old, added), type(node.op).__name__, node=node), node)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value), node)

    def _return(self, node: ast.Return) -> bool:
        frame = self.frame.innermost(FrameKind.FUNCTION)
        found = self.evaluate(node.value)
        if frame is not None:
            frame.returned.append(found)
        return True

    def _raise(self, node: ast.Raise) -> bool:
        if node.exc is not None:
            self.evaluate(node.exc)
        return True

    def _ends(self, node: ast.AST) -> bool:
        return True

    def _assert(self, node: ast.Assert) -> None:
        self.evaluate(node.test)

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.assign(target, self.value(Origin.CONSTANT, constant=None), node)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.scope.home(name).names[name] = self.path(alias.name if alias.asname else name)
            self.path(alias.name)

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            name = alias.asname or alias.name
            dot = "" if module.endswith(".") else "."
            self.scope.home(name).names[name] = self.path(f"{module}{dot}{alias.name}")

    def _global(self, node: ast.Global) -> None:
        for name in node.names:
            self.scope.elsewhere[name] = self.scope.module

    def _nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            scope = self.scope.parent
            while scope is not None and name not in scope.names:
                scope = scope.parent
            if scope is not None:
                self.scope.elsewhere[name] = scope

    # Blocks

    def _branches(self, arms: Sequence[Callable[[], bool]]) -> bool:
        """Run each arm from the same names; afterwards a name stands for either. True where every arm leaves."""
        scope, before, grad = self.scope, self.scope.names, self.grad
        ends: list[dict[str, Value]] = []
        for arm in arms:
            scope.names = dict(before)
            if not arm():
                ends.append(scope.names)
            self.grad = grad
        scope.names = before
        if not ends:
            return True
        scope.names = self._merged(ends)
        return False

    def _merged(self, ends: list[dict[str, Value]]) -> dict[str, Value]:
        merged = dict(ends[0])
        for other in ends[1:]:
            for name, value in other.items():
                known = merged.get(name)
                if known is None:
                    merged[name] = value
                elif known is not value:
                    merged[name] = either((known, value), len(self.program.events))
        return merged

    def _framed(
        self, kind: FrameKind, node: ast.AST, body: list[ast.stmt], value: Value | None, arm: bool = True
    ) -> bool:
        self.push(kind, node, value, arm=arm)
        leaves = self._run(body)
        self.pop()
        return leaves

    def _if(self, node: ast.If) -> bool:
        test = self.evaluate(node.test)
        arms = (node.body, True), (node.orelse, False)
        return self._branches([partial(self._framed, FrameKind.IF, node, body, test, arm) for body, arm in arms])

    def _match(self, node: ast.Match) -> bool:
        subject = self.evaluate(node.subject)
        arms = [partial(self._framed, FrameKind.IF, node, case.body, subject) for case in node.cases]
        return self._branches([*arms, lambda: False])

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        iterable = self.evaluate(node.iter)
        self._loop(node, iterable, lambda: self.assign(node.target, self.element(iterable), node))

    def _while(self, node: ast.While) -> None:
        self._loop(node, self.evaluate(node.test), lambda: None)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, value: Value, begin: Callable[[], None]) -> None:
        before = dict(self.scope.names)
        self.push(FrameKind.LOOP, node, value)
        begin()
        self._run(node.body)
        self.pop()
        self.scope.names = self._merged([before, self.scope.names])
        self._run(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> bool:
        grad = self.grad
        for item in node.items:
            context = self.evaluate(item.context_expr)
            self.grad = grad_within(context, self.grad)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, context, node)
            self.push(FrameKind.WITH, node, context)
        leaves = self._run(node.body)
        for _ in node.items:
            self.pop()
        self.grad = grad
        return leaves

    def _try(self, node: ast.Try | ast.TryStar) -> bool:
        def attempt() -> bool:
            return self._framed(FrameKind.TRY, node, node.body, None) or self._run(node.orelse)

        def handle(handler: ast.ExceptHandler) -> Callable[[], bool]:
            kind = self.evaluate(handler.type)
            return lambda: self._framed(FrameKind.EXCEPT, handler, handler.body, kind)

        leaves = self._branches([attempt, *map(handle, node.handlers)])
        return self._run(node.finalbody) or leaves

    # Functions and classes

    def _function(self, node: Function) -> None:
        decorators = tuple(map(self.evaluate, node.decorator_list))
        definition = Definition(node, self.scope, decorators=decorators)
        self.program.definitions.append(definition)
        self.scope.home(node.name).names[node.name] = self.value(
            Origin.FUNCTION, text=node.name, definition=definition, node=node
        )

    def _class(self, node: ast.ClassDef) -> None:
        bases = tuple(self.evaluate(base) for base in node.bases if not isinstance(base, ast.Starred))
        decorators = tuple(map(self.evaluate, node.decorator_list))
        outer, self.scope = self.scope, Scope(self.scope, is_class=True)
        definition = Definition(node, self.scope, bases, self.scope.names, decorators=decorators)
        first = len(self.program.definitions)
        self.program.definitions.append(definition)
        self._run(node.body)
        definition.members = self.scope.names
        for inner in self.program.definitions[first + 1 :]:
            if inner.scope is self.scope:
                inner.owner = definition
        self.scope = outer
        outer.home(node.name).names[node.name] = self.value(
            Origin.CLASS, text=node.name, definition=definition, node=node
        )

    def follow(self, call: Call, function: Value, arguments: Sequence[Value], keywords: dict[str, Value]) -> Value:
        """What the call gives; functions and classes of this file are run with these arguments."""
        results = []
        for member in function.members():
            result = self._followed(member, tuple(arguments), keywords, call)
            call.followed = call.followed or result is not None
            results.append(call.value if result is None else result)
        return either(results, len(self.program.events))

    def _followed(
        self, function: Value, arguments: tuple[Value, ...], keywords: dict[str, Value], call: Call
    ) -> Value | None:
        if function.path == "functools.partial" and function.arguments:
            given = {**function.keywords, **keywords}
            return self._followed(function.arguments[0], (*function.arguments[1:], *arguments), given, call)
        if function.origin is Origin.CLASS and function.definition is not None:
            return self._instantiate(function.definition, arguments, keywords, call.node)
        if function.origin is Origin.INSTANCE and function.definition is not None:
            called = function.definition.lookup("__call__")
            if called is None or called.definition is None:
                return None
            function = self.value(Origin.FUNCTION, (function,), "__call__", definition=called.definition)
        if function.origin is not Origin.FUNCTION or function.definition is None:
            return None
        return self._enter(function, arguments, keywords, call.node)

    def _instantiate(
        self,
        definition: Definition,
        arguments: tuple[Value, ...],
        keywords: dict[str, Value],
        node: ast.AST,
        unknown: bool = False,
    ) -> Value:
        self._run_texts.add(id(definition.node))
        instance = self.value(Origin.INSTANCE, (), definition.name, definition=definition, node=node)
        self.program.generic.setdefault(id(definition), instance)
        made = definition.lookup("__init__")
        if made is not None and made.definition is not None:
            function = self.value(Origin.FUNCTION, (instance,), "__init__", definition=made.definition)
            self._enter(function, None if unknown else arguments, keywords, node)
        elif not unknown and isinstance(definition.node, ast.ClassDef):  # a dataclass
            annotated = (statement for statement in definition.node.body if isinstance(statement, ast.AnnAssign))
            names = [each.target.id for each in annotated if isinstance(each.target, ast.Name)]
            instance.fields.update({**dict(zip(names, arguments, strict=False)), **keywords})
        return instance

    def _enter(
        self, function: Value, arguments: tuple[Value, ...] | None, keywords: dict[str, Value], node: ast.AST
    ) -> Value | None:
        """Run a function of this file; `arguments` None: nothing is known of them. None where it is not followed."""
        definition = function.definition
        assert definition is not None
        if definition in self._active or len(self._active) >= _DEPTH or self._left < 0:
            return None
        self._run_texts.add(id(definition.node))
        body = definition.node
        assert not isinstance(body, ast.ClassDef)
        outer, grad, yields = self.scope, self.grad, self.yields
        self.scope, self.yields = Scope(definition.scope), []
        bound = () if "staticmethod" in {d.text.rpartition(".")[2] for d in definition.decorators} else function.inputs
        self._bind(body.args, bound, arguments, keywords)
        self._active.append(definition)
        for decorator in definition.decorators:
            self.push(FrameKind.WITH, node, decorator)
            if not decorator.text.endswith((".setter", ".getter")):
                self.grad = grad_within(decorator, self.grad)
        frame = self.push(FrameKind.FUNCTION, body, None, definition=definition)
        if isinstance(body, ast.Lambda):
            frame.returned.append(self.evaluate(body.body))
        elif not self._run(body.body):
            frame.returned.append(self.value(Origin.CONSTANT, constant=None))
        for _ in (frame, *definition.decorators):
            self.pop()
        self._active.pop()
        if self.yields:
            result = self.value(Origin.CONTAINER, tuple(self.yields), "list")
        else:
            result = either([v for v in frame.returned if v.constant is not None] or frame.returned)
        self.scope, self.grad, self.yields = outer, grad, yields
        return result

    def _bind(
        self,
        given: ast.arguments,
        bound: tuple[Value, ...],
        arguments: tuple[Value, ...] | None,
        keywords: dict[str, Value],
    ) -> None:
        names = self.scope.names
        positional = [*given.posonlyargs, *given.args]
        values = (*bound, *(arguments or ()))
        defaults = dict(zip([a.arg for a in positional[::-1]], given.defaults[::-1], strict=False))
        defaults.update({a.arg: d for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None})
        opaque = "**" in keywords or any(v.text == "starred" for v in values)
        for position, parameter in enumerate([*positional, *given.kwonlyargs]):
            name = parameter.arg
            if position < min(len(values), len(positional)) and values[position].text != "starred":
                names[name] = values[position]
            elif name in keywords:
                names[name] = keywords[name]
            elif arguments is not None and not opaque and name in defaults:
                names[name] = self.evaluate(defaults[name])
            else:
                names[name] = self.value(Origin.PARAMETER, text=name, node=parameter)
        if given.vararg is not None:
            rest = tuple(values[len(positional) :])
            names[given.vararg.arg] = (
                self._tuple(*rest) if rest else self.value(Origin.PARAMETER, text=given.vararg.arg)
            )
        if given.kwarg is not None:
            names[given.kwarg.arg] = self.value(Origin.PARAMETER, text=given.kwarg.arg)
