"""Samples with unequally many boxes in one batch."""

import pytest
import torch

from fullframe.data.padding import Padded
from fullframe.errors import ShapeError


def test_boxes_are_filled_up_and_the_mask_tells_which_are_there() -> None:
    samples = [
        {"boxes": torch.ones(2, 4), "labels": torch.tensor([3, 4]), "name": "a"},
        {"boxes": torch.ones(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "name": "b"},
    ]
    batch = Padded(("boxes", "labels"))(samples)
    assert batch["name"] == ["a", "b"] and batch["boxes"].shape == (2, 2, 4)
    assert batch["labels"].tolist() == [[3, 4], [0, 0]] and batch["labels"].dtype == torch.int64
    assert batch["boxes_mask"].tolist() == [[True, True], [False, False]]
    assert Padded(("labels",), mask="there")([samples[0]])["there"].tolist() == [[True, True]]


def test_keys_that_disagree_are_named() -> None:
    with pytest.raises(ShapeError, match=r"boxes \(2\), labels \(1\)"):
        Padded(("boxes", "labels"))([{"boxes": torch.ones(2, 4), "labels": torch.ones(1)}])
