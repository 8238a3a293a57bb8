"""The best checkpoint by a measure stays, and is found again when the run goes on."""

import math

import pytest
import torch
from safetensors.torch import load_file

import fullframe as ff
from fullframe.cli.application import run
from fullframe.errors import RecipeError, RunError
from fullframe.training.checkpoints.best import Best, better
from fullframe.training.checkpoints.export import export
from fullframe.training.checkpoints.manifest import MANIFEST
from fullframe.training.checkpoints.writer import best_checkpoint, checkpoints_in
from tests.rank_group import rank_group
from tests.training.tiny import Frames, recipe


def trained(run_dir, scores, strategy=None, best="score", keep_checkpoints=1, checkpoint_every=100, **options):
    """Evaluated after each step, with these as the scores; the parameters after each."""
    left, states = list(scores), []

    def evaluate(model, batch):
        states.append({name: value.clone() for name, value in model.module.state_dict().items()})
        return {"score": (left.pop(0), 1)}

    job = recipe(evaluate=evaluate, evaluation_data=lambda: Frames(1, augment=False), evaluate_every=1, best=best)
    often = {"keep_checkpoints": keep_checkpoints, "checkpoint_every": checkpoint_every}
    ff.fit(job, strategy or ff.Strategy(), run_dir, **often, **options)
    assert not left
    return states


def steps_in(run_dir):
    return [int(path.name.removeprefix("step-")) for path in checkpoints_in(run_dir / "checkpoints")]


@pytest.mark.parametrize(("measure", "sign"), [("score", 1.0), ("-score", -1.0)])
def test_the_best_stays(tmp_path, measure, sign):
    states = trained(tmp_path, [sign * value for value in (1.0, 3.0, math.nan, 3.0, 2.0)], best=measure, steps=5)
    assert steps_in(tmp_path) == [2, 5], "the best and the last; an equal one and NaN are no better"
    assert best_checkpoint(tmp_path / "checkpoints") == Best(2, measure, sign * 3.0)
    exported = export(tmp_path, tmp_path / "best.safetensors", best=True)
    assert exported.step == 2
    found = load_file(exported.path)
    assert found.keys() == states[1].keys() and all(torch.equal(found[name], states[1][name]) for name in found)


def test_a_better_one_takes_its_place_when_the_run_goes_on(tmp_path):
    trained(tmp_path, [5.0, 1.0], steps=2)
    trained(tmp_path, [4.0], steps=3, resume=True)
    assert steps_in(tmp_path) == [1, 3], "of this process's evaluations the best, of the run's not"
    trained(tmp_path, [6.0, 0.0], steps=5, resume=True)
    assert steps_in(tmp_path) == [4, 5]
    trained(tmp_path, [0.5], best="-score", steps=6, resume=True)
    assert best_checkpoint(tmp_path / "checkpoints") == Best(6, "-score", 0.5), "by another measure it starts anew"


def test_a_checkpoint_that_is_lost_is_not_the_best(tmp_path):
    trained(tmp_path, [1.0, 9.0], steps=2, keep_checkpoints=2)
    (tmp_path / "checkpoints" / "step-00000002" / MANIFEST).write_text("{")
    trained(tmp_path, [3.0], steps=2, resume=True)  # step 2 again
    assert best_checkpoint(tmp_path / "checkpoints") == Best(2, "score", 3.0)


def test_the_best_before_one_that_is_lost_is_the_best_again(tmp_path):
    trained(tmp_path, [5.0, 1.0, 9.0], steps=3, keep_checkpoints=3, checkpoint_every=1)
    (tmp_path / "checkpoints" / "step-00000003" / MANIFEST).write_text("{")
    trained(tmp_path, [3.0], steps=3, resume=True)  # step 3 again
    assert best_checkpoint(tmp_path / "checkpoints") == Best(1, "score", 5.0)
    assert steps_in(tmp_path) == [1, 3]


def on_ranks(run_dir, scores):
    trained(run_dir, scores, ff.Strategy(width=2), steps=len(scores))


def test_ranks_agree(tmp_path):
    rank_group(2).run(on_ranks, tmp_path, [1.0, 4.0, 2.0])
    assert steps_in(tmp_path) == [2, 3]


def test_what_is_refused(tmp_path, capsys):
    with pytest.raises(RecipeError, match=r"recipe\.best is 'miou', and the recipe evaluates nothing"):
        recipe(best="miou")
    with pytest.raises(RecipeError, match=r"recipe\.best is '-epe', and evaluate\(\) measures a, b"):
        better("-epe", {"a": 1.0, "b": 2.0}, 1, None)
    ff.fit(recipe(steps=1), ff.Strategy(), tmp_path / "plain")
    with pytest.raises(RunError, match="says of no checkpoint that it is the best"):
        export(tmp_path / "plain", tmp_path / "out", best=True)
    assert run(["export", str(tmp_path / "plain"), "--out", str(tmp_path / "out"), "--best", "--step", "1"]) == 2
    assert "take one of them" in capsys.readouterr().err
