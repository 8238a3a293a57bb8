"""`import fullframe` is light: the heavy packages are loaded by the first name that needs them."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "torchvision", "rich", "matplotlib", "numpy", "tyro", "transformers", "skimage", "scipy"}
IMPORT_SECONDS = 0.5  # of processor time: torch alone takes longer; the package without it takes milliseconds

REPORT = """
import json, sys, time
begin = time.process_time()
{statement}
seconds = time.process_time() - begin
print(json.dumps(dict(seconds=seconds, packages=sorted({{name.partition(".")[0] for name in sys.modules}}))))
"""


def loaded_by(statement: str) -> tuple[set[str], float]:
    """The top-level packages loaded after `statement` in a fresh interpreter, and its seconds of processor time."""
    code = REPORT.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return set(answer["packages"]), answer["seconds"]


def test_import_loads_no_heavy_package() -> None:
    packages, _ = loaded_by("import fullframe")
    assert "fullframe" in packages
    assert not packages & HEAVY


def test_the_report_sees_a_heavy_package() -> None:
    packages, _ = loaded_by("import numpy")
    assert packages & HEAVY == {"numpy"}


def test_import_is_quick() -> None:
    assert min(loaded_by("import fullframe")[1] for _ in range(3)) < IMPORT_SECONDS


@pytest.mark.parametrize("statement", ["import fullframe; fullframe.FullframeError", "import fullframe.cli"])
def test_errors_and_the_command_line_load_no_torch(statement: str) -> None:
    packages, _ = loaded_by(statement)
    assert "fullframe" in packages
    assert not packages & {"torch", "torchvision"}
