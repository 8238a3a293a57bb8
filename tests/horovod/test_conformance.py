"""Every case of `conformance.py`, under `fullframe horovodrun` on 2 and 3 ranks; each run is started once.

The ranks ask each other through memory, and, on 2, by gloo too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.horovod import conformance

SCRIPT = Path(conformance.__file__)


BY_GLOO = pytest.param("2 by-gloo", marks=pytest.mark.further)


@pytest.fixture(scope="module", params=["2", BY_GLOO, "3"], ids=lambda how: f"np{how}")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong, by case."""
    folder = tmp_path_factory.mktemp("conformance")
    ranks, *ways = request.param.split()
    words = [sys.executable, "-m", "fullframe", "horovodrun", "-np", ranks, "--output-filename", folder]
    done = subprocess.run([*words, sys.executable, SCRIPT, *ways], cwd=folder, timeout=280, check=False, env=os.environ)
    told = "\n".join((folder / "rank.0" / kind).read_text()[-3000:] for kind in ("stdout", "stderr"))
    assert done.returncode == 0, told
    return json.loads((folder / "rank.0" / "stdout").read_text().splitlines()[-1])


@pytest.mark.parametrize("name", conformance.CASES)
def test_case(found: dict[str, str], name: str) -> None:
    assert found[name] == ""
