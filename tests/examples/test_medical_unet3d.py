"""The example with volumes: drawn patients, a split of their depth that is exact, and a training that learns."""

import json
from pathlib import Path

import pytest
import torch

import fullframe as ff
from tests.examples.small import PNG, module, predicted_bytes, small, trained, verified


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return small("medical_unet3d", tmp_path, depth=20, height=16, width=20, steps=8)


def test_patients() -> None:
    recipe = module("medical_unet3d", "recipe")
    scans, held_out = recipe.Scans((20, 18, 24)), recipe.Scans((20, 18, 24), held_out=True)
    assert torch.equal(scans[0]["scan"], scans[0]["scan"]) and not torch.equal(scans[0]["scan"], held_out[0]["scan"])
    assert not set(scans.patients) & set(held_out.patients)
    organs = torch.stack([scans[index]["organs"] for index in range(4)])
    assert set(organs.unique().tolist()) == set(range(recipe.CLASSES))
    liver, spleen = ((organs == number).nonzero()[:, 3].double().mean() for number in (1, 2))
    assert liver < 11.5 < spleen  # the patient's left is where W is large
    turned = recipe.rotation(torch.tensor([0.1, -0.4, 0.7]))
    assert torch.allclose(turned @ turned.T, torch.eye(3), atol=1e-6) and turned.det() > 0


def test_dice() -> None:
    recipe = module("medical_unet3d", "recipe")
    true = torch.zeros(1, 4, 5, 6, dtype=torch.int64)
    true[0, :2], true[0, 2] = 1, 2
    found = true.clone()
    assert torch.allclose(recipe.judged(found, true), torch.ones(1, 4))
    found[0, 1] = 0  # half of the first organ
    assert recipe.judged(found, true)[0, 0].item() == pytest.approx((2 * 30 + 1) / (30 + 60 + 1))


@pytest.mark.parametrize("mesh", [{"depth": 2}, {"width": 2}], ids=str)
def test_split_over_ranks(path: Path, mesh: dict[str, int]) -> None:
    strategy = ff.Strategy(**mesh)  # type: ignore[arg-type]
    verdict = verified(path, strategy)
    assert verdict.exact, verdict
    assert predicted_bytes(path, strategy) < predicted_bytes(path, ff.Strategy())


def test_training_learns_and_draws(path: Path, tmp_path: Path) -> None:
    losses = [record["loss"] for record in trained(path, tmp_path / "run")]
    assert losses[-1] < 0.9 * losses[0]
    results = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert 0 < results["usual_place"]["mean"] < 0.7
    assert (tmp_path / "run" / "held_out.png").read_bytes().startswith(PNG)
