"""What a recomputed block reads beside its inputs, and what becomes of it before backward: as in torch, or refused."""

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.readings import ForeignParameters, Readings
from tests.techniques.test_recompute import assert_same


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.begin()

    def begin(self) -> None:
        """What else there is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).tanh()).tanh()  # type: ignore[no-any-return]


def run(layer: type[nn.Module], loss: Callable[..., Tensor] | None = None, **options: Any) -> list[Tensor]:
    """Parameters after three steps of three layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(3))).double()
    optimizer, strategy = torch.optim.Adam(model.parameters(), lr=0.1), ff.Strategy(**options)
    step = ff.TrainStep(model, loss or (lambda model, x: model(x).square().mean()), optimizer, strategy)
    for _ in range(3):
        step(torch.randn(2, 3, 5, 6, dtype=torch.float64))
    return [p.detach() for p in model.parameters()]


def again(layer: type[nn.Module], loss: Callable[..., Tensor] | None = None, **options: Any) -> list[Tensor]:
    return run(layer, loss, recompute="blocks", recompute_modules=("0", "1", "2"), **options)


class Drawing(Layer):
    def begin(self) -> None:
        self.python, self.numpy = random.Random(0), np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor(self.python.random() + self.numpy.rand(), dtype=x.dtype)
        return super().forward(x * scale)


class Viewed(Layer):
    """One buffer is a part of another."""

    def begin(self) -> None:
        self.register_buffer("stats", torch.zeros(2, 3, dtype=torch.float64))
        self.register_buffer("mean", self.stats[0])

    def double(self) -> Any:
        """As all is from the start; a conversion would part the buffers, in torch too."""

    def forward(self, x: Tensor) -> Tensor:
        self.stats.lerp_(torch.stack([x.detach().mean((0, 2, 3)), x.detach().var((0, 2, 3))]), 0.5)
        return super().forward(x - self.mean[:, None, None])


@pytest.mark.parametrize("layer", [Drawing, Viewed])
def test_generators_and_buffers_that_share_memory(layer: type[nn.Module]) -> None:
    assert_same(again(layer), run(layer))


class Adding(Layer):
    def begin(self) -> None:
        self.count = torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Iterating(Layer):
    def begin(self) -> None:
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * next(self.numbers))


class Remembering(Layer):
    def begin(self) -> None:
        self.seen: collections.deque[Tensor] = collections.deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + (self.seen[-1] if self.seen else 0))
        self.seen.append(y.detach())
        return y


box = {"calls": 0}


class Global(Layer):
    def forward(self, x: Tensor) -> Tensor:
        box["calls"] += 1
        return super().forward(x * box["calls"])


ANOTHER = "had another result when it was recomputed in backward, so gradients would be wrong"
REFUSED = {
    Adding: "0 writes to its attribute count in forward, which it would do once more .* make it a buffer",
    Iterating: "0 has an iterator, its attribute numbers",
    Remembering: ANOTHER,
    Global: ANOTHER,
}


@pytest.mark.parametrize("layer", REFUSED)
def test_what_a_second_pass_would_not_find_as_it_was_is_refused(layer: type[nn.Module]) -> None:
    with pytest.raises(StrategyError, match=REFUSED[layer] + ".* name other modules with recompute_modules"):
        again(layer)


@dataclasses.dataclass
class State:
    x: Tensor


class Changing(Layer):
    def forward(self, state: Any) -> Any:
        state.x = super().forward(state.x)
        return state


class Returning(Layer):
    def forward(self, state: Any) -> Any:
        return State(super().forward(state.x))


def through_states(model: Any, x: Tensor) -> Tensor:
    state = State(x * 1)
    for layer in model:
        new = layer(state)
        state.x = new.x
    return state.x.square().mean()


def with_positions(model: Any, x: Tensor) -> Tensor:
    positions = torch.zeros(5, 6, dtype=x.dtype)
    for layer in model:
        layer.positions = positions
        x = layer(x + layer.positions)
        positions += 0.5
    return x.square().mean()


def written(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    with torch.no_grad():
        model[0].last.bias.mul_(0.9)
    return loss


def frozen(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model[0].requires_grad_(False)
    return loss


@pytest.mark.parametrize(
    ("layer", "loss", "message"),
    [
        (Changing, through_states, "0 writes to x of the State it is given in forward"),
        (Returning, through_states, "2 reads x of the State it is given, which was written to after its forward pass"),
        (Layer, with_positions, "2 reads its attribute positions, which was written to after its forward pass"),
        (Layer, written, "0 reads its parameter last.bias, which was written to after its forward pass"),
        (Layer, frozen, "0 reads its parameter conv.weight, whose requires_grad was set after its forward pass"),
    ],
)
def test_what_is_changed_by_someone_else_is_refused(layer: Any, loss: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        again(layer, loss)


def tied(model: Any, x: Tensor) -> Tensor:
    """The first layer reads a weight of the last that it does not train."""
    model[0].tied = (model[2].last,)
    return model(x).square().mean()


class Tied(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.tied[0].weight.detach().mean().exp() if hasattr(self, "tied") else y


def test_a_weight_of_another_block_that_is_updated_in_backward_is_refused() -> None:
    assert_same(again(Tied, tied), run(Tied, tied))
    with pytest.raises(StrategyError, match=r"0 reads a parameter of another module, of shape \(3, 3, 1, 1\),"):
        again(Tied, tied, update_in_backward=True)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).exp()
        z = self.last(y * 1)
        y.add_(1)
        return z.tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("of", [run, again])
def test_what_is_saved_and_written_to_within_a_block_is_an_error_as_in_torch(of: Any) -> None:
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        of(InPlace)


class SavingMore(Layer):
    """The second pass saves one tensor more, after all that the first did; torch has stopped by then."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * torch.ones_like(y) if torch._C._current_graph_task_id() >= 0 else y * 1


def test_what_a_second_pass_saves_beyond_the_first_is_let_be() -> None:
    assert_same(again(SavingMore), run(SavingMore))


def test_parameters_of_others_are_seen_and_inference_tensors_let_be() -> None:
    own, other, known, readings = nn.Linear(2, 2), nn.Linear(2, 2), dict[nn.Parameter, None](), Readings()
    with ForeignParameters(own.parameters(), known, readings):
        torch.cat([own(torch.ones(1, 2)), other(torch.ones(1, 2))])
    assert {id(p) for p in known} == {id(p) for p in other.parameters()} and readings.written() is None
    with torch.inference_mode():
        readings.add("made in inference mode", torch.ones(1))
    with torch.no_grad():
        other.bias.zero_()
    assert readings.written() == "a parameter of another module, of shape (2,)"
