"""The DETR example: drawn shapes, the loss against transformers', judging, an exact split, a training that learns."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DetrConfig
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

import fullframe as ff
from fullframe.data import Padded
from tests.examples.small import PNG, module, predicted_bytes, small, trained, verified

COLLATE = Padded(("boxes", "classes"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return small("detection", tmp_path, height=48, width=64, steps=60)


def test_shapes_lie_in_their_boxes() -> None:
    recipe = module("detection", "recipe")
    held_out = recipe.Shapes(48, 64, held_out=True)
    assert torch.equal(held_out[5]["image"], held_out[5]["image"])
    for index in range(6):
        sample = held_out[index]
        colourful = (sample["image"].amax(0) - sample["image"].amin(0)) > 0.2  # the photographs are grey
        rows, columns = colourful.nonzero().unbind(1)
        x, y = (columns + 0.5) / 64, (rows + 0.5) / 48
        left, top = (sample["boxes"][:, :2] - sample["boxes"][:, 2:] / 2).unbind(1)
        right, bottom = (sample["boxes"][:, :2] + sample["boxes"][:, 2:] / 2).unbind(1)
        inside = (x[:, None] > left) & (x[:, None] < right) & (y[:, None] > top) & (y[:, None] < bottom)
        assert inside.any(1).float().mean() > 0.97  # the rest is noise
        assert bool((inside.sum(0) > 20).all())


def test_the_loss_is_that_of_transformers() -> None:
    """But that it is divided by nothing, and that the class is weighted by NOTHING alone."""
    matching = module("detection", "matching")
    torch.manual_seed(0)
    logits, boxes = torch.randn(2, 5, 4), torch.rand(2, 5, 4) * 0.5 + 0.2
    batch = COLLATE([{"boxes": torch.rand(n, 4) * 0.5 + 0.2, "classes": torch.randint(3, (n,))} for n in (1, 3)])
    labels = [
        {"boxes": b[real], "class_labels": c[real]}
        for b, c, real in zip(batch["boxes"], batch["classes"], batch["boxes_mask"], strict=True)
    ]
    config = DetrConfig(num_labels=3, eos_coefficient=matching.NOTHING)
    _, parts, _ = ForObjectDetectionLoss(logits, labels, torch.device("cpu"), boxes, config)
    weights = 4 + 6 * matching.NOTHING  # four predictions have a box, six have none
    wanted = weights * parts["loss_ce"] + 4 * (5 * parts["loss_bbox"] + 2 * parts["loss_giou"])
    found = matching.loss_of_layer(logits, boxes, batch["classes"], batch["boxes"], batch["boxes_mask"])
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_judging() -> None:
    judging = module("detection", "judging")
    batch = COLLATE(
        [
            {"boxes": torch.tensor([[0.3, 0.3, 0.2, 0.2]]), "classes": torch.tensor([0])},
            {"boxes": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.7, 0.7, 0.2, 0.4]]), "classes": torch.tensor([0, 0])},
        ]
    )
    boxes = torch.stack([batch["boxes"][1], batch["boxes"][1]])
    likely = torch.tensor([[[0.9], [0.8]], [[0.7], [0.1]]])
    # In order: right, wrong (the first sample has nothing there), right, right: precision 1, 1/2, 2/3, 3/4.
    assert judging.average_precision(likely, boxes, batch) == pytest.approx((1 + 3 / 4 + 3 / 4) / 3)
    assert judging.best_overlap(likely, boxes, batch).tolist() == pytest.approx([1, 1, 1])
    moved = boxes + torch.tensor([0.1, 0, 0, 0])
    assert judging.best_overlap(likely, moved, batch)[0].item() == pytest.approx(1 / 3)


@pytest.mark.slow
def test_split_over_ranks(path: Path) -> None:
    verdict = verified(path, ff.Strategy(width=2))
    assert verdict.exact, verdict
    assert predicted_bytes(path, ff.Strategy(width=2)) < predicted_bytes(path, ff.Strategy())


def test_training_learns_and_draws(path: Path, tmp_path: Path) -> None:
    losses = [record["loss"] for record in trained(path, tmp_path / "run", ff.Strategy(clip_norm=1.0))]
    assert sum(losses[-15:]) < 0.95 * sum(losses[:15])
    results = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert results["usual_boxes"]["ap50"] < 0.3 and 0.2 < results["usual_boxes"]["iou"] < 0.7
    assert (tmp_path / "run" / "held_out.png").read_bytes().startswith(PNG)
