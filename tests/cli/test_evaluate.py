"""The command as a user runs it: what it prints, what it starts, and wrong use."""

import io
import json
import shutil
from pathlib import Path

import pytest

import fullframe as ff
from fullframe.cli.application import run
from fullframe.cli.display import Display
from fullframe.cli.evaluate import Evaluate
from fullframe.recipe import load_recipe
from fullframe.training.run_file import RunFile, read_run_file

RECIPE = """
from tests.training.tiny import Frames, Network, evaluate, recipe as job

def recipe(frames=3, evaluates=True):
    data = {"evaluate": evaluate, "evaluation_data": lambda: Frames(frames, augment=False)} if evaluates else {}
    return job(model=Network, **data)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "job.py").write_text(RECIPE)
    job = load_recipe(folder / "job.py", {"frames": 2})
    about = {"recipe": "job.py", "values": ["frames=2"]}
    ff.fit(job, ff.Strategy(clip_norm=1.0), folder / "run", steps=2, checkpoint_every=1, about=about)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What would have been started, and with which words."""
    found: list[tuple[int, str]] = []

    def launch(ranks: int, command: list[str], on_failure: object) -> int:
        found.append((ranks, " ".join(command[2:])))
        return 0

    monkeypatch.setattr("fullframe.processes.launch.launch", launch)
    return found


def test_what_the_run_wrote_is_measured_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    assert run(["evaluate", "run", "--json"]) == 0
    said = capsys.readouterr()
    line = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(said.out) == {
        "run_dir": "run",
        "ranks": 1,
        "averaged": False,
        **{name: line[name] for name in ("step", "entropy", "accuracy")},
    }
    place = "1 rank (data 1 x height 1 x width 1), on the CPU"
    assert said.err.startswith(f"job.py: evaluating run on {place}\n")
    assert run(["evaluate", "run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"job.py: evaluating run on {place}",
        "1 of 2 samples",
        "2 of 2 samples",
        f"after step 2: entropy {line['entropy']:.4g}  accuracy {line['accuracy']:.4g}",
    ]
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before, "nothing is written"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal() -> None:
    terminal = Terminal()
    with Display(0, terminal) as show:
        show.samples(1, 3)
        show.samples(3, 3)
    assert "evaluating" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_other_values_and_another_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", "run", "--step", "1", "--set", "frames=5"]) == 0
    assert "1 of 5 samples" in capsys.readouterr().out
    (folder / "job.py").rename(folder / "other.py")
    assert run(["evaluate", "run"]) == 2
    assert "no recipe file job.py, which the run names as seen from where it was" in capsys.readouterr().err
    assert run(["evaluate", "run", "--recipe", "other.py"]) == 0


def test_ranks_are_started(folder: Path, started: list[tuple[int, str]]) -> None:
    assert run(["evaluate", "run", "--width", "2", "--precision", "bf16", "--raw"]) == 0
    assert started.pop() == (2, "evaluate run --raw --data 1 --height 1 --width 2 --precision bf16")
    path = folder / "run" / "strategy.json"
    path.write_text(ff.Strategy(data=2, stages=2, ema_decay=0.5, microbatches=4).to_json())
    assert Evaluate(run_dir=Path("run")).run() == 0
    assert started.pop() == (4, "evaluate run --data 2 --height 1 --width 1 --stages 2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no run directory nowhere; check the path"),
        (["."], ". is no run directory, it has none of run.json, metrics.jsonl, strategy.json; it holds 1 run"),
        (["run", "--width", "0"], "--width must be at least 1, got 0"),
        (["run", "--recipe", "gone.py"], "there is no recipe file gone.py\n"),
        (["run", "--set", "evaluates=False"], "the recipe evaluates nothing; give it evaluate and evaluation_data"),
        (["run", "--step", "7"], "run holds no checkpoint after step 7, but after 1, 2"),
        (["run", "--best"], "run says of no checkpoint that it is the best; name a measure by recipe.best"),
    ],
)
def test_wrong_use(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", *words]) == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_a_run_without_a_recipe_or_a_strategy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = read_run_file(folder / "run") | {"recipe": ""}
    RunFile(folder / "run", writes=True).update(**fields)
    assert run(["evaluate", "run"]) == 2
    assert "was trained by a script of its own and names no recipe; give --recipe FILE" in capsys.readouterr().err
    (folder / "run" / "strategy.json").unlink()
    assert run(["evaluate", "run"]) == 2
    assert "cannot read run/strategy.json: No such file" in capsys.readouterr().err


def test_under_torchrun_the_mesh_must_be_that_of_its_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run(["evaluate", "run"]) == 2
    assert "data 1 x height 1 x width 1 = 1 is not the number of ranks that were started, 3" in capsys.readouterr().err
