"""Fixed points: the gradient of the equilibrium is that of the long way there, split or not, at any depth's memory."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import GradientError, ShapeError, StrategyError
from fullframe.techniques.unrolling.fixed_point import fixed_point
from tests.rank_group import rank_group


class Pair(nn.Module):
    """A contraction of two coupled states."""

    def __init__(self, slope: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Conv2d(2, 2, 3, padding=1).double() for _ in range(2))
        self.slope = slope

    def forward(self, state: Any, x: Tensor) -> Any:
        a, b = state
        return self.slope * torch.tanh(self.one(b)) + x, self.slope * torch.sin(self.other(a))


def loss_of(model: Any, x: Tensor, zero: Tensor) -> Tensor:
    a, b = model((zero, zero), x)
    return (a * x).square().mean() + b.abs().mean()


def gradients(backward: str, mesh: Any = None, **options: Any) -> tuple[list[Tensor], Any]:
    model = fixed_point(Pair(), **{"tolerance": 1e-13, "iterations": 200, **options}, backward=backward)
    torch.manual_seed(1)
    x, zero = torch.randn(2, 2, 7, 9, dtype=torch.float64), torch.zeros(2, 2, 7, 9, dtype=torch.float64)
    run: Any = model
    if mesh is not None:
        run, x, zero = ff.parallelize(model, mesh), ff.shard(x, mesh), ff.shard(zero, mesh)
    x.requires_grad_()
    loss = loss_of(run, x, zero)
    loss.backward()  # type: ignore[no-untyped-call]
    of_x = x.grad.full() if mesh is not None else x.grad  # type: ignore[union-attr]
    return [loss.detach(), of_x, *(p.grad for p in model.parameters() if p.grad is not None)], model


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    assert len(a) == len(b) == 6
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_the_implicit_gradient_is_the_unrolled_one() -> None:
    unrolled, _ = gradients("unrolled")
    implicit, model = gradients("implicit")
    assert apart(implicit, unrolled) < 1e-11
    assert model.solved.converged and model.solved_backward.converged and model.solved.iterations < 60


def test_the_phantom_gradient_comes_near_with_its_steps() -> None:
    unrolled, _ = gradients("unrolled")
    errors = [apart(gradients("phantom", phantom_steps=steps)[0], unrolled) for steps in (1, 3, 30)]
    assert errors[0] > 10 * errors[1] and errors[2] < 1e-11


def _split(height: int, width: int) -> float:
    one, _ = gradients("implicit")
    several, _ = gradients("implicit", ff.init_mesh(height, width))
    return apart(several, one)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2), (1, 3)], ids=str)
def test_split_over_ranks(mesh: tuple[int, int]) -> None:
    assert max(rank_group(mesh[0] * mesh[1]).run(_split, *mesh)) < 1e-11


def _saved_bytes(backward: str, iterations: int) -> int:
    saved: dict[int, int] = {}
    kept = []  # so that no two have one address

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = fixed_point(Pair(), tolerance=0, iterations=iterations, backward=backward)
    x, zero = torch.randn(1, 2, 8, 8, dtype=torch.float64), torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model, x, zero)
    del loss
    gc.collect()
    return sum(saved.values())


def test_memory_does_not_grow_with_the_iterations() -> None:
    assert _saved_bytes("implicit", 40) == _saved_bytes("implicit", 4)
    assert _saved_bytes("unrolled", 40) > 5 * _saved_bytes("unrolled", 4)


def test_what_does_not_converge_says_so_once() -> None:
    with pytest.warns(UserWarning, match=r"state of a fixed point of Pair still changed by .* after 3 iterations"):
        _, model = gradients("implicit", iterations=3)
    assert not model.solved.converged and model.solved.iterations == 3


def test_without_a_gradient_there_is_no_graph() -> None:
    zero = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        a, _ = fixed_point(Pair())((zero, zero), zero + 1)
    assert a.grad_fn is None


class Cropping(nn.Module):
    def forward(self, state: Tensor) -> Tensor:
        return state[..., 1:]


def test_what_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"shapes \[\(2, 5\)\] and returned \[\(2, 4\)\]"):
        fixed_point(Cropping())(torch.zeros(2, 5))
    for options, words in (({"backward": "exact"}, "implicit, unrolled, phantom"), ({"tolerance": 2.0}, r"\[0, 1\)")):
        with pytest.raises(StrategyError, match=words):
            fixed_point(Pair(), **options)  # type: ignore[arg-type]


def penalized(backward: str, squared: bool) -> Tensor:
    """The gradient of a penalty on a gradient by the input, whose seed is a constant unless `squared`."""
    model = fixed_point(Mixing(), backward=backward, tolerance=1e-12, iterations=100)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    result = model(torch.zeros_like(x), x)
    (slope,) = torch.autograd.grad((result.square() if squared else result).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(slope.square().sum(), model.block.parameters())
    return found


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * state.flip(0)) + x


@pytest.mark.parametrize("squared", [False, True])
def test_a_penalty_on_a_gradient_is_exact_or_refused(squared: bool) -> None:
    assert penalized("unrolled", squared).abs().min() > 1e-3
    with pytest.raises(GradientError, match=r"through a fixed point's implicit backward pass.*backward='unrolled'"):
        penalized("implicit", squared)
