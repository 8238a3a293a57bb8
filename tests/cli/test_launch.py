"""`fullframe launch`: what it would submit, as golden files, and what it refuses.

`UPDATE_GOLDEN=1 pytest tests/cli/test_launch.py` writes the files anew; look at what has changed.
"""

import json
import os
import re
import stat
from pathlib import Path

import pytest

from fullframe.cli import launch
from fullframe.cli.application import run
from fullframe.launching.jobs import Files, jobs

GOLDEN = Path(__file__).parent / "golden"

CASES = {
    "one_node.sh": ["recipe.py", "--on", "slurm", "--gpus-per-node", "4", "--width", "2", "--run-dir", "runs/one"],
    "two_nodes.sh": [
        *("recipe.py", "--on", "slurm", "--nodes", "2"),
        *("--gpus-per-node", "4", "--width", "4", "--recompute", "blocks"),
        *("--time", "24:00:00", "--partition", "a100", "--account", "team", "--after", "4711", "--cpus-per-node", "32"),
        *("--sbatch", "mem=256G", "exclusive", "--min-nodes", "1", "--run-dir", "runs/two nodes"),
    ],
    "sweep.sh": [
        *("recipe.py", "--on", "slurm", "--nodes", "1", "--processes", "1", "--set", "size=(512, 1024)"),
        *("--sweep", "lr=1e-3,3e-4", "name='a b',$(x)", "--parallel", "2", "--run-dir", "runs/sweep"),
    ],
    "kubernetes.json": [
        *("recipe.py", "--on", "kubernetes", "--nodes", "2"),
        *("--gpus-per-node", "4", "--width", "4", "--volume", "runs"),
        *("--queue", "team", "--image", "registry/fullframe:1", "--memory", "64Gi", "--run-dir", "runs/k"),
    ],
    "trainjob.json": [
        *("recipe.py", "--on", "kubernetes", "--kind", "trainjob", "--nodes", "2", "--gpus-per-node", "4"),
        *("--width", "4", "--volume", "runs", "--set", "name=$(HOSTNAME)", "--run-dir", "runs/t"),
    ],
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with a recipe, in which commands run."""
    folder = tmp_path / "pro ject"
    folder.mkdir()
    for recipe in (folder / "recipe.py", tmp_path / "recipe.py"):
        recipe.write_text("")
    (folder / "taking.py").write_text("import none\ndef recipe(lr=1e-3, *, size=None): ...\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(launch.sys, "executable", "/usr/bin/python3")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_what_would_be_submitted(name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", *CASES[name], "--dry-run"]) == 0
    said = capsys.readouterr().out.replace(str(project), "/home/me/pro ject")
    said = re.sub(r"(/runs/\w+)-[0-9a-f]{8}", r"\1-01234567", said)  # which stand for the whole path
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(said)
    assert said == (GOLDEN / name).read_text()
    assert {path.name for path in project.iterdir()} == {"taking.py", "recipe.py"}, "nothing is written"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py"], "there is no recipe file none.py"),
        (["recipe.py", "--nodes", "0"], "--nodes must be at least 1"),
        (["recipe.py", "--nodes", "2", "--node-rank", "0"], "leave out --node-rank"),
        (
            ["recipe.py", "--nodes", "2", "--gpus-per-node", "4", "--width", "3"],
            "are no multiple of height 1 x width 3",
        ),
        (["recipe.py", "--parallel", "0"], "--parallel must be at least 1"),
        (["recipe.py", "--set", "lr=1", "--sweep", "lr=1,2"], "lr is given by --set and by --sweep"),
        (["recipe.py", "--after", "nothing"], "neither the id of a job"),
        (["recipe.py", "--time", "1; touch x"], "characters that Slurm"),
        (["recipe.py", "--time", "2"], "--time 2 is over when a run is asked to stop, --signal-seconds 120 before"),
        (["recipe.py", "--time", "0-1", "--signal-seconds", "3600"], "give a longer limit, or fewer seconds"),
        (["recipe.py", "--plan", "p", "--plan-for", "2xcpu"], "leave one out"),
        (["recipe.py", "--on", "kubernetes"], "needs --volume"),
        (["recipe.py", "--on", "docker", "--nodes", "2"], "one run on this machine"),
        (["recipe.py", "--on", "docker", "--plan-for", "2xcpu"], "--plan-for is for Slurm"),
        (["recipe.py", "--memory", "64Gi"], "--memory is for --on kubernetes, and says nothing on slurm"),
        (["recipe.py", "--on", "kubernetes", "--after", "7"], "--after is for --on slurm, and"),
        (["recipe.py", "--on", "docker", "--requeues", "3"], "--requeues is for --on slurm and kubernetes"),
        (["recipe.py", "--on", "kubernetes", "--runtime", "mine"], "--runtime is of --kind trainjob"),
        (["../recipe.py", "--on", "docker"], "../recipe.py is not in "),
        (["../recipe.py", "--on", "kubernetes", "--volume", "runs"], "the container has no other files of this"),
        (["recipe.py", "--on", "docker", "--plan", "../plan.json"], "../plan.json is not in "),
        (["."], "there is no recipe file .; give the .py file itself"),
        (
            ["taking.py", "--sweep", "seed=1,2"],
            "recipe() takes lr, size: got an unexpected keyword argument",
        ),
        (["taking.py", "--set", "lr=1", "sead=1"], "got an unexpected keyword argument 'sead'"),
        (["recipe.py", "--run-dir", "a\nb"], "in a way of its own"),
        (["recipe.py", "--run-dir", "a%jb"], "in a way of its own"),
    ],
)
def test_what_cannot_be_submitted_is_said(
    words: list[str], said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--on", "slurm", *words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        ([], True),
        (["--cpus-per-node", "32"], False),
        (["--sbatch", "mem=64G", "cpus-per-gpu=8"], False),
        (["--sbatch", "exclusive"], False),
        (["--on", "docker"], False),
    ],
)
def test_slurms_one_core_is_told(
    words: list[str], is_told: bool, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "recipe.py", "--on", "slurm", *words, "--dry-run"]) == 0
    found = capsys.readouterr()
    assert ("one core" in found.err) == is_told and "one core" not in found.out


def test_a_recipe_is_named_as_the_container_has_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(project / "recipe.py")
    assert run(["launch", recipe, "--on", "docker", "--run-dir", "r", "--dry-run"]) == 0
    assert "fullframe train recipe.py --run-dir /runs" in capsys.readouterr().out


@pytest.mark.parametrize(("docker", "code", "known"), [("exit 125", 125, 125), (None, 2, 127)])
def test_how_a_container_ended_is_known_to_jobs(
    docker: str | None, code: int, known: int, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = project.parent / "tools"
    tools.mkdir()
    if docker is not None:
        (tools / "docker").write_text(f"#!/bin/sh\n{docker}\n")
        (tools / "docker").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tools))
    assert run(["launch", "recipe.py", "--on", "docker", "--run-dir", "r"]) == code
    (row,), _ = jobs([project / "r"], Files())
    assert (row.state, row.reason) == ("lost", f"docker has ended with exit code {known}")


@pytest.mark.parametrize(
    ("words", "name"),
    [(["slurm"], "job.sh"), (["kubernetes", "--volume", "runs"], "manifest.json"), (["docker"], "command")],
)
def test_a_dry_run_is_one_json_object(
    words: list[str], name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = ["launch", "recipe.py", "--run-dir", "r", "--dry-run", "--on", *words]
    assert run(launched) == 0
    text = capsys.readouterr().out
    assert run([*launched, "--json"]) == 0
    folder = str(project / "r")
    expected = {"job_id": None, "folder": folder, "runs": [folder], name: text}
    assert json.loads(capsys.readouterr().out) == expected


def fake(project: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str = "exit 0") -> None:
    """Programs in place of Slurm's."""
    tools = project.parent / "tools"
    tools.mkdir()
    for name, text in (("sbatch", sbatch), ("squeue", squeue)):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


def test_a_launch_is_remembered(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(project, monkeypatch, 'echo "41;cluster"; grep -c . "$2" > submitted', 'echo "41|41|N/A|RUNNING|None|/"')
    words = ["launch", "recipe.py", "--on", "slurm", "--sweep", "lr=1,2", "--run-dir", "r", "--json"]
    assert run(words) == 0
    places = [str(project / "r" / name) for name in ("0000-lr=1", "0001-lr=2")]
    assert json.loads(capsys.readouterr().out) == {"job_id": "41", "folder": str(project / "r"), "runs": places}
    known = json.loads((project / "r" / "launch.json").read_text())
    assert (known["job_id"], known["runs"][1]) == ("41", {"place": "0001-lr=2", "values": ["lr=2"]})
    assert (project / "r" / "submitted").exists(), "it is submitted from its folder"
    assert run(words) == 2
    assert "job 41 of" in capsys.readouterr().err, "a second job would write into the same directories"


def test_a_submission_without_an_answer_is_looked_for(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
    fake(project, monkeypatch, late, f'echo "52|51|1|PENDING|Resources|{project}/r"')
    assert run(["launch", "recipe.py", "--on", "slurm", "--run-dir", "r"]) == 0
    assert "submitted job 51" in capsys.readouterr().out


def test_a_refused_submission_is_an_error(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(project, monkeypatch, "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    assert run(["launch", "recipe.py", "--on", "slurm", "--partition", "x", "--run-dir", "r"]) == 2
    assert "invalid partition specified: x" in capsys.readouterr().err
    assert json.loads((project / "r" / "launch.json").read_text())["job_id"] is None


def test_the_planner_is_asked_once_for_a_sweep(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake(project, monkeypatch, "echo 7")
    planner = project.parent / "python"  # stands in for Python: it keeps its words, and fails where it is told to
    planner.write_text('#!/bin/bash\necho "$@" >> "$ASKED"\ntest ! -e fails\n')
    planner.chmod(stat.S_IRWXU)
    asked = project.parent / "asked"
    monkeypatch.setenv("ASKED", str(asked))
    monkeypatch.setattr(launch.sys, "executable", str(planner))
    words = ["launch", "recipe.py", "--on", "slurm", "--nodes", "2", "--gpus-per-node", "4"]
    words += ["--plan-for", "2x4xA100-80GB", "--sweep", "lr=" + ",".join(map(str, range(300))), "--batch-size", "8"]
    assert run([*words, "--run-dir", "r"]) == 0
    plan = project / "r" / "plan.json"
    expected = f"-m fullframe.cli plan recipe.py --gpus 2x4xA100-80GB --out {plan} --set lr=0 --batch-size 8"
    assert asked.read_text().splitlines() == [expected]
    assert f"--plan '{plan}'" in (project / "r" / "job.sh").read_text()
    (project / "fails").touch()
    assert run([*words, "--run-dir", "s"]) == 2
    assert "nothing was submitted" in capfd.readouterr().err
