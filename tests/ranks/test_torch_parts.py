"""Parts of torch that it does not promise: all that the source names are there, and one that is not is told at once."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fullframe.errors import MeshError
from fullframe.ranks.torch_parts import PARTS, TESTED, require_parts
from tests.test_layers import PACKAGE, SOURCE

ROOT = Path(SOURCE) / PACKAGE
# By folder of a step, and by module of torch: what compiles and what simulates is asked for before a run begins.
NO_STEP = ("simulation", "model/compiled", "doctor")
LAZY = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._guards",
    "torch.utils",
    "torch.nn",
    "torch.dist",
    "torch.ops.mkldnn",  # which a torch for other processors lacks
)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def named(source: str) -> Iterator[tuple[str, bool]]:
    """Private names of torch in a source, and whether they are imported from their module."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = _dotted(node)
            if name.startswith("torch.") and _is_private(name):
                yield name, False
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((name, True) for name in names if _is_private(name))


def _there(name: str) -> bool:
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(value, part):
            try:
                value = import_module(path)
            except ImportError:
                return False
        else:
            value = getattr(value, part)
    return True


def test_all_that_the_source_names_is_in_this_torch() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    names = {(name, path) for path, source in files.items() for name, _ in named(source)}
    missing = sorted((name, path) for name, path in names if not _there(name))
    assert not missing, f"torch {torch.__version__} has no {missing}"
    of_steps = {
        name for path, source in files.items() if not path.startswith(NO_STEP)
        for name, is_imported in named(source) if not is_imported and not name.startswith(LAZY)
    }  # fmt: skip
    assert of_steps == set(PARTS), "hold PARTS of ranks/torch_parts.py together with what the source names"


def test_the_check_can_fail() -> None:
    source = "from torch.utils import a, _d\nimport torch\ntorch._C._b(x)\ntorch.c"
    assert sorted(named(source)) == [("torch._C._b", False), ("torch.utils._d", True)]
    assert _there("torch._inductor.config") and not _there("torch._C._gone") and not _there("torch.gone.more")


def test_a_torch_without_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    require_parts()
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    with pytest.raises(MeshError, match=rf"torch .* has no torch\._C\._storage_Use_Count.* torch {TESTED[0]} to"):
        require_parts()
