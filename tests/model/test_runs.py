"""Which runs of layers stand for blocks, and that a Sequential calls them as it would call its layers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fullframe.model.forward_patch import restore
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
        run = part(model, name)
        assert run is part(model, name)
        run.forward = lambda input, forward=run.forward, name=name: (seen.append(name), forward(input))[1]  # type: ignore[misc]
    assert torch.equal(model(x), expected) and seen == ["0[1:3]", "0[5:9]"]
    assert part(model, "0.3") is model[0][3]
    other = copy.deepcopy(model)
    assert torch.equal(other(x), expected) and len(seen) == 2, "a copy has the plain forward"
    model[0][1] = nn.Identity()
    fresh = nn.Sequential(chain(4, nn.Sigmoid()), nn.Conv2d(4, 2, 1))
    fresh[0][1] = nn.Identity()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x)) and len(seen) == 4, "a layer that was replaced"
    restore(model)
    assert torch.equal(model(x), fresh(x)) and len(seen) == 4
