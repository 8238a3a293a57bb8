"""Every tensor that enters or leaves a module, and how two are compared."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullframe.verification.module_tensors import ModuleTensors, compared
from fullframe.verification.verdict import Place


@dataclass
class Pair:
    a: Tensor
    b: Tensor


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return Pair(self.inner(x) * scale, self.inner(-x))


def test_places_in_order_of_execution_with_calls_and_callers() -> None:
    seen: list[tuple[Place, float]] = []
    model = Twice()
    with ModuleTensors(model, lambda place, tensor: seen.append((place, float(tensor)))):
        model(torch.tensor(2.0), scale=torch.tensor(3.0))
        again = torch.ones((), requires_grad=True)
        again.register_hook(lambda gradient: model(gradient, scale=gradient).a)  # as recompute does, in backward
        again.backward()
    model(torch.tensor(5.0), scale=torch.tensor(5.0))  # nobody looks any more
    assert [(p.kind, p.path, p.call, p.leaf, value) for p, value in seen] == [
        ("input", "", 0, 0, 2), ("input", "", 0, 1, 3),
        ("input", "inner", 0, 0, 2), ("output", "inner", 0, 0, 2),
        ("input", "inner", 1, 0, -2), ("output", "inner", 1, 0, 0),
        ("output", "", 0, 0, 6), ("output", "", 0, 1, 0),
    ]  # fmt: skip
    assert (seen[0][0].caller, seen[2][0].caller, seen[2][0].caller_class) == (None, "", "Twice")


@pytest.mark.parametrize(
    ("expected", "got", "max_abs", "scale"),
    [
        ([1.0, -4.0], [1.5, -4.0], 0.5, 4.0),
        ([torch.inf, torch.nan, 2.0], [torch.inf, torch.nan, 2.0], 0.0, None),
        ([torch.inf, 2.0], [-torch.inf, 2.0], torch.inf, None),
        ([torch.nan, 2.0], [1.0, 2.0], torch.inf, None),
        ([1.0, 2.0], [torch.nan, 2.0], torch.inf, 2.0),
        ([-3e38, 2.0], [-3e38, 3.0], 1.0, 2.0),  # a mask's stand-in for infinity is no scale
    ],
)
def test_differences(expected: list[float], got: list[float], max_abs: float, scale: float | None) -> None:
    found = compared(torch.tensor(expected), torch.tensor(got), rank=3)
    assert found.max_abs == max_abs and found.floating and found.rank == 3 and not found.problem
    assert scale is None or found.scale == scale


def test_shapes_dtypes_and_whole_numbers() -> None:
    wave = torch.tensor([1 + 2j]).conj()
    assert compared(wave, wave.resolve_conj()).max_abs == 0.0 and compared(wave, wave.conj()).max_abs == 4.0
    assert "(3,) torch.float32 instead of (2,) torch.float32" in compared(torch.zeros(2), torch.zeros(3)).problem
    assert compared(torch.zeros(2), torch.zeros(2).double()).problem
    assert not compared(torch.ones(2).int(), torch.ones(2).int()).floating
    assert compared(torch.zeros(0), torch.zeros(0)).max_abs == 0
    assert compared(torch.tensor([1j]), torch.tensor([2j]))[:3] == (1, 1, True)
    assert compared(torch.tensor([3], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8)).max_abs == 2
    long = torch.zeros(2**18 + 5)
    assert compared(long, long.index_fill(0, torch.tensor([2**18 + 4]), 2.0)).max_abs == 2  # in the second chunk
