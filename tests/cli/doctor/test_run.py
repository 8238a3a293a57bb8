"""`fullframe doctor run` as it is typed."""

import json
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.cli.doctor.report import summary
from fullframe.cli.doctor.run import DoctorRun, is_recipe, simplified
from fullframe.doctor.probes import kinds
from tests.doctor.rehearsal.test_job import HEAD, STEP

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = """
from tests.doctor.rehearsal.recipes import {name}

def recipe():
    return {name}()
"""


def test_a_recipe_is_told_from_a_script(tmp_path: Path) -> None:
    assert is_recipe(EXAMPLES / "stereo_depth" / "recipe.py") and not is_recipe(EXAMPLES / "plain_loop" / "after.py")


def test_wrong_use_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, recipe = tmp_path / "script.py", tmp_path / "recipe.py"
    script.write_text("x = 1")
    recipe.write_text("def recipe(): ...")
    for words, said in (
        ([str(tmp_path / "none.py")], "there is no file"),
        ([str(tmp_path)], "name the recipe"),
        ([str(script), "--width", "2"], "leave out --width"),
        ([str(script), "--batch-size", "2"], "leave out --batch-size"),
        ([str(script), "--set", "lr=1"], "leave out --set"),
        ([str(script), "--recompute", "blocks"], "leave out --recompute"),
        ([str(script), "--small-only"], "leave out --small-only"),
        ([str(recipe), "--width", "2", "--small-only", "--whole-only"], "leave one out"),
        ([str(recipe), "--width", "2", "--steps", "9"], "leave out --steps"),
        ([str(recipe), "--width", "2", "--", "x"], "takes no arguments"),
        ([str(recipe), "--processes", "3", "--stages", "2"], "use 2 or 4 processes"),
        ([str(recipe), "--processes", "3", "--width", "2"], "use 2 or 4 processes"),
    ):
        assert run(["doctor", "run", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_simplified_example_is_a_recipe_on_small_frames(tmp_path: Path) -> None:
    recipe, script = tmp_path / "recipe.py", tmp_path / "script.py"
    recipe.write_text("def recipe(): ...")
    script.write_text("x = 1")
    assert simplified(DoctorRun(program=recipe, width=2, whole_only=True)).endswith(f"{recipe} --width 2 --small-only")
    assert simplified(DoctorRun(program=script, steps=2, json=True)).endswith(f"{script} --steps 2")


def test_the_last_line_counts_what_was_found() -> None:
    assert summary([], "a.py") == "nothing found in a.py"
    found = [kinds.DRIFTED.found("a"), kinds.UNUSED.found("b"), kinds.STARVES.found("c")]
    assert summary(found, "a.py") == "1 error, 2 warnings in a.py"


def test_a_script_with_a_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    loop = "torch.manual_seed(rank)\nwith model.no_sync():\n  while True:\n  " + STEP
    said = "assert sys.argv[1:] == ['--lr', '1']\nprint('mine'); os.write(1, b'mine')\n"
    script.write_text(HEAD + said + loop)
    assert run(["doctor", "run", str(script), "--processes", "2", "--json", "--", "--lr", "1"]) == 1
    (finding,) = json.loads(capfd.readouterr().out)
    assert finding["code"] == "FF301" and "no_sync() on ranks 0, 1" in finding["evidence"]


@pytest.mark.slow
def test_a_recipe_with_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{Path(__file__).parents[3] / 'src'}")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(name="leaking"))
    assert run(["doctor", "run", str(recipe), "--width", "2"]) == 1
    out = capsys.readouterr().out
    assert "FF318 warning: graphs of earlier steps are kept" in out
    assert "predicted for a rank" in out and "gradient synchronization" in out
    assert out.splitlines()[-1] == f"1 warning in {recipe}, 3 steps on 2 ranks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["stereo_depth/recipe.py", "--width", "2"],
        ["sparse_view_ct/recipe.py", "--width", "2"],
        ["sparse_view_ct/recipe.py", "--stages", "2", "--recompute", "nested"],
        ["plain_loop/after.py"],
        ["plain_loop/ignored.py"],
        ["fabric/train.py"],
        ["accelerate/train.py"],
    ],
    ids=" ".join,
)
def test_the_examples_are_sound(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES.parent}:{EXAMPLES.parent / 'src'}")
    assert run(["doctor", "run", str(EXAMPLES / words[0]), *words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
