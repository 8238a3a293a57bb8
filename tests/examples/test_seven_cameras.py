"""The seven-camera example: what is predicted for the published set-up, and the same recipe, narrow, split here."""

from pathlib import Path

import pytest

import fullframe as ff
from fullframe.recipe import load_recipe
from tests.examples.small import EXAMPLES, PNG, module, small, trained, verified

GIB = 2**30


def test_the_published_figures_are_met() -> None:
    job = load_recipe(EXAMPLES / "seven_cameras" / "recipe.py")
    assert job.batch_size == 7 and job.sample is not None and job.sample()["image"].shape == (3, 512, 2048)
    recomputed = ff.simulate(job, ff.Strategy(precision="bf16", recompute="blocks"), "A100-80GB")
    assert recomputed.peak_bytes / GIB == pytest.approx(11.89, rel=0.02)
    assert 300e6 < recomputed.parameters < 400e6


def test_the_picture(tmp_path: Path) -> None:
    memory = module("seven_cameras", "memory")
    values = {way: [40.0, 25.0, 15.5, 10.8] for way in memory.WAYS}
    memory.draw(values, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)


def test_narrow_it_is_exact_and_trains(tmp_path: Path) -> None:
    path = small("seven_cameras", tmp_path, height=32, width=128, tiny=True, steps=2)
    verdict = verified(path, ff.Strategy(width=2))
    assert verdict.exact, verdict
    losses = [record["loss"] for record in trained(path, tmp_path / "run")]
    assert losses[0] == pytest.approx(6.9, abs=0.5) and losses[1] < losses[0] + 0.2
