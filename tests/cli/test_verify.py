"""The command as a user runs it: what it prints, its exit codes, and wrong use."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.verification.verdict import Difference, FirstDifference, Loss, Refusal, Verdict
from tests.verification.job import RIGHT, SCALED, written


def fullframe(
    *arguments: object, scratch: Path, python: tuple[str, ...] = ("-m", "fullframe.cli")
) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, *python, *map(str, arguments)]
    environment = kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where temporary files go; nothing of ours may stay in it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    assert list(folder.glob("fullframe*")) == []


def test_one_json_object_and_nothing_else(tmp_path: Path, scratch: Path) -> None:
    recipe = written(tmp_path, RIGHT[:-1] + ", groups=groups[0])", "groups = [1]\nprint('the recipe speaks')")
    takes = "def recipe(count=1):\n    groups[0] = count"
    recipe.write_text(recipe.read_text().replace("def recipe():", takes))
    done = fullframe("verify", recipe, "--height", 2, "--json", "--set", "count=3", scratch=scratch)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["exact"] is True and verdict["first_difference"] is None and verdict["refused"] is None
    assert verdict["mesh"] == {"data": 1, "height": 2, "width": 1} and verdict["tolerance"] == 1e-9
    assert verdict["loss"]["relative"] < 1e-12
    assert len(verdict["parameters"]) == 8 and max(p["relative"] for p in verdict["parameters"]) < 1e-12
    assert len(verdict["buffers"]) == 3 and max(b["relative"] for b in verdict["buffers"]) < 1e-12
    assert [6, 2, 3, 3] in [p["shape"] for p in verdict["parameters"]], "the values reach ranks and the one process"
    assert "the recipe speaks" in done.stderr


def test_torchrun_and_a_wrong_module(tmp_path: Path, scratch: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fullframe.cli")
    done = fullframe("verify", written(tmp_path, "Scaled()", SCALED), scratch=scratch, python=torchrun)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("NOT exact on data 1 x height 1 x width 2 (cpu): 'middle' (Scaled) is the first module")
    assert lines[-2].startswith("note: dropout is off for the comparison, in both runs: head.0")
    assert sum("NOT exact" in line for line in lines) == 1, "one rank speaks"


def gradients(count: int) -> tuple[Difference, ...]:
    return tuple(
        Difference(name=f"layer{n}.weight", shape=(n, 3), max_abs=1e-14, relative=1e-13) for n in range(1, count + 1)
    )


def found(**changes: object) -> Verdict:
    fields: dict[str, object] = {
        "exact": True,
        "loss": Loss(one_process=2.5, split=2.5, max_abs=0.0, relative=0.0),
        "first_difference": None,
        "refused": None,
        "parameters": gradients(12),
        "buffers": (Difference(name="norm.mean", shape=(3,), max_abs=2e-16, relative=3e-16),),
        "values": 40,
        "gradients": 30,
        "mesh": {"data": 1, "height": 1, "width": 2},
        "device": "cpu",
        "tolerance": 1e-9,
    }
    return Verdict(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def ranks_find(monkeypatch: pytest.MonkeyPatch) -> Callable[[Verdict, int], list[list[str]]]:
    """Ranks that are not started but have found this; returns the commands they were started with."""

    def prepare(verdict: Verdict, code: int = 0) -> list[list[str]]:
        started: list[list[str]] = []

        def launch(ranks: int, command: list[str], on_failure: Callable[[str], None]) -> int:
            started.append([str(ranks), *command])
            (Path(os.environ["FULLFRAME_VERIFY_FOLDER"]) / "verdict.json").write_text(verdict.to_json())
            if code:
                on_failure("rank 1 was killed")
            return code

        monkeypatch.setattr("fullframe.processes.launch.launch", launch)
        return started

    return prepare


def test_the_ten_that_differ_most_or_all(tmp_path, capsys, ranks_find) -> None:
    started = ranks_find(found())
    recipe = str(written(tmp_path))
    assert run(["verify", recipe, "--data", "3", "--height", "2"]) == 0
    assert started[0][:5] == ["6", "-m", "fullframe.cli", "verify", recipe]
    assert " ".join(started[0][5:]) == "--height 2 --width 1 --data 3"
    text = capsys.readouterr().out
    assert "layer10.weight" in text and "layer11.weight" not in text
    assert "and 2 more that differ less; --all prints them" in text and "norm.mean" in text
    assert "loss 2.5 in one process, 2.5 split: off by 0.0e+00, 0.0e+00 relative" in text
    assert text.splitlines()[-1] == (
        f"exact: one step of {recipe} on data 1 x height 1 x width 2 (cpu) computes what one process computes; of 12 "
        "gradients, 1 buffers and 40 module inputs and outputs none is off by more than 1e-09, no gradient by more "
        "than 1.0e-13"
    )
    assert run(["verify", recipe, "--all"]) == 0
    assert "layer12.weight" in capsys.readouterr().out
    assert started[1][0] == "2", "two ranks along the width, when no axis is given"


def test_a_build_without_gpus_is_not_loaded_to_count_them(tmp_path, ranks_find, monkeypatch) -> None:
    ranks_find(found())
    monkeypatch.setattr("fullframe.cli.verify.is_cpu_build", lambda: True)
    monkeypatch.setattr("fullframe.cli.verify._gpus", lambda: pytest.fail("torch was loaded"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert run(["verify", str(written(tmp_path))]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setattr("fullframe.cli.verify.is_cpu_build", lambda: False)
    monkeypatch.setattr("fullframe.cli.verify._gpus", lambda: 1)
    assert run(["verify", str(written(tmp_path))]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "two ranks on one GPU cannot talk"


def test_rows_of_what_is_equal_are_left_to_all(tmp_path, capsys, ranks_find) -> None:
    """The statistics of a frozen batch norm, index tables."""
    frozen = tuple(Difference(name=f"norm{n}.mean", shape=(3,), max_abs=0.0, relative=0.0) for n in range(4))
    ranks_find(found(buffers=frozen))
    recipe = str(written(tmp_path))
    assert run(["verify", recipe]) == 0
    text = capsys.readouterr().out
    assert "norm0.mean" not in text and "buffer 4 tensors: equal bit for bit; --all prints them" in text
    ranks_find(found(buffers=(*found().buffers, *frozen)))
    assert run(["verify", recipe]) == 0
    text = capsys.readouterr().out
    assert "norm0.mean" not in text and "norm.mean" in text and "and 4 more that differ less; --all prints" in text
    assert run(["verify", recipe, "--all"]) == 0
    assert "norm3.mean" in capsys.readouterr().out


def test_ranks_are_started_with_depth(tmp_path, ranks_find) -> None:
    started = ranks_find(found(mesh={"data": 1, "depth": 2, "height": 1, "width": 2}))
    assert run(["verify", str(written(tmp_path)), "--depth", "2", "--width", "2"]) == 0
    assert started[0][0] == "4" and " ".join(started[0][5:]) == "--depth 2 --height 1 --width 2 --data 1"


FIRST = FirstDifference(
    phase="forward",
    module="neck",
    class_name="Neck",
    tensor="output",
    shape=(1, 8, 9, 9),
    local_shape=(1, 8, 9, 4),
    rank=1,
    dtype="float64",
    max_abs=0.1,
    relative=0.2,
    message="'neck' (Neck) is the first module whose output differs",
)
MESH = "data 1 x height 1 x width 2"
REFUSED = Refusal(message="torch.fft.fft2: no rule", function="torch.fft.fft2", module="m", placements=(), fix="Gather")


@pytest.mark.parametrize(
    ("verdict", "code", "said"),
    [
        (found(exact=False, first_difference=FIRST), 1, f"NOT exact on {MESH} (cpu): {FIRST.message}"),
        (found(exact=False, loss=None, refused=REFUSED, parameters=(), buffers=()), 2, f"refused: {REFUSED.message}"),
    ],
)  # fmt: skip
def test_exit_codes(tmp_path, capsys, ranks_find, verdict, code, said) -> None:
    ranks_find(verdict)
    assert run(["verify", str(written(tmp_path))]) == code
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert run(["verify", str(written(tmp_path)), "--json"]) == code
    assert Verdict.from_json(capsys.readouterr().out) == verdict


def test_ranks_that_fail_give_no_verdict(tmp_path, capsys, ranks_find) -> None:
    ranks_find(found(), code=1)
    assert run(["verify", str(written(tmp_path)), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"error": "rank 1 was killed"}
    assert run(["verify", str(written(tmp_path))]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (
            ["--width", "1"],
            None,
            "one rank alone splits nothing, so there is nothing to compare; use --width 2",
        ),
        (["--height", "0"], None, "--height must be at least 1, got 0"),
        (["--tolerance", "0"], None, "--tolerance must be greater than 0, got 0.0"),
        (["--noise", "-1"], None, "--noise must be 0 or more, and finite, got -1.0"),
        (["--noise", "nan"], None, "--noise must be 0 or more, and finite, got nan"),
        (["--width", "2"], "3", "data 1 x height 1 x width 2 = 2 is not the number of ranks that were started, 3"),
        (["--width", "2", "--data", "2"], "3", "= 4 is not the number of ranks that were started, 3; start 4"),
        (["--height", "4"], "2", "data 1 x height 4 x width 1 = 4 is not the number of ranks that were started, 2"),
    ],
)
def test_a_bad_mesh(tmp_path, capsys, monkeypatch, options, ranks, message) -> None:
    monkeypatch.setattr("fullframe.processes.launch.launch", lambda *_: pytest.fail("ranks were started"))
    if ranks:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert run(["verify", str(written(tmp_path)), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1


def test_no_such_recipe(capsys) -> None:
    assert run(["verify", "missing.py"]) == 2
    assert capsys.readouterr().err == "error: there is no recipe file missing.py; check the path\n"


def test_help_says_what_it_proves(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(["verify", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "What it proves: these numbers, for this batch at this size" in text
    assert "What it does not: other sizes and meshes" in text
    for option in ("--height", "--width", "--data", "--unsupported", "--tolerance", "--all", "--json"):
        assert option in text
