"""The files that others read: the citation, the workflow, the constraints. They say what the package says."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fullframe
from tests.packaging.environments import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_is_of_this_version() -> None:
    """Of https://github.com/citation-file-format, version 1.2.0: what it requires, and what can go stale."""
    found = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(found) and found["cff-version"] == "1.2.0"
    assert found["type"] == "software" and all("name" in author for author in found["authors"])
    assert found["version"] == fullframe.__version__ and found["license"] == PROJECT["license"]


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert set(workflow[True]) == {"push", "pull_request"}, "YAML reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert ".ci/run" in commands["tests"] and (ROOT / ".ci/run").stat().st_mode & 0o111
    for job in jobs.values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
    versions = jobs["versions"]["strategy"]["matrix"]["python"]
    assert versions == ["3.12", "3.13"] and "make versions" in commands["versions"][-1]


def test_make_has_what_the_documents_name() -> None:
    targets = set(re.findall(r"(?m)^([\w-]+)(?:(?: [\w-]+)*):", (ROOT / "Makefile").read_text()))
    targets |= set(re.search(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())[1].split())  # type: ignore[index]
    for path in ("README.md", "CONTRIBUTING.md", "SECURITY.md", ".github/workflows/ci.yml"):
        named = set(re.findall(r"(?m)`make (\w+)|^    make (\w+)|run: make (\w+)", (ROOT / path).read_text()))
        assert {name for found in named for name in found if name} <= targets, path


def test_every_dependency_has_one_version() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = re.findall(r"(?m)^([\w.-]+)==(\S+)$", text)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(pins) == len(lines), "a line that pins nothing"
    names = [re.sub(r"[-_.]+", "-", name.lower()) for name, _ in pins]
    assert len(set(names)) == len(names), "a package with two versions"
    wanted = [
        *PROJECT["dependencies"],
        *(said for extra in PROJECT["optional-dependencies"].values() for said in extra),
    ]
    direct = {re.match(r"[\w.-]+", said)[0].lower().replace("_", "-") for said in wanted}  # type: ignore[index]
    assert direct - {"fullframe"} <= set(names)


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / ".ci").iterdir()))
def test_scripts_stop_at_the_first_error(path: str) -> None:
    lines = Path(ROOT / ".ci" / path).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines
