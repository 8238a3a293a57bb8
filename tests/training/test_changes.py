"""What a loss has changed beside buffers."""

import pytest
import torch
from torch import nn

from fullframe.training.changes import Changes


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    made[1].requires_grad_(False)
    return made


def test_writes_into_the_batch_are_seen_and_new_entries_are_not() -> None:
    batch = {"image": torch.zeros(2), "more": [torch.zeros(1)]}
    changes = Changes(batch, model(), "none")
    batch["image"] = torch.ones(2)
    assert not changes.of_batch()
    batch["more"][0] += 1
    assert changes.of_batch() and not changes.of_parameters()


@pytest.mark.parametrize(("of", "seen"), [("all", [True, True]), ("frozen", [False, True]), ("none", [False, False])])
def test_writes_to_parameters_are_seen_by_data_too(of: str, seen: list[bool]) -> None:
    for layer, expected in enumerate(seen):
        net = model()
        nn.init.constant_(net[0].bias, float("nan"))
        changes = Changes({}, net, of)  # type: ignore[arg-type]
        assert not changes.of_parameters()
        net[layer].weight.data.mul_(2)
        assert changes.of_parameters() is expected
