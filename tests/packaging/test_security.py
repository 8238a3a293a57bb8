"""SECURITY.md says where something is unpickled or run; the source text is asked whether that is all."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT

PACKAGE = ROOT / "src/fullframe"
TEXT = (ROOT / "SECURITY.md").read_text()

# Files that unpickle, or call what does.
UNPICKLING = {
    *("ranks/agreement.py", "ranks/random_states.py", "ranks/shared_memory.py", "ranks/stage_messages.py"),
    *("training/evaluation.py", "verification/verify.py", "verification/reference.py"),
    *("horovod/objects.py", "horovod/table.py"),
}
# Files that run other programs, or Python that is not the package's.
RUNNING = {
    "recipe.py": "a recipe",
    "cli/__init__.py": "fullframe itself",
    "cli/comparison.py": "fullframe itself",
    "cli/launch.py": "launch",
    "cli/remedies.py": "fullframe itself",
    "doctor/rehearsal/rank.py": "doctor run",
    "horovod/__main__.py": "horovodrun",
    "horovod/launcher/hosts.py": "--host-discovery-script",
    "horovod/launcher/workers.py": "horovodrun",
    "launching/allocation.py": "scontrol",
    "launching/kubernetes.py": "kubectl",
    "launching/slurm.py": "sbatch",
    "processes/rank_processes.py": "the ranks",
    "simulation/compiled/lowering.py": "what inductor writes",
    "training/run_file.py": "git",
    "verification/reference.py": "verify's own process",
}

_OBJECTS = re.compile(r"(broadcast|all_gather|gather|scatter)_object(_list)?|(recv|send)_object_list")
_MODULES = {"pickle", "marshal", "shelve", "joblib", "dill", "cloudpickle", "jsonpickle", "yaml"}
_RUNS = {
    "exec",
    "eval",
    "compile",
    "run_path",
    "run_module",
    "exec_module",
    "system",
    "popen",
    "Popen",
    "execv",
    "execvp",
}


def calls(source: str) -> Iterator[tuple[str, str, ast.Call]]:
    """(what stands before the dot, the name, the call) of each call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield "", node.func.id, node


def unpickles(source: str) -> bool:
    """Whether a file calls something that unpickles."""
    for home, name, call in calls(source):
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if home in _MODULES and name in ("load", "loads", "open", "Unpickler", "unsafe_load"):
            return True
        if home == "torch" and name == "load" and said.get("weights_only") != "True":
            return True
        if home in ("np", "numpy") and name == "load" and said.get("allow_pickle") == "True":
            return True
        if _OBJECTS.fullmatch(name) and home in ("dist", "torch.distributed"):
            return True
    return bool(re.search(r"from (pickle|marshal|dill|joblib|cloudpickle) import", source))


def runs(source: str) -> bool:
    """Whether a file runs a program, or Python that is given to it."""
    for home, name, _ in calls(source):
        if name in _RUNS and home in ("", "os", "runpy", "subprocess", "spec.loader", "builtins"):
            return True
        if home == "subprocess" and name in ("run", "call", "check_call", "check_output", "Popen"):
            return True
        if home == "os" and name.startswith(("exec", "spawn", "posix_spawn")):
            return True
    return False


def files() -> Mapping[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_what_unpickles_is_what_the_policy_says() -> None:
    assert {path for path, source in files().items() if unpickles(source)} == UNPICKLING
    section = TEXT.partition("## What is never unpickled")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w/]+\.py)`", section)) == UNPICKLING


def test_what_runs_programs_is_what_the_policy_says() -> None:
    assert {path for path, source in files().items() if runs(source)} == set(RUNNING)
    section = TEXT.partition("## What runs code")[2].partition("\n## ")[0]
    for program in ("sbatch", "squeue", "scontrol", "kubectl", "docker", "ssh", "git"):
        assert f"`{program}" in section
    assert (
        "inductor" in section
        and "doctor lint" in section
        and not any(path.startswith("doctor/lint/") for path in RUNNING)
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle\npickle.loads(b'')", True),
        ("import pickle\npickle.dumps(1)", False),
        ("from pickle import loads", True),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("torch.load(path, weights_only=True)", False),
        ("np.load(path)", False),
        ("np.load(path, allow_pickle=True)", True),
        ("dist.all_gather_object(everyone, mine)", True),
        ("json.loads(text)", False),
    ],
)
def test_the_reading_of_the_source_can_fail(source: str, found: bool) -> None:
    assert unpickles(source) is found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("subprocess.run(['ls'])", True),
        ("eval(text)", True),
        ("os.execvp('a', [])", True),
        ("runpy.run_path(path)", True),
        ("re.compile('a')", False),
        ("model.eval()", False),
        ("loop.run()", False),
    ],
)
def test_so_can_that_of_programs(source: str, found: bool) -> None:
    assert runs(source) is found


def test_no_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    """What a checkpoint's reader opens: a pickle in its place is refused, and nothing in it runs."""
    pytest.importorskip("torch")
    import pickle

    from fullframe.errors import CheckpointError
    from fullframe.training.checkpoints.export import export

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(pickle.dumps(Trap()))
    (folder / "rank-0.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError):
        export(tmp_path / "run", tmp_path / "model.safetensors")
    assert not (tmp_path / "sprung").exists()
