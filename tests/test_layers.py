"""The layers of the design, checked on the source text: who may import whom, and who must load without torch.

    9  cli
    8  doctor  launching
    7  planning  observation
    6  simulation  verification
    5  training  horovod
    4  techniques
    3  model
    2  spatial
    1  ranks  strategy  recipe  data
    0  geometry  processes  technique  arguments
       errors  wording, for all

A module imports from its own folder and from lower numbers; never from a higher one, never from another folder of the
same number; within a folder imports make no circle. An import counts wherever it stands: in a function, under
`if TYPE_CHECKING`, relative, or as `import_module("...")`.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "fullframe"

LAYERS = {
    "errors": -1,
    "wording": -1,
    "arguments": 0,
    "geometry": 0,
    "processes": 0,
    "technique": 0,
    "ranks": 1,
    "strategy": 1,
    "recipe": 1,
    "data": 1,
    "spatial": 2,
    "model": 3,
    "techniques": 4,
    "training": 5,
    "horovod": 5,
    "simulation": 6,
    "verification": 6,
    "planning": 7,
    "observation": 7,
    "doctor": 8,
    "launching": 8,
    "cli": 9,
    "__main__": 10,
}
TORCH = {"torch", "torchvision"}
NEVER_TORCH = {"geometry", "errors", "wording", "arguments"}  # not even inside a function
TORCH_ONLY_IN_FUNCTIONS = {"cli", "launching", "processes", "strategy", "technique", "recipe", "__init__", "__main__"}


class Import(NamedTuple):
    """One imported dotted name; `name` is set for `from target import name`; `runs` when loading the module runs it."""

    target: str
    name: str
    line: int
    runs: bool


def module_name(path: str) -> str:
    """`fullframe/spatial/mesh.py` -> `fullframe.spatial.mesh`; a package's `__init__.py` is the package."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The first name below the package: what a layer is given to. The package itself is `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(path: str, source: str) -> list[Import]:
    """Every import in `source`, with relative ones made absolute."""
    package = module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
    return list(_imports(ast.parse(source, path), package, runs=True))


def _imports(node: ast.AST, package: str, runs: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, "", node.lineno, runs)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        above = parents[: len(parents) - node.level + 1] if node.level else []
        target = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield Import(target, alias.name, node.lineno, runs)
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            yield Import(str(first.value), "", node.lineno, runs)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, package, runs=False)
        for child in node.orelse:
            yield from _imports(child, package, runs)
        return
    in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, runs and not in_function)


def resolved(item: Import, modules: set[str]) -> str:
    """The module meant: `from fullframe.spatial import mesh` means `fullframe.spatial.mesh` where that exists."""
    longer = f"{item.target}.{item.name}" if item.name else item.target
    return longer if longer in modules else item.target


def loaded_with(target: str, importer: str, modules: set[str]) -> list[str]:
    """The modules of the package that importing `target` executes, but for those that hold `importer` already."""
    parts = target.split(".")
    chain = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    return [m for m in chain if m in modules and (m == target or not f"{importer}.".startswith(f"{m}."))]


def is_torch(target: str) -> bool:
    return target.partition(".")[0] in TORCH


def violations(files: Mapping[str, str]) -> list[str]:
    """What breaks the layer rule in `files` (path below `src` -> source), one sentence each."""
    modules = {module_name(path) for path in files}
    imports = {module_name(path): imports_of(path, source) for path, source in files.items()}
    paths = {module_name(path): path for path in files}
    found = []
    for module, items in imports.items():
        for item in items:
            reason = _forbidden(module, item, modules)
            if reason:
                found.append(f"{paths[module]}:{item.line}: {reason}")
    found += [f"{paths[chain[0]]}: loads torch: {' -> '.join(chain)}" for chain in _torch_chains(imports)]
    found += [f"{paths[circle[0]]}: import circle: {' -> '.join(circle)}" for circle in _circles(imports)]
    return found


