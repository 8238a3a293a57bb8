"""The best checkpoint by a measure stays, and is found again when the run goes on; without a better one a run ends."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import fullframe as ff
from fullframe.cli.application import run
from fullframe.errors import RecipeError, RunError
from fullframe.processes.stop_signals import Stopped
from fullframe.training.checkpoints.best import Best, better, in_vain
from fullframe.training.checkpoints.export import export
from fullframe.training.checkpoints.manifest import MANIFEST
from fullframe.training.checkpoints.writer import best_checkpoint, checkpoints_in
from fullframe.training.run_file import read_run_file
from fullframe.training.steps import Steps
from tests.rank_group import rank_group
from tests.training.tiny import Frames, recipe


def trained(run_dir, scores, strategy=None, best="score", **options):
    """Evaluated after each step, with these as the scores; the parameters after each."""
    left, states = list(scores), []

    def evaluate(model, batch):
        states.append({name: value.clone() for name, value in model.module.state_dict().items()})
        return {"score": (left.pop(0), 1)}

    job = recipe(evaluate=evaluate, evaluation_data=lambda: Frames(1, augment=False), evaluate_every=1, best=best)
    options = {"keep_checkpoints": 1, "checkpoint_every": 100, **options}
    ff.fit(job, strategy or ff.Strategy(), run_dir, **options)
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


NAN = math.nan


def ended(run_dir, scores, **options):
    """The last thing that was said."""
    messages = []
    trained(run_dir, scores, on_message=messages.append, **options)
    return messages[-1]


def last_line(run_dir):
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_run_ends_after_evaluations_in_vain(tmp_path):
    why = "2 evaluations in a row gave no better score than 4 (step 2)"
    assert ended(tmp_path, [1.0, 4.0, 2.0, 4.0], steps=9, patience=2) == f"stopped early after step 4: {why}"
    assert steps_in(tmp_path) == [2, 4], "the best, and where it stopped"
    assert last_line(tmp_path) == {"after_step": 4, "stopped_early": why}
    stands = read_run_file(tmp_path)
    assert (stands["state"], stands["reason"], stands["step"]) == ("finished", f"stopped early: {why}", 4)


def test_the_count_is_kept_when_the_run_goes_on(tmp_path):
    ended(tmp_path, [4.0, 1.0, NAN], steps=3)
    said = ended(tmp_path, [], steps=9, patience=2, resume=True)
    why = "2 evaluations in a row gave no better score than 4 (step 1)"
    assert said == f"nothing is left to do: {why}; a larger --patience goes on"
    assert read_run_file(tmp_path)["reason"] == f"stopped early: {why}"
    assert "after step 4: 3 evaluations in a row" in ended(tmp_path, [3.0], steps=9, patience=3, resume=True)
    assert "after step 9: 4 evalu" in ended(tmp_path, [5.0, 0.0, 5.0, NAN, 0.0], steps=20, patience=4, resume=True)
    assert ended(tmp_path, [0.0], steps=10, patience=9, resume=True).startswith("wrote "), "it has all its steps"
    assert read_run_file(tmp_path)["reason"] == ""


def test_a_run_without_any_number(tmp_path):
    ended(tmp_path, [NAN], steps=1)
    said = ended(tmp_path, [NAN], steps=9, patience=2, resume=True)
    assert said == "stopped early after step 2: 2 evaluations in a row gave no better score"


def test_what_counts_as_in_vain():
    records = [{"step": 1, "score": 2.0}, {"step": 2}, {"step": 3, "score": 1.0}, {"step": 4, "score": None}]
    assert in_vain("score", records, Best(1, "score", 2.0)) == 2
    assert in_vain("-score", records, Best(3, "-score", 1.0)) == 1
    assert in_vain("-score", records, Best(1, "score", 2.0)) == in_vain("score", records, None) == 1
    assert in_vain("other", records, None) == in_vain("score", [], None) == 0


def impatient(run_dir, scores):
    return ended(run_dir, scores, strategy=ff.Strategy(data=2), steps=9, patience=1)


def test_ranks_end_together(tmp_path):
    said = rank_group(2).run(impatient, tmp_path, [1.0, 4.0, 2.0])
    assert said == ["stopped early after step 3: 1 evaluation in a row gave no better score than 4 (step 2)"] * 2


def stopped(run_dir, scores, strategy=None, stops=1, **options):
    """Asked to stop in the evaluation after the last of the steps that have scores here, so many times."""
    for _ in range(stops):
        left = list(scores)

        def evaluate(model, batch, left=left):
            if len(left) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"score": (left.pop(0), 1)}

        data = {"evaluation_data": lambda: Frames(1, augment=False), "evaluate_every": 1, "best": "score"}
        options = {"keep_checkpoints": 1, "steps": 9, "patience": 2, **options}
        with pytest.raises(Stopped):
            ff.fit(recipe(evaluate=evaluate, **data), strategy or ff.Strategy(), run_dir, resume="auto", **options)
        scores = scores[-1:]


def of_steps(run_dir):
    """What is in metrics.jsonl, but for what a clock says; and which checkpoints there are, and which is the best."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    known = [{name: value for name, value in line.items() if name != "step_seconds"} for line in lines]
    return known, steps_in(run_dir), best_checkpoint(run_dir / "checkpoints")


def through_and_stopped(folder, strategy):
    """One run that goes through, one that is asked to stop in the evaluation of its best step, and again when that is
    made up for, and one that is to end early by the evaluation that it was stopped in: how all of them end.
    """
    scores = [2.0, 4.0, 3.0, 3.0]
    said = [ended(folder / "calm", scores, strategy=strategy, steps=9, patience=2)]
    for name, at, stops in (("best", 2, 2), ("last", 4, 1)):
        stopped(folder / name, scores[:at], strategy, stops)
        rest = scores[at - 1 :]
        said.append(ended(folder / name, rest, strategy=strategy, steps=9, patience=2, resume=True))
    return said


def test_an_evaluation_that_a_stop_cut_off_is_made_up_for(tmp_path):
    through_and_stopped(tmp_path / "one", ff.Strategy())
    rank_group(2).run(through_and_stopped, tmp_path / "two", ff.Strategy(width=2))
    for folder in (tmp_path / "one", tmp_path / "two"):
        calm, steps, best = of_steps(folder / "calm")
        assert calm[-1]["after_step"] == 4 and steps == [2, 4] and best == Best(2, "score", 4.0)
        for name in ("best", "last"):
            assert of_steps(folder / name) == (calm, steps, best), name
            assert read_run_file(folder / name)["state"] == "finished"


def test_patience_needs_a_measure(tmp_path):
    with pytest.raises(RecipeError, match="patience is 3, and no measure says what is better; name one"):
        ff.fit(recipe(), ff.Strategy(), tmp_path, patience=3)
    with pytest.raises(RecipeError, match="patience must be"):
        ended(tmp_path, [], patience=0)


def test_the_best_is_known_before_its_checkpoint_is_written():
    steps = Steps.__new__(Steps)
    steps._recipe, steps._best, steps._in_vain = SimpleNamespace(best="score"), None, 0
    steps._run = SimpleNamespace(checkpoints=SimpleNamespace(best=None))
    found = [steps.better(number, {"score": score}) for number, score in enumerate((3.0, 1.0, 2.0))]
    assert found == [Best(0, "score", 3.0), None, None] and steps._in_vain == 2
