"""A user's script with every public name passes the strict type checkers."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fullframe
from tests.packaging.environments import ROOT

SCRIPT = ROOT / "tests/packaging/user_script.py"
PYRIGHT = "1.1.414"


def test_the_script_has_every_public_name() -> None:
    tree = ast.parse(SCRIPT.read_text())
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "ff"}
    assert used == {f"ff.{name}" for name in [*fullframe.__all__, "__version__"]}


@pytest.mark.slow
def test_mypy_strict() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_pyright_strict(tmp_path: Path) -> None:
    """Pyright is a program for node, from npm's registry."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no node here")
    words = ["npm", "install", "--no-audit", "--no-fund", f"pyright@{PYRIGHT}"]
    made = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if made.returncode:
        pytest.skip(f"npm does not give pyright: {made.stderr.strip()[-200:]}")
    shutil.copy(SCRIPT, tmp_path / "script.py")
    project = {
        "include": ["script.py"],
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(project))
    command = ["node", "node_modules/pyright/index.js", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    assert [(d["range"]["start"]["line"] + 1, d["message"]) for d in found["generalDiagnostics"]] == []
