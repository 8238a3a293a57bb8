"""Which parameters are trained; that what only parts of a model have shown is seen is asked in test_averaging."""

import pytest
import torch
from torch import nn

from fullframe.errors import ShapeError
from fullframe.model.trained import frozen, late, overlapping, require_shapes, sparse_tables, trained


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
    with pytest.raises(OSError), frozen([layer.weight]):
        raise OSError
    assert set(trained(layer)[0]) == set(layer.parameters())
    layer.bias.requires_grad_(False)
    with frozen([layer.weight, layer.bias]):
        assert not trained(layer)[0]
    assert list(trained(layer)[0]) == [layer.weight]


def test_tables_with_sparse_gradients_are_those_that_are_trained() -> None:
    model = nn.ModuleDict({"sparse": nn.Embedding(3, 2, sparse=True), "dense": nn.Embedding(3, 2)})
    assert sparse_tables(model) == {"sparse": model["sparse"]}
    model.requires_grad_(False)
    assert not sparse_tables(model)


def test_a_lazy_buffer_is_lazy_too() -> None:
    with pytest.raises(ShapeError, match="running_mean, running_var are lazy"):
        require_shapes(nn.LazyBatchNorm1d(affine=False))


def test_who_came_late_is_named() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    error = late(model, model["head"].parameters(), "what came of it")
    assert str(error).startswith("head.weight, head.bias: trained only since")
    assert "what came of it. Call the model as a whole once" in str(error)


@pytest.mark.parametrize(
    ("parameters", "others", "share"),
    [  # rows of one memory
        ([slice(0, 2), slice(2, 4)], [], False),
        ([slice(2, 4), slice(0, 3)], [], True),
        ([slice(0, 4), slice(1, 2)], [], True),
        ([slice(0, 0), slice(0, 4)], [], False),
        ([slice(0, 2)], [slice(2, 4), slice(3, 4)], False),
        ([slice(0, 2)], [slice(1, 4)], True),
        ([slice(2, 3)], [slice(0, 4), slice(0, 1)], True),
    ],
)
def test_what_shares_memory_with_a_parameter(parameters: list[slice], others: list[slice], share: bool) -> None:
    whole = torch.zeros(4, 3)
    tensors = [*(nn.Parameter(whole[rows]) for rows in parameters), *(whole[rows] for rows in others), torch.zeros(4)]
    assert bool(overlapping((str(number), tensor) for number, tensor in enumerate(tensors))) is share
