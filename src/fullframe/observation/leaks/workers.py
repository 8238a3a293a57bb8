"""The loader's processes: host memory that grows with every sample they read, though the data set has no cache.

What counts is their private memory; what they share, as the batches on their way, does not. Which line keeps
something cannot be seen from here: the source of the data set is searched for one.
"""

import ast
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.observation.leaks.origin import Line
from fullframe.observation.leaks.report import Leak, leak
from fullframe.observation.leaks.walk import is_users

_LOOKS = 8  # in a row, at each of which it has grown since the last but one: what it lets go of once is no end
_STEPS = 16
_LEAST_BYTES = 256 * 1024  # a step, of all workers
_ADDS = {"append", "extend", "add", "insert", "appendleft", "update"}


class WorkerMemory:
    """`look` after steps; the leak, once, when a worker's memory has grown at each look and `data` keeps something.

    A cache by sample grows until all are seen, so that lines which assign by a key do not count as keeping.
    """

    def __init__(self, data: Any):
        self._lines = list(lines_that_add(data))
        self._name = type(data).__name__
        self._seen: deque[tuple[int, dict[int, int]]] = deque(maxlen=_LOOKS + 1)  # (step, bytes of each)

    def look(self, step: int) -> Leak | None:
        """The memory of this process's children now."""
        if not self._lines:
            return None
        self._seen.append((step, dict(_private_bytes())))
        return self._judge(step)

    def _judge(self, step: int) -> Leak | None:
        looks = list(self._seen)
        (first, before), (last, now) = looks[0], looks[-1]
        steps = last - first
        if len(looks) <= _LOOKS or steps < _STEPS:
            return None
        growing = [worker for worker in now if _grows([held.get(worker) for _, held in looks])]
        a_step = sum(now[worker] - before[worker] for worker in growing) // steps
        if a_step < _LEAST_BYTES:
            return None
        name = f"{self._name} in the loader's workers"
        return leak("workers", name, None, self._lines[0], a_step, 0, step)


def _grows(sizes: list[int | None]) -> bool:
    """Whether a process that was there at each look has grown; other children of the program come and go."""
    return all(a is not None and c is not None and a < c for a, c in zip(sizes, sizes[2:], strict=False))


def _private_bytes() -> Iterator[tuple[int, int]]:
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may have ended
            memory = child.memory_info()
            yield child.pid, memory.rss - memory.shared


def lines_that_add(data: Any) -> Iterator[Line]:
    """The lines of a data set's class, its constructor aside, that add to something which outlives the call."""
    for kind in type(data).__mro__:
        try:
            file, (source, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
            inner = source[0][0].isspace()  # of a class in a function the text is not dedented: it may hold strings
            tree = ast.parse("if True:\n" * inner + "".join(source))
        except (TypeError, OSError, SyntaxError):  # the latter where the file was changed since
            continue
        if file is None or not is_users(file):
            continue
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                yield from (Line(file, first + number - 1 - inner) for number in _adding_lines(method))


def _adding_lines(method: ast.FunctionDef) -> Iterator[int]:
    local = {name.id for name in ast.walk(method) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS:
            target: ast.expr = node.func.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        else:
            continue
        kept_by_self = isinstance(target, ast.Attribute)
        is_global = isinstance(target, ast.Name) and target.id not in local
        if kept_by_self or is_global:
            yield node.lineno
