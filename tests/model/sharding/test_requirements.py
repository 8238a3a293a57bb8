"""What is refused before parameters are sharded; what the ranks must have in common is asked of FSDP2."""

import pytest
import torch
from torch import nn

from fullframe.errors import GradientError, MeshError
from fullframe.model.sharding.requirements import (
    require_called,
    require_dense,
    require_no_hooks,
    require_no_script,
    require_own_memory,
    require_whole,
)


def plain() -> nn.Conv2d:
    return nn.Conv2d(3, 4, 3)


def frozen() -> nn.Module:
    return nn.Sequential(plain(), nn.GroupNorm(2, 4).double().requires_grad_(False))


def with_a_sparse_table() -> nn.Module:
    return nn.ModuleDict({"classes": nn.Embedding(5, 4, sparse=True)})


def test_a_table_of_sparse_gradients() -> None:
    with pytest.raises(MeshError, match=r"Embedding .head\.classes. gives sparse gradients"):
        require_dense("head", with_a_sparse_table())


def test_what_can_be() -> None:
    for module in (plain(), frozen(), with_a_sparse_table().requires_grad_(False)):
        require_dense("head", module)
        require_no_hooks(module)
        require_no_script(module)
        require_whole(module)


def test_a_hook_that_nobody_would_call() -> None:
    module = plain()
    module.weight.register_hook(torch.sin)
    with pytest.raises(GradientError, match="weight has a gradient hook"):
        require_no_hooks(module)


def test_what_torchscript_compiled() -> None:
    scripted, traced = torch.jit.script(plain()), torch.jit.trace(plain(), torch.zeros(1, 3, 5, 6))
    for model, name in ((nn.Sequential(plain(), scripted), "1"), (nn.Sequential(traced), "0"), (scripted, "the model")):
        with pytest.raises(MeshError, match=f"module '{name}' was compiled by TorchScript"):
            require_no_script(model)


def test_what_shares_memory_with_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight  # one parameter of two names
    require_own_memory(model)
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    model[1].weight.data = model[0].weight.data
    with pytest.raises(MeshError, match=r"0\.weight and 1\.weight share their memory .*one\.weight = other\.weight"):
        require_own_memory(model)
    model[1].weight.data = model[0].weight.data.clone()
    require_own_memory(model)
    model.register_buffer("teacher", model[0].weight.detach())
    with pytest.raises(MeshError, match=r"0\.weight and teacher share their memory|teacher and 0\.weight share"):
        require_own_memory(model)


class Called(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["conv"](x)


def test_a_container_is_never_called() -> None:
    for model, kind in (nn.ModuleDict({"conv": plain()}), "ModuleDict"), (nn.ModuleList([plain()]), "ModuleList"):
        with pytest.raises(MeshError, match=f"the model is an nn.{kind} and has no forward.* give each of these to"):
            require_called(model)
    for model in (Called({"conv": plain()}), nn.Sequential(plain()), plain()):
        require_called(model)
