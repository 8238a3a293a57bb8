"""The SegFormer example: mosaics with a known truth, an exact split, and a training that learns."""

import json
from pathlib import Path

import pytest
import torch

import fullframe as ff
from tests.examples.small import PNG, module, predicted_bytes, small, trained, verified


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return small("semantic_segmentation", tmp_path, height=64, width=96, steps=12)


def test_mosaics() -> None:
    recipe = module("semantic_segmentation", "recipe")
    held_out = recipe.Mosaics(48, 80, held_out=True)
    image, mask = held_out[3]["image"], held_out[3]["mask"]
    assert image.shape == (3, 48, 80) and mask.shape == (48, 80) and torch.equal(held_out[3]["image"], image)
    assert set(mask.unique().tolist()) <= {*range(len(recipe.TEXTURES)), recipe.IGNORED}
    for dim in (0, 1):  # another texture never begins without a border
        here, there = mask.narrow(dim, 1, mask.shape[dim] - 1), mask.narrow(dim, 0, mask.shape[dim] - 1)
        both = (here != recipe.IGNORED) & (there != recipe.IGNORED)
        assert torch.equal(here[both], there[both])
    assert 0.01 < (mask == recipe.IGNORED).float().mean() < 0.3
    drawn = recipe.Mosaics(48, 80)
    assert not torch.equal(drawn[0]["image"], drawn[0]["image"])  # by torch's own random state
    parts = [recipe.part("grass", held_out) for held_out in (False, True)]
    assert [part.shape for part in parts] == [(512, 384), (512, 128)]
    assert abs(float(torch.cat(parts, 1).mean())) < 1e-4


def test_a_guess_by_brightness() -> None:
    recipe = module("semantic_segmentation", "recipe")
    mask = torch.tensor([[0, 1, 2, recipe.IGNORED]])
    sample = {"image": torch.tensor([-2.0, 0.0, 2.0, 2.0]).expand(3, 1, 4), "mask": mask}
    (guess,) = recipe.by_brightness([sample], [sample])
    assert guess.tolist() == [[0, 1, 2, 2]]
    found = torch.tensor([[[0, 1, 1, 4]]])
    assert recipe.figures(guess[None], mask[None])["right"] == 1.0
    assert recipe.figures(found, mask[None])["right"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_split_over_ranks(path: Path) -> None:
    verdict = verified(path, ff.Strategy(width=2))
    assert verdict.exact, verdict
    whole, part = (predicted_bytes(path, ff.Strategy(width=width)) for width in (1, 2))
    assert part < whole


def test_training_learns_and_draws(path: Path, tmp_path: Path) -> None:
    losses = [record["loss"] for record in trained(path, tmp_path / "run")]
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
    results = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert 0.2 < results["brightness"]["right"] < 0.6 and results["network"]["right"] > 0.1
    assert (tmp_path / "run" / "held_out.png").read_bytes().startswith(PNG)
