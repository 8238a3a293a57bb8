"""The rules beside flake8's own."""

import subprocess
import sys
from pathlib import Path

from fullframe.doctor.lint.flake8_plugin import Flake8Plugin
from tests.doctor.lint.samples import training

SOURCE = "import torch.nn.functional as F\n" + training("total += loss", "total = 0\n")


def test_a_finding_is_given_in_flake8s_form() -> None:
    plugin = Flake8Plugin(None, "a.py", SOURCE.splitlines(keepends=True))
    (found,) = plugin.run()
    assert found[:2] == (10, 4) and found[2].startswith("FF101 loss summed") and found[3] is Flake8Plugin


def test_flake8_finds_the_plugin_and_prints_what_it_finds(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE + "    total += loss  # noqa: FF101\n")
    plugin = "FF = fullframe.doctor.lint.flake8_plugin:Flake8Plugin"
    settings = f"[flake8]\nselect = FF\n[flake8:local-plugins]\nextension =\n    {plugin}\n"
    (tmp_path / "setup.cfg").write_text(settings)
    command = [sys.executable, "-m", "flake8", "--config", "setup.cfg", "a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (line,) = set(done.stdout.splitlines())  # where the package is installed, flake8 knows the plugin twice
    assert line.startswith("a.py:10:5: FF101 loss summed with its graph")


def test_the_package_registers_it() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'FF = "fullframe.doctor.lint.flake8_plugin:Flake8Plugin"' in text
