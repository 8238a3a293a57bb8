"""A forward run inside something else."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fullframe.model.forward_patch import PatchedForward, restore, unpatch


class Added(PatchedForward):
    def __init__(self, module: nn.Module, amount: float):
        super().__init__(module)
        self.amount = amount

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) + self.amount


class Doubled(nn.Module):
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return x * times


def patched() -> Doubled:
    module = Doubled()
    module.forward = Added(module, 1)  # type: ignore[method-assign, assignment]
    module.forward = Added(module, 10)  # type: ignore[method-assign, assignment]
    return module


def test_patches_nest_and_come_off_in_turn() -> None:
    module, x = patched(), torch.ones(1)
    assert module(x).item() == 13 and module(x, times=3).item() == 14
    unpatch(module)
    assert module(x).item() == 3
    unpatch(module)
    assert module(x).item() == 2 and "forward" not in module.__dict__


def test_the_forward_of_another_module_is_there_again_when_the_patch_is_off() -> None:
    module, other = Doubled(), patched()
    module.forward = other.forward.original.original  # type: ignore[attr-defined, method-assign]
    own = module.forward
    module.forward = Added(module, 1)  # type: ignore[method-assign, assignment]
    unpatch(module)
    assert module.forward == own and own.__self__ is other  # type: ignore[attr-defined]


def test_restore_takes_all_off() -> None:
    model = nn.Sequential(patched(), nn.Sequential(patched()))
    restore(model)
    assert model(torch.ones(1)).item() == 4
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_patched_forward_looks_like_its_own() -> None:
    assert list(inspect.signature(patched().forward).parameters) == ["x", "times"]


def test_a_copy_runs_the_module_s_own_forward() -> None:
    assert copy.deepcopy(patched())(torch.ones(1)).item() == 2