def _forbidden(module: str, item: Import, modules: set[str]) -> str | None:
    """Why `module` may not have this one import, or None."""
    folder = folder_of(module)
    if folder != "__init__" and folder not in LAYERS:
        return f"{folder} has no layer; give it one in LAYERS and in the design"
    if is_torch(item.target) and (folder in NEVER_TORCH or (folder in TORCH_ONLY_IN_FUNCTIONS and item.runs)):
        return f"{folder} imports {item.target}" + ("" if folder in NEVER_TORCH else " outside a function")
    target = resolved(item, modules)
    if target.partition(".")[0] != PACKAGE or folder == "__init__":
        return None
    other = folder_of(target)
    if other == "__init__":
        allowed = item.name == "__version__"
        return None if allowed else f"{folder} imports {PACKAGE} itself; of it only `from {PACKAGE} import __version__`"
    if other not in LAYERS:
        return f"{folder} imports {target}, which has no layer; give it one in LAYERS and in the design"
    if other != folder and LAYERS[other] >= LAYERS[folder]:
        return f"{folder} (layer {LAYERS[folder]}) imports {target} (layer {LAYERS[other]})"
    return None


def _torch_chains(imports: Mapping[str, list[Import]]) -> Iterator[list[str]]:
    """For each module that must load without torch: the shortest way on which it loads torch through others."""
    modules = set(imports)
    for start in imports:
        if folder_of(start) not in NEVER_TORCH | TORCH_ONLY_IN_FUNCTIONS:
            continue
        ways, seen = [[start]], {start}
        for way in ways:  # grows while it is walked: breadth first
            running = [item for item in imports[way[-1]] if item.runs]
            if len(way) > 1 and any(is_torch(item.target) for item in running):
                yield [*way, "torch"]
                break
            for item in running:
                fresh = [m for m in loaded_with(resolved(item, modules), way[-1], modules) if m not in seen]
                ways += [[*way, m] for m in fresh]
                seen.update(fresh)


def _circles(imports: Mapping[str, list[Import]]) -> Iterator[list[str]]:
    """One circle from each module that lies on one, named once from its alphabetically first module."""
    modules = set(imports)
    edges = {
        module: sorted(
            {
                target
                for item in items
                for target in loaded_with(resolved(item, modules), module, modules)
                if target != module and folder_of(target) == folder_of(module)
            }
        )
        for module, items in imports.items()
        if folder_of(module) != "__init__"
    }
    for start in sorted(edges):
        ways, seen = [[start]], {start}
        for way in ways:
            if start in edges[way[-1]]:
                if start == min(way):
                    yield [*way, start]
                break
            for target in edges[way[-1]]:
                if target not in seen:
                    seen.add(target)
                    ways.append([*way, target])


def test_the_package_keeps_its_layers() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    assert f"{PACKAGE}/__init__.py" in files
    assert violations(files) == []


GOOD = {
    "fullframe/__init__.py": "def __getattr__(name):\n    from fullframe.spatial.mesh import init_mesh",
    "fullframe/errors.py": "",
    "fullframe/geometry/__init__.py": "from fullframe.geometry.window import Window",
    "fullframe/geometry/window.py": "from .extents import Extents",
    "fullframe/geometry/extents.py": "from fullframe.errors import FullframeError",
    "fullframe/strategy.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    "fullframe/spatial/__init__.py": "from . import mesh\nfrom .rules import pointwise",
    "fullframe/spatial/mesh.py": "import torch\nfrom ..geometry import Window",
    "fullframe/spatial/rules/__init__.py": "from fullframe.spatial.rules import pointwise",
    "fullframe/spatial/rules/pointwise.py": "from .registry import y\nimport fullframe.spatial.mesh as m",
    "fullframe/spatial/rules/registry.py": "import torch.nn.functional as F",
    "fullframe/training/step.py": "from fullframe.spatial import mesh\nfrom fullframe.strategy import Strategy",
    "fullframe/simulation/trace.py": "from fullframe.training.step import TrainStep",
    "fullframe/processes/launch.py": "from fullframe.errors import X\ndef f():\n    import torch",
    "fullframe/cli/train.py": "from fullframe import __version__\ndef f():\n    from fullframe.training import step",
}


