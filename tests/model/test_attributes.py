"""What a forward pass sets on modules, taken back."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from fullframe.model.attributes import kept_attributes


class Noting(nn.Module):
    """Counts, keeps what it made, and registers a buffer, in the place of one and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.grid = 0, None
        self.register_buffer("center", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.grid, self.more = torch.zeros_like(x), [x]
        self.center = x
        self.register_buffer("seen", x)
        return x


def test_attributes_and_buffers_are_as_before_after_an_error_too() -> None:
    model = nn.Sequential(Noting(), Noting())
    before = dict(vars(model[0]))
    try:
        with kept_attributes(model):
            model(torch.zeros(2))
            assert model[1].calls == 1 and model[1].seen is model[1].center is not None
            raise OSError
    except OSError:
        pass
    assert vars(model[0]) == before and model[0].center is None and not hasattr(model[1], "seen")
    model(torch.zeros(2))
    assert model[1].calls == 1


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws, self.numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.old, self.pythons = np.random.RandomState(0), random.Random(0)

    def forward(self) -> tuple[float, ...]:
        own = float(torch.rand((), generator=self.draws)), float(self.numbers.uniform())
        return *own, self.old.uniform(), self.pythons.random()


def test_generators_draw_the_same_again() -> None:
    model = Drawing()
    with kept_attributes(model):
        found = model()
    assert model() == found != model()


class Hooking(nn.Module):
    """Watches its parts from its first pass on, as transformers' models that give hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.seen, self.watches = nn.ReLU(), list[Tensor](), False

    def forward(self, x: Tensor) -> int:
        if not self.watches:
            self.part.register_forward_hook(lambda module, inputs, output: self.seen.append(output))
            self.part.register_forward_pre_hook(lambda module, inputs: self.seen.append(inputs[0]))
            self.watches = True
        self.seen.clear()
        self.part(x)
        return len(self.seen)


def test_hooks_of_a_first_pass_are_not_there_twice() -> None:
    model = Hooking()
    with kept_attributes(model):
        assert model(torch.zeros(2)) == 2
    assert not model.part._forward_hooks and not model.part._forward_pre_hooks
    assert model(torch.zeros(2)) == model(torch.zeros(2)) == 2


def test_a_hook_that_takes_itself_off_is_there_again_with_all_that_it_is_given() -> None:
    model, seen = nn.ReLU(), list[tuple[tuple[Tensor, ...], dict[str, Tensor]]]()

    def once(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append((args, kwargs))
        handle.remove()

    handle = model.register_forward_pre_hook(once, with_kwargs=True)
    with kept_attributes(model):
        model(torch.ones(2))
    for _ in range(2):
        model(input=torch.ones(2))
    assert [(len(args), [*kwargs]) for args, kwargs in seen] == [(1, []), (0, ["input"])]
