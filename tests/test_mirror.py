"""Every module with logic has a test of its own, in the same place below tests.

`src/fullframe/a/b.py` with a function of more than five lines has `tests/a/test_b.py`, which imports it, or a name of
its own, as from the package itself; a file of rules is tested by torch's functions, and imports nothing.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_layers import PACKAGE, SOURCE, imports_of, module_name

TESTS = Path(__file__).parent
LINES = 5

# Tested elsewhere, or not yet. Only shrinks: an entry that is no longer needed fails.
END_TO_END = "its test goes through the package's own door: parallelize, a command, a training run"
COMMANDS = "tests/cli runs the commands"
PLANS = "tests/planning plans with it"
CHECKPOINTS = "tests/training/checkpoints/test_writer.py writes and reads with it"
HOROVOD = "tests/horovod/conformance.py asks every function of the API for it"
_HOROVOD = (
    *("collectives", "context", "execution", "functions", "gradients", "handles", "movements", "objects"),
    *("process_sets", "queries", "reductions", "request", "requests_of"),
)
HOROVOD_JOBS = "tests/horovod/launcher/test_jobs.py runs whole jobs"
EXCEPTIONS: dict[str, str] = {
    **{f"horovod/{name}.py": HOROVOD for name in _HOROVOD},
    **{f"horovod/{name}.py": HOROVOD_JOBS for name in ("elastic/loop", "launcher/workers")},
    "horovod/gradient_reducer.py": "tests/horovod/test_optimizer.py",
    **dict.fromkeys(("cli/train.py", "cli/verify.py"), END_TO_END),
    **dict.fromkeys(("spatial/views.py", "training/faults/nonfinite.py"), END_TO_END),
    **{f"cli/{name}.py": COMMANDS for name in ("comparison", "display", "export")},
    **{f"cli/{name}.py": COMMANDS for name in ("simulate", "strategy_file")},
    **{f"cli/doctor/{name}.py": COMMANDS for name in ("report", "rank", "links")},
    **{f"planning/{name}.py": PLANS for name in ("estimate", "ranking")},
    "training/checkpoints/optimizer_state.py": CHECKPOINTS,
    "training/checkpoints/state.py": CHECKPOINTS,
    "processes/orphans.py": "tests/processes/test_launch.py kills launchers",
    "spatial/dispatch.py": "every test of a rule; tests/spatial/test_calls.py",
    "spatial/rules/gradient_hooks.py": "tests/spatial/test_gradients.py",
    "techniques/update_in_backward.py": "tests/techniques/test_optimizers.py",
    "training/steps.py": "tests/training/test_loop.py",
}


def missing(sources: Mapping[str, str], tests: Mapping[str, str]) -> dict[str, str]:
    """The modules (path below the package) that lack their test, with what is wrong."""
    found = {}
    for path, source in sources.items():
        folder, _, name = path.rpartition("/")
        place = f"{folder}/test_{name}".lstrip("/")
        if name.startswith("__") or not _has_logic(source):
            continue
        if place not in tests:
            found[path] = f"there is no tests/{place}"
        elif not folder.endswith("/rules") and not _is_named(path, source, f"tests/{place}", tests[place]):
            found[path] = f"tests/{place} imports nothing of it"
    return found


def _has_logic(source: str) -> bool:
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return any((f.end_lineno or 0) - f.lineno >= LINES for f in functions)


def _is_named(path: str, source: str, test_path: str, test: str) -> bool:
    module, own = module_name(f"{PACKAGE}/{path}"), set(_defined(source))
    for item in imports_of(test_path, test):
        if module in (item.target, f"{item.target}.{item.name}"):
            return True
    return any(isinstance(n, ast.Attribute | ast.Name) and _name(n) in own for n in ast.walk(ast.parse(test)))


def _defined(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def _name(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def read(folder: Path, pattern: str) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob(pattern)}


def test_every_module_with_logic_has_its_test() -> None:
    found = missing(read(SOURCE / PACKAGE, "*.py"), read(TESTS, "test_*.py"))
    assert {path: said for path, said in found.items() if path not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) - set(found) == set(), "has its test now: take it out of EXCEPTIONS"


LONG = "def f():\n" + "    x = 1\n" * LINES
GOOD_TESTS = {"ranks/test_mesh.py": "from fullframe.ranks.mesh import f", "spatial/rules/test_pooling.py": ""}


def test_the_check_can_fail() -> None:
    sources = {
        "ranks/mesh.py": LONG,
        "spatial/rules/pooling.py": LONG,
        "errors.py": "class E: ...",
        "__init__.py": LONG,
    }
    assert missing(sources, GOOD_TESTS) == {}
    assert missing({**sources, "ranks/tags.py": LONG}, GOOD_TESTS) == {
        "ranks/tags.py": "there is no tests/ranks/test_tags.py"
    }
    for test, wrong in (
        ("import fullframe as ff\nff.f()", False),
        ("from fullframe.ranks import mesh", False),
        ("from fullframe.ranks import tags", True),
        ("", True),
    ):
        assert bool(missing(sources, {**GOOD_TESTS, "ranks/test_mesh.py": test})) is wrong
