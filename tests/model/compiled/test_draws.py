"""Random functions in a capture go to the recorder in order, with their bounds; unknown ones are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fullframe.model.compiled.draws import NothingByHand, Watched
from fullframe.ranks.recording import NotCapturable


class Recorder:
    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def draw(self, kind: str, size: Any, dtype: Any, device: Any, a: float, b: float) -> Tensor:
        self.drawn.append((kind, tuple(size), a, b))
        return torch.full(tuple(size), 3, dtype=dtype)


def test_draws_go_to_the_recorder() -> None:
    by = Recorder()
    with Watched(by):  # type: ignore[arg-type]
        torch.rand(2, 3)
        torch.randn_like(torch.zeros(2))
        torch.randint(4, 9, (2,))
        torch.randint(9, (1, 2))
        torch.randperm(5)
        filled = torch.zeros(2).bernoulli_(0.25)
        torch.zeros(2).uniform_(1.0, 2.0)
        torch.zeros(2).normal_(1.0)
    assert by.drawn == [
        ("uniform_", (2, 3), 0.0, 1.0), ("normal_", (2,), 0.0, 1.0), ("randint", (2,), 4, 9), ("randint", (1, 2), 0, 9),
        ("randperm", (5,), 0, 0), ("bernoulli_", (2,), 0.25, 0), ("uniform_", (2,), 1.0, 2.0),
        ("normal_", (2,), 1.0, 1.0),
    ]  # fmt: skip
    assert filled.tolist() == [3.0, 3.0]


def test_other_draws_and_generators_are_refused() -> None:
    with Watched(Recorder()):  # type: ignore[arg-type]
        for draw in (lambda: torch.zeros(2).exponential_(), lambda: torch.rand(2, generator=torch.Generator())):
            with pytest.raises(NotCapturable, match="draws random numbers by aten"):
                draw()


def test_attention_without_dropout_draws_nothing() -> None:
    x = torch.ones(1, 2, 3, 4)
    with Watched(Recorder()):  # type: ignore[arg-type]
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), x)


def test_tensors_are_noted_and_others_parameters_refused() -> None:
    x, layer = torch.ones(1, 2), nn.Linear(2, 2)
    with Watched(Recorder()) as watched:  # type: ignore[arg-type]
        x + 1
        assert id(x) in watched.read and watched.constants == {id(x): x} and not watched.recomputes
        with pytest.raises(NotCapturable, match="a gradient that is none of its parameters"):
            layer(x)


def test_gradients_are_not_asked_for_by_hand() -> None:
    x = torch.ones(2, requires_grad=True)
    with NothingByHand():
        for call in (lambda: x.register_hook(print), lambda: (x * 2).sum().backward(), lambda: (x * 2).retain_grad()):
            with pytest.raises(NotCapturable, match="it calls"):
                call()


def test_what_a_tensor_is_beside_its_numbers_is_not_asked_for() -> None:
    x = nn.Parameter(torch.ones(2))
    calls: list[Callable[[], Any]] = [
        lambda: x.grad, lambda: setattr(x, "grad", None), lambda: setattr(x, "data", torch.zeros(2)),
        lambda: setattr(x, "requires_grad", False), lambda: x.is_leaf, lambda: x._version,
        lambda: x.tolist(), lambda: x.detach().numpy(), lambda: np.asarray(x.detach()), lambda: x.data_ptr(),
    ]  # fmt: skip
    with NothingByHand():
        for call in calls:
            with pytest.raises(NotCapturable, match=r"it (reads or sets|calls)"):
                call()
    assert x.requires_grad and x.detach().tolist() == [1.0, 1.0]


def test_a_real_tensor_is_not_written_to() -> None:
    mine, count = FakeTensorMode(allow_non_fake_inputs=True), torch.zeros(2)
    writes: list[Callable[[], Any]] = [
        lambda: count.add_(1), lambda: torch.add(count, 1, out=count), lambda: torch._foreach_add_([count], 1.0),
        lambda: count[0].fill_(1),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(NotCapturable, match="it writes to a tensor that is none"), Watched(Recorder(), mine):  # type: ignore[arg-type]
            write()
    assert count.tolist() == [0.0, 0.0]


def test_what_another_capture_has_left_is_refused() -> None:
    mine, other = FakeTensorMode(), FakeTensorMode()
    left = other.from_tensor(torch.ones(2))
    with pytest.raises(NotCapturable, match="keeps a tensor"), Watched(Recorder(), mine):  # type: ignore[arg-type]
        left + left
    with Watched(Recorder(), other):  # type: ignore[arg-type]
        left + left
