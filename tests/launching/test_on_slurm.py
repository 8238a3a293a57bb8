"""A real Slurm on this machine: what is launched on it trains to the bits of a local run, whatever cuts it off."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launching.cluster import Cluster, cluster, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ROOT = Path(__file__).parents[2]
RECIPE = """
import time
import torch
from tests.training import tiny

def recipe(lr=1e-2, pause=0.0):
    def loss(model, batch):
        time.sleep(pause)
        return tiny.loss(model, batch)

    return tiny.recipe(loss=loss, data=lambda: tiny.Frames(60), optimizer=lambda p: torch.optim.AdamW(p, lr=lr))
"""
TWO_NODES = ("--nodes", "2", "--processes", "1", "--width", "2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """The cluster, for all tests of this module."""
    with cluster() as started:
        started.environment.update({"PYTHONPATH": f"{ROOT}:{ROOT}/src", "OMP_NUM_THREADS": "1"})
        yield started


def fullframe(slurm: Cluster, folder: Path, *words: object, code: int = 0) -> str:
    """What `fullframe` prints, in `folder`."""
    done = subprocess.run(
        [sys.executable, "-m", "fullframe", *map(str, words)],
        cwd=folder,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def losses(run_dir: Path) -> list[float]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []


def until(condition: Callable[[], bool], slurm: Cluster, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, slurm.run("squeue") + slurm.log()
        time.sleep(0.1)


def rows(slurm: Cluster, folder: Path, *words: object) -> list[dict[str, object]]:
    return list(json.loads(fullframe(slurm, folder, "jobs", *words, "--json")))


@pytest.fixture(scope="module")
def calm(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on this machine alone."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "job.py").write_text(RECIPE)
    fullframe(
        slurm, folder, "train", "job.py", "--processes", 2, "--width", 2, "--run-dir", "local", "--set", "lr=0.02"
    )
    return losses(folder / "local")


def test_two_nodes_train_to_the_bits_of_one_machine(slurm: Cluster, tmp_path: Path, calm: list[float]) -> None:
    folder = tmp_path / "my $(touch pwned) project's; %j \\n"
    folder.mkdir()
    (folder / "job.py").write_text(RECIPE)
    run = tmp_path / "r's; $(touch pwned) #"
    words = ("launch", "job.py", "--on", "slurm", *TWO_NODES, "--set", "lr=0.02", "--run-dir", run, "--json")
    said = json.loads(fullframe(slurm, folder, *words))
    slurm.until_idle(240)
    (log,) = run.glob("slurm-*.log")
    assert losses(run) == calm, log.read_text()
    assert log.name == f"slurm-{said['job_id']}.log"
    (row,) = rows(slurm, folder, run)
    assert (row["state"], row["step"], row["job"], row["requeues"]) == ("finished", 10, said["job_id"], 0)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["preemption", "time limit"])
def test_a_run_that_is_cut_off_goes_on_to_the_same_bits(
    slurm: Cluster, tmp_path: Path, calm: list[float], ended_by: str
) -> None:
    (tmp_path / "job.py").write_text(RECIPE)
    run = tmp_path / "run"
    pause = 1 if ended_by == "preemption" else 6  # time limits are looked at every 30 s
    words = ("launch", "job.py", "--on", "slurm", *TWO_NODES, "--time", "60", "--set", "lr=0.02", f"pause={pause}")
    fullframe(slurm, tmp_path, *words, "--run-dir", "run", "--checkpoint-every", "1000")
    until(lambda: len(losses(run)) >= 3, slurm)
    (running,) = rows(slurm, tmp_path, "run")
    assert running["state"] == "running"
    log = run / "log.txt"
    if ended_by == "preemption":
        slurm.run("srun", "--partition=high", "--nodes=4", "--exclusive", "true")
    else:  # from now on two minutes before its limit
        slurm.run("scontrol", "update", f"JobId={running['job']}", "TimeLimit=2")
        until(lambda: log.exists() and "by SIGUSR1" in log.read_text(), slurm)
        slurm.run("scontrol", "update", f"JobId={running['job']}", "TimeLimit=60")
    until(lambda: log.exists() and "resumed after step" in log.read_text(), slurm, 180)
    slurm.until_idle(180)
    assert losses(run) == calm
    assert log.read_text().count("resumed after step") == 1
    (row,) = rows(slurm, tmp_path, "run")
    assert (row["state"], row["requeues"], row["restarts"]) == ("finished", 1, 0)


@pytest.mark.slow
def test_a_job_that_is_cancelled_writes_a_checkpoint_and_is_not_queued_again(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RECIPE)
    words = ("launch", "job.py", "--on", "slurm", *TWO_NODES, "--set", "pause=0.5", "--run-dir", "run", "--json")
    job = json.loads(fullframe(slurm, tmp_path, *words))["job_id"]
    until(lambda: len(losses(tmp_path / "run")) >= 2, slurm)
    slurm.run("scancel", job)
    slurm.until_idle(60)
    (row,) = rows(slurm, tmp_path, "run")
    assert row["state"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob(f"step-{row['step']:08}"))


# Three hundred trainings would take an hour here: a program that leaves what a run leaves stands in for Python.
STAND_IN = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
run, values = words[words.index("--run-dir") + 1], words[words.index("--set") + 1:]
time.sleep(0.2)
with open(os.path.join(run, "run.json"), "w") as file:
    json.dump(dict(state="finished", step=1, steps=1, values=values, started=""), file)
"""


@pytest.mark.slow
def test_no_run_of_three_hundred_is_lost_when_the_controller_is_restarted(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    launch = f"import sys; sys.executable = {str(stand_in)!r}; from fullframe.cli import main; main()"
    sweep = ("--sweep", "lr=" + ",".join(f"{i}e-4" for i in range(1, 31)), "seed=" + ",".join(map(str, range(10))))
    words = ("launch", "job.py", "--on", "slurm", "--processes", "1", *sweep, "--run-dir", "sweep")
    subprocess.run(
        [sys.executable, "-c", launch, *words], cwd=tmp_path, env=slurm.environment, check=True, capture_output=True
    )
    until(lambda: any(row["state"] == "finished" for row in rows(slurm, tmp_path, "sweep")), slurm)
    slurm.restart_controller()
    seen = rows(slurm, tmp_path, "sweep")
    assert len(seen) == 300
    assert {row["state"] for row in seen} <= {"pending", "starting", "finished"}, "none is lost while some still wait"
    assert any(row["state"] == "pending" for row in seen), "the controller was restarted in between"
    slurm.until_idle(280)
    after = rows(slurm, tmp_path, "sweep")
    assert [row["state"] for row in after] == ["finished"] * 300
    assert len({tuple(row["values"]) for row in after}) == 300
    assert all(
        json.loads((tmp_path / str(row["run"]) / "run.json").read_text())["values"] == row["values"] for row in after
    )
