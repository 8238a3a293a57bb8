"""A checkpoint evaluated afterwards gives what the training wrote, to the last digit; elsewhere to rounding."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import fullframe as ff
from fullframe.errors import CheckpointError, FullframeError, RecipeError, RunError
from fullframe.training.checkpoints.export import export
from fullframe.training.evaluate_run import Evaluated, evaluate_run, forward_only
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Network, Plain, evaluate, recipe


def frames():
    return Frames(3, augment=False)


JOB = recipe(model=Network, evaluate=evaluate, evaluation_data=frames, evaluate_every=2, best="-entropy")
ONE, WIDTH, DATA = ff.Strategy(), ff.Strategy(width=2), ff.Strategy(data=2)
STAGES = ff.Strategy(stages=2, microbatches=2)
SHARDED = ff.Strategy(data=2, shard_parameters=True, ema_decay=0.5, microbatches=2)


def on_ranks(strategy, function, *arguments):
    """What each rank found."""
    if strategy.ranks == 1:
        return [function(strategy, *arguments)]
    return rank_group(strategy.ranks).run(function, strategy, *arguments)


def train(strategy, run_dir, steps=5):
    ff.fit(JOB, strategy, run_dir, steps=steps, checkpoint_every=2, keep_checkpoints=9)


def evaluated(strategy, run_dir, job=JOB, **options):
    counted = []
    found = evaluate_run(job, strategy, run_dir, progress=lambda *done: counted.append(done), **options)
    return found, counted


def of_step(strategy, run_dir, step):
    return evaluated(strategy, run_dir, step=step)


def written(run_dir):
    """What the training measured, by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("entropy", "accuracy")
    return {line["step"]: {name: line[name] for name in names} for line in lines if names[0] in line}


@pytest.mark.parametrize(
    "strategy",
    [ONE, WIDTH, replace(WIDTH, ema_decay=0.5), DATA, SHARDED, STAGES],
    ids=["one", "width", "average", "data", "sharded", "stages"],
)
def test_the_numbers_of_the_training(tmp_path, strategy):
    on_ranks(strategy, train, tmp_path)
    before = written(tmp_path)
    assert list(before) == [2, 4, 5]
    averaged = strategy.ema_decay is not None
    counted = [(2, 3), (3, 3)] if strategy.data == 2 else [(1, 3), (2, 3), (3, 3)]
    for step in (2, 5):
        for found in on_ranks(strategy, of_step, tmp_path, step):
            assert found == (Evaluated(step=step, averaged=averaged, measured=before[step], problems=[]), counted)


def test_on_other_meshes(tmp_path):
    trained = replace(WIDTH, ema_decay=0.5)
    on_ranks(trained, train, tmp_path)
    expected = written(tmp_path)[5]
    for strategy in (ONE, DATA, ff.Strategy(height=2), SHARDED, STAGES):
        for found, _ in on_ranks(strategy, evaluated, tmp_path):
            assert found.measured == pytest.approx(expected, rel=1e-9) and found.averaged


def test_raw_and_averaged_are_what_plain_torch_measures(tmp_path):
    train(ff.Strategy(ema_decay=0.5), tmp_path)
    measured = {}
    for average in (False, True):
        file = export(tmp_path, tmp_path / f"{average}.safetensors", average=average).path
        model = Network().eval()
        model.load_state_dict(load_file(file))
        sums = Counter()
        for batch in torch.utils.data.DataLoader(frames()):
            with torch.no_grad():
                found = evaluate(model, batch)
            for name, (total, count) in found.items():
                sums[name] += float(total)
                sums[name, "count"] += float(count)
        found, _ = evaluated(ONE, tmp_path, raw=not average)
        measured[average] = {name: sums[name] / sums[name, "count"] for name in ("entropy", "accuracy")}
        assert found.averaged is average and found.measured == pytest.approx(measured[average], rel=1e-12)
    assert measured[True] != measured[False]


def test_the_best_and_a_damaged_one(tmp_path):
    train(ONE, tmp_path)
    before = written(tmp_path)
    best = min(before, key=lambda step: before[step]["entropy"])
    found, _ = evaluated(ONE, tmp_path, best=True)
    assert (found.step, found.measured) == (best, before[best])
    (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").write_text("{")
    found, _ = evaluated(ONE, tmp_path)
    assert (found.step, found.measured) == (4, before[4])
    assert "step-00000005 is unreadable" in found.problems[0]


def refusal(strategy, run_dir, changes, options):
    try:
        evaluate_run(replace(JOB, **changes), strategy, run_dir, **options)
    except FullframeError as error:
        return type(error), str(error)
    return None, ""


def too_large(model, batch):
    raise torch.OutOfMemoryError("not enough memory: you tried to allocate 9 bytes.\nmore")


def none():
    return Frames(0, augment=False)


def test_refusals_reach_all_ranks(tmp_path):
    on_ranks(WIDTH, train, tmp_path / "run", 2)
    (tmp_path / "empty").mkdir()
    nothing = dict.fromkeys(("evaluate", "evaluation_data", "best"))
    cases = [
        ({}, "empty", {}, RunError, "holds no checkpoint; give the --run-dir of a run that has written one"),
        ({}, "empty", {"best": True}, RunError, "says of no checkpoint that it is the best"),
        ({}, "run", {"step": 1}, RunError, "holds no checkpoint after step 1, but after 2"),
        ({}, "run", {"step": 2, "best": True}, RunError, "step and best are both given; take one of them"),
        (nothing, "run", {}, RecipeError, "the recipe evaluates nothing; give it evaluate and evaluation_data"),
        ({"evaluation_data": none}, "run", {}, RecipeError, "evaluation_data() has no samples"),
        ({"model": Plain}, "run", {}, CheckpointError, "the checkpoint is of another model: the model's"),
        ({"evaluate": too_large}, "run", {}, RunError, "you tried to allocate 9 bytes). An evaluation takes"),
    ]
    for changes, folder, options, kind, message in cases:
        for found, text in on_ranks(WIDTH, refusal, tmp_path / folder, changes, options):
            assert found is kind and message in text, (found, text)


def test_what_bears_on_a_forward_pass():
    assert forward_only(SHARDED) == ff.Strategy(data=2, shard_parameters=True)
    kept = ff.Strategy(depth=2, width=2, precision="bf16", compile=True)
    assert forward_only(replace(kept, clip_norm=1.0, offload=True)) == kept
