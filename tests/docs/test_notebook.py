"""The notebook of the docs, from top to bottom, in a process of its own as a kernel is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.notebook import NOTEBOOK, code_cells, kinds, run_cell
from tests.docs.page import ROOT, environment


@pytest.mark.timeout(1000)  # on a machine that others use too
def test_the_notebook_runs_and_shows_what_it_shows(tmp_path: Path) -> None:
    env = environment(tmp_path) | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.docs.notebook"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plans_and_reports_show_themselves() -> None:
    shown = [kind for cell in code_cells(json.loads(NOTEBOOK.read_text())) for kind in kinds(cell["outputs"])]
    assert shown.count("text/html") == 2


def test_a_cell_gives_its_last_expression_and_what_it_prints() -> None:
    names: dict[str, object] = {}
    assert run_cell("a = 3\nprint(a)", names)[0]["text"] == ["3\n"]
    assert run_cell("a + 1", names)[0]["data"] == {"text/plain": ["4"]}
    with pytest.raises(NameError):
        run_cell("b", names)
