"""Lent tensors are a module's own wherever it holds them, and gone afterwards."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fullframe.model.lent import lent


class Twice(nn.Module):
    """One layer under two names, and another that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.same = self.one
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.one.weight
        self.register_buffer("scale", torch.ones(2))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.tied(self.same(self.one(x)))


def test_a_module_of_two_names_and_a_tied_weight() -> None:
    module = Twice()
    held = OrderedDict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    zeros = {name: torch.zeros_like(value) for name, value in (*module.named_parameters(), *module.named_buffers())}
    with lent(module, zeros | {"tied.bias": torch.ones(2), "scale": torch.full((2,), 3.0)}):
        assert module(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
        module.scale = torch.zeros(2)
    now = OrderedDict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    assert now.keys() == held.keys() and all(now[name] is held[name] for name in held)


def test_what_is_not_lent_stays_as_it_was_left() -> None:
    module = Twice()
    with lent(module, {"one.weight": torch.zeros(2, 2)}):
        assert not module.tied.weight.any()
        module.scale = torch.zeros(2)
    assert isinstance(module.one.weight, nn.Parameter) and module.tied.weight is module.one.weight
    assert not module.scale.any()
