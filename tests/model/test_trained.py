"""Which parameters are trained; that what only parts of a model have shown is seen is asked in test_averaging."""

import torch
from torch import nn

from fullframe.model.trained import frozen, late, trained


def test_each_parameter_that_requires_a_gradient_is_found_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(2, 1, bias=False)))
    found, has_frozen = trained(model)
    assert set(found) == set(model.parameters()) and not has_frozen
    assert found[shared.weight] == (torch.float32, torch.device("cpu"))
    shared.bias.requires_grad_(False)
    found, has_frozen = trained(model)
    assert shared.bias not in found and has_frozen


def test_frozen_inside() -> None:
    layer = nn.Linear(2, 2)
    with frozen([layer.weight]):
        assert list(trained(layer)[0]) == [layer.bias]
    assert set(trained(layer)[0]) == set(layer.parameters())


def test_who_came_late_is_named() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    error = late(model, model["head"].parameters(), "what came of it")
    assert str(error).startswith("head.weight, head.bias: trained only since")
    assert "what came of it. Call the model as a whole once" in str(error)
