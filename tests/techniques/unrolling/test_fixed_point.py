"""Fixed points: the gradient of the equilibrium is that of the long way there, split or not, at any depth's memory."""

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import GradientError, ShapeError, StrategyError
from fullframe.techniques.unrolling.fixed_point import _change, fixed_point
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
    one, alone = gradients("implicit", tolerance=1e-6)
    several, model = gradients("implicit", ff.init_mesh(height, width), tolerance=1e-6)
    for found, expected in ((model.solved, alone.solved), (model.solved_backward, alone.solved_backward)):
        assert found.iterations == expected.iterations and found.change == pytest.approx(expected.change, rel=1e-6)
    return apart(several, one)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (2, 2), (1, 3)], ids=str)
def test_split_over_ranks(mesh: tuple[int, int]) -> None:
    assert max(rank_group(mesh[0] * mesh[1]).run(_split, *mesh)) < 1e-11


def _of_replicas() -> list[bool]:
    """Whether each call converged, of samples of the rank's own; that of rank 0 is a fixed point from the start on."""
    plain = fixed_point(Pair(), tolerance=1e-3, iterations=3)
    model = ff.parallelize(plain, ff.init_mesh())
    zero = torch.zeros(1, 2, 7, 9, dtype=torch.float64)
    found = []
    for _ in plain.modules():  # of which the ranks compare one at each pass
        plain.block.slope = 0.3 * dist.get_rank()
        loss_of(model, torch.ones_like(zero), zero).backward()  # type: ignore[no-untyped-call]
        found.append(plain.solved.converged)
    return found


@pytest.mark.filterwarnings("ignore:the state of a fixed point")
def test_replicas_may_take_other_numbers_of_iterations() -> None:
    assert rank_group(2).run(_of_replicas) == [[True] * 4, [False] * 4]


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
    with warnings.catch_warnings(action="error"):
        loss_of(model, *torch.ones(2, 1, 2, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("backward", ["implicit", "unrolled", "phantom"])
def test_without_a_gradient_there_is_no_graph(backward: str) -> None:
    zero = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    model, calls = fixed_point(Pair(), backward=backward), []
    model.block.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        a, _ = model((zero, zero), zero + 1)
    assert model.solved is not None and len(calls) == model.solved.iterations
    assert a.grad_fn is None and not a.requires_grad


class Beside(nn.Module):
    """A state of which one part is made anew each time, and one is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))

    def forward(self, state: Any, x: Tensor) -> Any:
        return torch.tanh(self.weight * state[0]) + x, (self.weight * x).square(), state[2]


def test_parts_of_the_state_that_no_iteration_reads() -> None:
    def found(backward: str) -> tuple[Tensor | None, ...]:
        model = fixed_point(Beside(), backward=backward, tolerance=1e-13, iterations=200, phantom_steps=60)
        x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
        zero, start = torch.zeros_like(x), torch.ones_like(x).requires_grad_()
        a, b, c = model((zero, zero, start), x)
        loss = (a * b + b if backward == "implicit" else a * b + b + c).sum()  # no contraction hands on what it gets
        return torch.autograd.grad(loss, (x, model.block.weight, start), allow_unused=True)

    *expected, of_start = found("unrolled")
    assert of_start is not None
    for backward in ("implicit", "phantom"):
        *got, of_start = found(backward)
        assert of_start is None, "the fixed point does not depend on where it began"
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


class Turning(nn.Module):
    """A complex state beside whole numbers and what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))

    def forward(self, state: Any, x: Tensor) -> Any:
        return torch.fft.ifft(torch.fft.fft(1j * self.weight * state[0])) + x, state[1], state[0].detach() * 0.5


def test_a_complex_state_is_judged_by_both_of_its_parts() -> None:
    def found(backward: str) -> tuple[Tensor, ...]:
        model = fixed_point(Turning(), backward=backward, tolerance=1e-13, iterations=200, phantom_steps=60)
        x = (1j * torch.linspace(-1, 1, 4, dtype=torch.float64)).requires_grad_()
        zero = torch.zeros_like(x, requires_grad=False)
        z, numbers, half = model((zero, torch.arange(4), zero), x)
        assert model.solved.converged and model.solved.iterations > 20 and torch.equal(numbers, torch.arange(4))
        torch.testing.assert_close(z, x / (1 - 0.3j), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(half, z.detach() * 0.5, rtol=1e-12, atol=1e-12)
        return torch.autograd.grad((z.abs() + z.imag + half.real).sum(), (x, model.block.weight))

    expected = found("unrolled")
    for backward in ("implicit", "phantom"):
        torch.testing.assert_close(found(backward), expected, rtol=1e-11, atol=1e-11)


def test_a_change_is_of_the_size_of_what_it_leads_to() -> None:
    for dtype in (torch.float64, torch.float16, torch.complex64):  # squares of the second leave its range
        assert _change(torch.full((4,), 288, dtype=dtype), torch.full((4,), 384, dtype=dtype)) == 0.25
    assert _change(torch.ones(4), torch.zeros(4)) == 2


class Cropping(nn.Module):
    def forward(self, state: Tensor) -> Tensor:
        return state[..., 1:]


class Swapping(nn.Module):
    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] for name in reversed(state)}


def test_what_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"shapes \[\(2, 5\)\] and returned \[\(2, 4\)\]"):
        fixed_point(Cropping())(torch.zeros(2, 5))
    with pytest.raises(ShapeError, match="a fixed point needs the same ones"):
        fixed_point(Swapping())({"a": torch.zeros(2), "b": torch.ones(2)})
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
