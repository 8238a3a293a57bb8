"""The wheel and the source distribution: what is in them, and that they work where nothing else is installed."""

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import fullframe
from tests.packaging.environments import ROOT, Environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = """
import torch
from torch import nn

import fullframe as ff


def recipe() -> ff.Recipe:
    return ff.Recipe(
        model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["image"]), batch["label"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [
            {"image": torch.randn(3, 9, 13), "label": torch.randint(2, (9, 13))} for _ in range(4)
        ],
        batch_size=2,
        steps=2,
    )
"""


class Built(NamedTuple):
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.made(tmp_path_factory.mktemp("builder"))


@pytest.fixture(scope="module")
def built(builder: Environment, tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    builder.pip("install", "hatchling")
    builder.python("-m", "hatchling", "build", "--directory", out, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


def tracked(*folders: str) -> set[str]:
    """The files of the repository below `folders`, without those that git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in found if (ROOT / name).exists()}


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        about = email.message_from_bytes(wheel.read(f"fullframe-{fullframe.__version__}.dist-info/METADATA"))
    package = {name for name in names if not name.startswith(f"fullframe-{fullframe.__version__}.dist-info/")}
    assert package == {name.removeprefix("src/") for name in tracked("src")}
    assert {"fullframe/py.typed", "fullframe/observation/report/style.css"} <= package
    assert not [name for name in names if "test" in Path(name).name and name.startswith("test")]
    assert [name for name in names if name.endswith("/LICENSE")]
    assert about["Version"] == fullframe.__version__ and about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    unconditional = {said for said in about.get_all("Requires-Dist", []) if "extra ==" not in said}
    assert unconditional == set(project["dependencies"])


def test_the_source_distribution_makes_the_same_wheel(built: Built, builder: Environment, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "constraints.txt", "PKG-INFO"}
    assert wanted | tracked("src", "tests", "docs", "examples") <= names
    builder.pip("wheel", "--no-deps", "--wheel-dir", tmp_path, built.sdist)  # with build isolation
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(again) as second, zipfile.ZipFile(built.wheel) as first:
        assert second.namelist() == first.namelist()
        differing = [name for name in first.namelist() if first.read(name) != second.read(name)]
        assert differing == []


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and what it depends on alone."""
    environment = Environment.made(tmp_path_factory.mktemp("installed"))
    environment.pip("install", built.wheel)
    return environment


def test_only_what_is_declared_is_installed(installed: Environment) -> None:
    installed.pip("check")
    found = {line.partition("==")[0].lower() for line in installed.pip("freeze").splitlines()}
    assert not found & {"pytest", "matplotlib", "transformers", "plotly", "pillow", "torchvision"}
    pinned = pins((ROOT / "constraints.txt").read_text())
    got = dict(line.lower().split("==") for line in installed.pip("freeze").splitlines() if "==" in line)
    off = {name: version for name, version in got.items() if pinned.get(name) != version.partition("+")[0]}
    assert off == {}, "not as constraints.txt has it"


def pins(text: str) -> Mapping[str, str]:
    return {name.lower(): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", text)}


def test_the_commands_work_from_an_empty_directory(installed: Environment, tmp_path: Path) -> None:
    here = installed.python("-c", "import fullframe; print(fullframe.__file__)", cwd=tmp_path).strip()
    assert Path(here).is_relative_to(installed.folder), "the repository's own package was found"
    assert installed.fullframe("--version", cwd=tmp_path) == f"fullframe {fullframe.__version__}\n"
    assert "usage: fullframe" in installed.python("-m", "fullframe", "--help", cwd=tmp_path)
    assert "complete" in installed.fullframe("--completion", "bash", cwd=tmp_path)
    (tmp_path / "recipe.py").write_text(RECIPE)
    said = installed.fullframe("verify", "recipe.py", "--width", "2", cwd=tmp_path)
    assert "\nexact: one step of recipe.py on data 1 x height 1 x width 2" in said, said
    installed.fullframe("train", "recipe.py", "--processes", "2", "--width", "2", "--run-dir", "run", cwd=tmp_path)
    page = (tmp_path / "run" / "report.html").read_text()
    report = ROOT / "src/fullframe/observation/report"
    assert (report / "style.css").read_text() in page and (report / "script.js").read_text() in page
    installed.fullframe("export", "run", "--out", "model.safetensors", cwd=tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 0
    planned = installed.fullframe("plan", "recipe.py", "--gpus", "2xT4", cwd=tmp_path)
    assert "; best: " in planned, "the table of devices is there"


def test_what_is_missing_is_named_with_its_extra(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    said = installed.refused("plan", "recipe.py", "--gpus", "2xT4", "--html", "plan.html", cwd=tmp_path)
    assert "pip install 'fullframe[pictures]'" in said
    assert sys.executable and "Traceback" not in said and os.listdir(tmp_path) == ["recipe.py"]
