"""The house rules, checked on the source text: files and functions stay short, no mocks, private names stay at home.

What breaks a rule today stands in `ALLOWED`, which only shrinks: an entry that is no longer needed fails as well.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.test_layers import PACKAGE, SOURCE, Import, imports_of, module_name, resolved

FILE_LINES = 400
FUNCTION_LINES = 60

ALLOWED: set[str] = set()


def breaches(files: Mapping[str, str]) -> set[str]:
    """What breaks a house rule in `files` (path below `src` -> source), one sentence each."""
    modules = {module_name(path) for path in files}
    return {f"{path}: {said}" for path, source in files.items() for said in _breaches(path, source, modules)}


def _breaches(path: str, source: str, modules: set[str]) -> Iterator[str]:
    if len(source.splitlines()) > FILE_LINES:
        yield f"is over {FILE_LINES} lines"
    nodes, imports = list(ast.walk(ast.parse(source, path))), imports_of(path, source)
    for node in nodes:
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES:
            yield f"{node.name} is over {FUNCTION_LINES} lines"
    for item in imports:
        if "mock" in [*item.target.split("."), item.name]:
            yield "imports mock"
        if _private(item.name) and _elsewhere(item.target, path):
            yield f"imports {item.name} of {item.target}"
    known = dict(_names_of_modules(nodes, imports, modules))
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _private(node.attr):
            target = known.get(node.value.id)
            if target is not None and _elsewhere(target, path):
                yield f"uses {node.attr} of {target}"


def _names_of_modules(
    nodes: Sequence[ast.AST], imports: Sequence[Import], modules: set[str]
) -> Iterator[tuple[str, str]]:
    """The names that stand for a module of the package in this file."""
    renamed = {alias.asname: alias.name for node in nodes for alias in getattr(node, "names", ())
               if isinstance(alias, ast.alias) and alias.asname}  # fmt: skip
    for item in imports:
        target = resolved(item, modules)
        if target not in modules:
            continue
        plain = item.name or item.target
        yield plain, target
        for name, meant in renamed.items():
            if meant == plain:
                yield name, target


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _elsewhere(target: str, path: str) -> bool:
    """Whether `target` is a module of the package that lies in another folder than `path`."""
    return target.partition(".")[0] == PACKAGE and target.rpartition(".")[0] != ".".join(path.split("/")[:-1])


def test_the_package_keeps_the_house_rules() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    assert f"{PACKAGE}/__init__.py" in files
    found = breaches(files)
    assert found - ALLOWED == set()
    assert ALLOWED - found == set(), "mended: take it out of ALLOWED"


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * FUNCTION_LINES

GOOD = {
    "fullframe/__init__.py": "from fullframe._build import __version__",
    "fullframe/ranks/mesh.py": "def _made(): ...\n" + "\n" * (FILE_LINES - 1),
    "fullframe/ranks/exchange.py": "from fullframe.ranks.mesh import _made\nfrom . import mesh\nmesh._made()",
    "fullframe/spatial/halo.py": "import torch\nfrom fullframe.ranks import mesh\ntorch._dynamo\nmesh.made()",
    "fullframe/spatial/spec.py": "class A:\n" + LONG_FUNCTION.replace("    x = 1\n", "", 1).replace("def", " def", 1),
}


def test_a_tidy_package_passes() -> None:
    assert breaches(GOOD) == set()


BAD = [
    # source of fullframe/spatial/halo.py, what the sentence says
    ("x = 1\n" * (FILE_LINES + 1), "is over 400 lines"),
    (LONG_FUNCTION, "f is over 60 lines"),
    ("class A:\n    async def g(self):\n" + "        x = 1\n" * FUNCTION_LINES, "g is over 60 lines"),
    ("from unittest.mock import patch", "imports mock"),
    ("def f():\n    from unittest import mock", "imports mock"),
    ("import unittest.mock as m", "imports mock"),
    ("from fullframe.ranks.mesh import _made", "imports _made of fullframe.ranks.mesh"),
    ("def f():\n    from ..ranks.mesh import _made", "imports _made of fullframe.ranks.mesh"),
    ("from fullframe.spatial.rules.pooling import _x", "imports _x of fullframe.spatial.rules.pooling"),
    ("from fullframe.ranks import mesh\nmesh._made()", "uses _made of fullframe.ranks.mesh"),
    ("from fullframe.ranks import mesh as m\nm._made()", "uses _made of fullframe.ranks.mesh"),
    ("import fullframe.ranks.mesh as m\nm._made()", "uses _made of fullframe.ranks.mesh"),
]


@pytest.mark.parametrize(("source", "said"), BAD)
def test_a_breach_is_found(source: str, said: str) -> None:
    assert breaches({**GOOD, "fullframe/spatial/halo.py": source}) == {f"fullframe/spatial/halo.py: {said}"}