def test_a_layered_package_passes() -> None:
    assert violations(GOOD) == []


BAD = [
    # path, source, what the sentence says
    (
        "fullframe/geometry/window.py",
        "import fullframe.spatial.mesh",
        "geometry (layer 0) imports fullframe.spatial.mesh",
    ),
    ("fullframe/spatial/mesh.py", "from fullframe.training.step import TrainStep", "imports fullframe.training.step"),
    ("fullframe/spatial/mesh.py", "def f():\n    from fullframe.training import step", "mesh.py:2: spatial (layer 2)"),
    ("fullframe/spatial/mesh.py", "from ..training import step", "spatial (layer 2) imports fullframe.training.step"),
    ("fullframe/spatial/mesh.py", "from .. import training", "imports fullframe itself"),
    (
        "fullframe/spatial/rules/registry.py",
        "from ...training.step import T",
        "imports fullframe.training.step (layer 5)",
    ),
    (
        "fullframe/ranks/mesh.py",
        "from fullframe.strategy import Strategy",
        "(layer 1) imports fullframe.strategy (layer 1)",
    ),
    (
        "fullframe/strategy.py",
        "from fullframe.spatial.mesh import x",
        "strategy (layer 1) imports fullframe.spatial.mesh",
    ),
    ("fullframe/simulation/trace.py", "from fullframe.observation.metrics import x", "imports fullframe.observation"),
    ("fullframe/errors.py", "from fullframe.geometry.window import Window", "errors (layer -1) imports"),
    ("fullframe/training/step.py", "import fullframe as ff", "training imports fullframe itself"),
    ("fullframe/training/step.py", "from fullframe import parallelize", "training imports fullframe itself"),
    (
        "fullframe/training/step.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fullframe.cli.train import x",
        "training (layer 5) imports fullframe.cli.train (layer 9)",
    ),
    ("fullframe/training/step.py", "import importlib\nimportlib.import_module('fullframe.cli.train')", "layer 9"),
    ("fullframe/extras/new.py", "import math", "extras has no layer"),
    ("fullframe/training/step.py", "from fullframe.extras.new import x", "fullframe.extras.new, which has no layer"),
    # circles
    (
        "fullframe/geometry/extents.py",
        "from fullframe.geometry.window import Window",
        "extents -> fullframe.geometry.window",
    ),
    ("fullframe/spatial/mesh.py", "def f():\n    import fullframe.spatial.rules.pointwise", "import circle"),
    ("fullframe/spatial/mesh.py", "from fullframe.spatial import anything", "import circle"),
    ("fullframe/spatial/mesh.py", "from fullframe.spatial.rules.registry import y", "mesh -> fullframe.spatial.rules"),
    # torch
    ("fullframe/geometry/extents.py", "def f():\n    import torch", "geometry imports torch"),
    ("fullframe/geometry/extents.py", "from torch import nn", "geometry imports torch"),
    ("fullframe/cli/train.py", "import torch.distributed as dist", "cli imports torch.distributed outside a function"),
    (
        "fullframe/processes/launch.py",
        "try:\n    from torch import nn\nexcept ImportError:\n    pass",
        "processes imports",
    ),
    ("fullframe/processes/launch.py", "class A:\n    import torch", "processes imports torch outside a function"),
    ("fullframe/__init__.py", "import torch", "__init__ imports torch outside a function"),
    ("fullframe/__init__.py", "from fullframe.training.step import TrainStep", "fullframe.spatial.mesh -> torch"),
    (
        "fullframe/cli/train.py",
        "from fullframe.training.step import TrainStep",
        "cli.train -> fullframe.training.step -> ",
    ),
    ("fullframe/strategy.py", "import torch", "fullframe.cli.train -> fullframe.strategy"),
]


@pytest.mark.parametrize(("path", "source", "said"), BAD)
def test_a_breach_is_found(path: str, source: str, said: str) -> None:
    files = {
        **GOOD,
        "fullframe/cli/train.py": "from fullframe.processes import launch\nfrom fullframe.strategy import x",
        path: source,
    }
    found = violations(files)
    assert any(said in sentence for sentence in found), found
