"""Which runs of layers stand for blocks, and that a Sequential calls them as it would call its layers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullframe.model.forward_patch import PatchedForward, restore
from fullframe.model.runs import part, runs_of_layers


def chain(number: int, *first: nn.Module) -> nn.Sequential:
    layers = [layer for _ in range(number) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*first, *layers)


def pyramid() -> nn.Sequential:
    """Each level keeps a quarter of the numbers of the level before."""
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(9)))


class Own(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def patched() -> nn.Sequential:
    model = chain(9)
    model.forward = lambda input: input * 2  # type: ignore[method-assign]
    return model


def of_another() -> nn.Sequential:
    model, other = chain(9), chain(9)
    model.forward = other.forward  # type: ignore[method-assign]
    return model


class Passed(PatchedForward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def twice_patched() -> nn.Sequential:
    model = chain(4)
    for _ in range(2):
        model.forward = Passed(model)  # type: ignore[method-assign, assignment]
    return model


def grown(by: Callable[[], nn.Module]) -> nn.Sequential:
    """Each level keeps four times the numbers of the level before."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 1), by())))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.own, self.few = chain(9), Own(*chain(9)), chain(3)
        self.parts = nn.ModuleList([chain(4)])


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "three of nine": (lambda: chain(9), ["[0:6]", "[6:12]", "[12:18]"]),
    "what comes first": (lambda: chain(4, nn.ReLU(inplace=True)), ["[1:5]", "[5:9]"]),
    "inside a model": (Net, ["encoder[0:6]", "encoder[6:12]", "encoder[12:18]", "parts.0[0:4]", "parts.0[4:8]"]),
    "with a forward that the user has set": (patched, []),
    "with the forward of another": (of_another, []),
    "patched": (twice_patched, ["[0:4]", "[4:8]"]),
    "norms are none": (lambda: nn.Sequential(*(nn.Sequential(c, nn.BatchNorm2d(4)) for c in chain(3))), []),
    "eight": (lambda: chain(8), ["[0:6]", "[6:10]", "[10:16]"]),
    "after much that has none": (lambda: chain(4, *map(nn.Softplus, range(1, 41))), ["[40:44]", "[44:48]"]),
    "transposed": (lambda: grown(lambda: nn.ConvTranspose2d(4, 4, 2, stride=2)), ["[0:7]", "[7:8]"]),
    "upsampled": (lambda: grown(lambda: nn.Upsample(scale_factor=2)), ["[0:6]", "[6:8]"]),
    "to a size": (lambda: grown(lambda: nn.Upsample(size=8)), ["[0:4]", "[4:8]"]),
    "too few": (lambda: chain(3), []),
    "no Sequential": (lambda: nn.Conv2d(3, 3, 3), []),
    "by what they keep": (pyramid, ["[0:1]", "[1:9]"]),
    "of Sequentials": (lambda: nn.Sequential(*(chain(1) for _ in range(4))), ["[0:2]", "[2:4]"]),
}


@pytest.mark.parametrize("case", CASES)
def test_runs(case: str) -> None:
    build, names = CASES[case]
    assert runs_of_layers(build()) == names


def test_a_sequential_calls_its_runs_and_what_lies_between() -> None:
    model = nn.Sequential(chain(4, nn.Sigmoid()), nn.Conv2d(4, 2, 1))
    x = torch.randn(1, 4, 5, 5)
    expected, seen = model(x), []
    for name in ("0[1:3]", "0[5:9]"):
        model[0].forward = Passed(model[0])  # type: ignore[method-assign, assignment]
        run = part(model, name)
        assert run is part(model, name)
        run.forward = lambda input, forward=run.forward, name=name: (seen.append(name), forward(input))[1]  # type: ignore[misc]
    assert torch.equal(model(x), expected) and seen == ["0[1:3]", "0[5:9]"]
    hooked: list[nn.Module] = []
    with nn.modules.module.register_module_forward_hook(lambda module, given, result: hooked.append(module)):
        model(x)
    assert hooked == [*model[0], model[0], model[1], model], "a run is no module of the user's"
    seen.clear()
    assert part(model, "0.3") is model[0][3]
    other = copy.deepcopy(model)
    assert torch.equal(other(x), expected) and not seen, "a copy has the plain forward"
    model[0][1] = nn.Identity()
    fresh = nn.Sequential(chain(4, nn.Sigmoid()), nn.Conv2d(4, 2, 1))
    fresh[0][1] = nn.Identity()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x)) and len(seen) == 2, "a layer that was replaced"
    restore(model)
    assert torch.equal(model(x), fresh(x)) and len(seen) == 2
