"""The state that a block no longer changes, and its gradient from the memory of one iteration.

At `z = f(z, x)` the implicit function theorem gives the gradient of whatever follows without the way there: with the
gradient `v` of `z`, solve `g = v + J^T g`, J the block's derivative by its state at `z`; then `g` goes back through one
call of the block (Bai, Kolter, Koltun, "Deep Equilibrium Models", NeurIPS 2019).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fullframe.arguments import checked
from fullframe.errors import ShapeError, StrategyError, require_count
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.recording import as_they_are
from fullframe.spatial.operands import has_gradients
from fullframe.spatial.second_derivative import require_first
from fullframe.spatial.tensor import SpatialTensor, local_or_whole, wrap

_SEVERAL_TIMES = "in the last iteration of an implicit ff.fixed_point backward goes through it several times"
_KINDS = ("implicit", "unrolled", "phantom")


class Solved(NamedTuple):
    """How a search for a fixed point ended; `change` is that of its last iteration, over the size of the state."""

    iterations: int
    change: float
    converged: bool


@checked
def fixed_point(
    block: nn.Module,
    *,
    tolerance: float = 1e-4,
    iterations: int = 50,
    backward: str = "implicit",
    phantom_steps: int = 1,
) -> "FixedPoint":
    """A module called as `module(state, *inputs)` that repeats `state = block(state, *inputs)` until it stays.

    It starts from `state`, a tensor or a tree of tensors, plain or split, and stops when an iteration changes it by at
    most `tolerance` of its size (2-norms over the whole image and batch), or after `iterations`, with a warning. Each
    look at the change makes the host wait for the device; with `tolerance=0` it does not look.

    `backward` "implicit" solves the adjoint equation by the same iteration, to the same tolerance, with the memory of
    one iteration however many there were; "unrolled" goes back through all of them; "phantom" through `phantom_steps`
    more after the last (Geng et al., "On Training Implicit Models", NeurIPS 2021), an approximation. In "implicit" and
    "phantom" the starting state has no gradient, as the fixed point does not depend on it.

    The block must be a contraction near the fixed point. Dropout draws anew in each iteration, so that there is none;
    batch norm in training counts every iteration, and with statistics over replicas needs `tolerance=0`.

    `module.solved` and `module.solved_backward` tell how the last call and its backward pass ended. Raises
    StrategyError for options that are none, and in a call ShapeError where an iteration changes the state's shape.
    """
    return FixedPoint(block, tolerance, iterations, backward, phantom_steps)


class FixedPoint(nn.Module):
    """Made by `fixed_point`. Its parameters are those of `block`."""

    found_in_calls = frozenset(("solved", "solved_backward", "_warned"))

    def __init__(self, block: nn.Module, tolerance: float, iterations: int, backward: str, phantom_steps: int):
        super().__init__()
        require_count(StrategyError, "iterations", iterations)
        require_count(StrategyError, "phantom_steps", phantom_steps)
        if backward not in _KINDS:
            raise StrategyError(f"backward must be one of {', '.join(_KINDS)}, got {backward!r}")
        if not 0 <= tolerance < 1:
            raise StrategyError(f"tolerance must be in [0, 1), got {tolerance!r}")
        self.block, self.tolerance, self.iterations = block, tolerance, iterations
        self.backward_by, self.phantom_steps = backward, phantom_steps
        self.solved: Solved | None = None
        self.solved_backward: Solved | None = None
        self._warned = False

    def extra_repr(self) -> str:
        return f"tolerance={self.tolerance}, iterations={self.iterations}, backward={self.backward_by!r}"

    def forward(self, state: Any, *inputs: Any) -> Any:
        """The fixed point of `block(state, *inputs)`: a tree of tensors of the shapes of `state`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.backward_by == "unrolled"):
            state = self._found(state, inputs)
        if not torch.is_grad_enabled() or self.backward_by == "unrolled":
            return state
        state = tree_map_only(Tensor, torch.Tensor.detach, state)
        if self.backward_by == "phantom":
            for _ in range(self.phantom_steps):
                state = self._next(state, inputs)
            return state
        return self._with_adjoint(state, inputs)

    def _found(self, state: Any, inputs: tuple[Any, ...]) -> Any:
        change = math.inf
        number = 0
        while number < self.iterations:
            number += 1
            before, state = state, self._next(state, inputs)
            if self.tolerance:
                with torch.no_grad():
                    change = _change(before, state)
                if change <= self.tolerance:
                    break
        self.solved = Solved(number, change, change <= self.tolerance)
        self._warn_unless(self.solved, "state")
        return state

    def _next(self, state: Any, inputs: tuple[Any, ...]) -> Any:
        result = self.block(state, *inputs)
        (old, form), (new, of_result) = tree_flatten(state), tree_flatten(result)
        if form != of_result or [getattr(t, "shape", None) for t in old] != [getattr(t, "shape", None) for t in new]:
            shapes = [[tuple(t.shape) if isinstance(t, Tensor) else t for t in leaves] for leaves in (old, new)]
            raise ShapeError(
                f"{type(self.block).__name__} got a state of shapes {shapes[0]} and returned {shapes[1]}; a fixed "
                "point needs the same ones"
            )
        return result

    def _with_adjoint(self, state: Any, inputs: tuple[Any, ...]) -> Any:
        """The block's result at the fixed point, whose gradient is first solved for."""
        leaves, form = tree_flatten(state)
        at = [_dressed(leaf, _inner(local_or_whole(leaf))) for leaf in leaves]
        with as_they_are(_SEVERAL_TIMES):
            results = tree_flatten(self._next(tree_unflatten(at, form), inputs))[0]
        group = next((t.spec.spatial.replica for t in results if isinstance(t, SpatialTensor)), None)
        outs, ins = [local_or_whole(t) for t in results], [local_or_whole(t) for t in at]

        live = [number for number, out in enumerate(outs) if out.requires_grad]  # nothing goes back through the others

        def solve(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
            return self._adjoint([outs[n] for n in live], [ins[n] for n in live], gradients, group)

        solved = _Adjoint.apply(solve, *(outs[n] for n in live))  # type: ignore[no-untyped-call]
        for number, local in zip(live, solved, strict=True):
            results[number] = _dressed(results[number], local)
        return tree_unflatten(results, form)

    def _adjoint(
        self, outs: list[Tensor], ins: list[Tensor], wanted: Sequence[Tensor], group: dist.ProcessGroup | None
    ) -> Sequence[Tensor]:
        """Of `g = wanted + J^T g` the solution, J the derivative of `outs` by `ins`."""
        found, change = list(wanted), math.inf
        number = 0
        while number < self.iterations:
            number += 1
            products: Sequence[Tensor | None] = torch.autograd.grad(
                outs, ins, found, retain_graph=True, allow_unused=True
            )
            new = [v if p is None else v + p for v, p in zip(wanted, products, strict=True)]
            if self.tolerance:
                sizes = torch.stack([_squares([a - b for a, b in zip(new, found, strict=True)]), _squares(new)])
                if group is not None:
                    sizes = all_sum_no_grad(sizes, group)
                change = _ratio(sizes)
            found = new
            if change <= self.tolerance:
                break
        self.solved_backward = Solved(number, change, change <= self.tolerance)
        self._warn_unless(self.solved_backward, "gradient")
        return found

    def _warn_unless(self, solved: Solved, what: str) -> None:
        if solved.converged or not self.tolerance or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the {what} of a fixed point of {type(self.block).__name__} still changed by {solved.change:.1e} of its "
            f"size after {solved.iterations} iterations, not by {self.tolerance:.1e}: give it more iterations or a "
            "larger tolerance, or make the block a contraction (smaller steps, spectral norm)",
            stacklevel=2,
        )


class _Adjoint(torch.autograd.Function):
    """The values as they are; their gradients by `solve`."""

    @staticmethod
    def forward(ctx: Any, solve: Callable[[Sequence[Tensor]], Sequence[Tensor]], *values: Tensor) -> Any:
        ctx.solve = solve
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        require_first("a fixed point's implicit backward pass", "give it backward='unrolled'")
        return None, *ctx.solve(gradients)


def _inner(values: Tensor) -> Tensor:
    """The values at the beginning of a graph of their own; no leaf, whose gradient would be put as users see it."""
    return values.detach().requires_grad_(has_gradients(values)).view_as(values)


def _dressed(like: Tensor, local: Tensor) -> Tensor:
    return wrap(local, like.spec) if isinstance(like, SpatialTensor) else local


def _change(before: Any, after: Any) -> float:
    """How far two states lie apart, over the size of the second; one number on all ranks of a replica."""
    pairs = list(zip(tree_flatten(before)[0], tree_flatten(after)[0], strict=True))
    return _ratio(torch.stack([_squares([b - a for a, b in pairs]), _squares([b for _, b in pairs])]))


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    sizes = [t.abs() if t.is_complex() else t for t in tensors]
    sums = [(t if t.dtype is torch.float64 else t.float()).square().sum() for t in sizes]
    return torch.stack([each.double() for each in sums]).sum()


def _ratio(squares: Tensor) -> float:
    apart, size = map(float, squares.sqrt().tolist())
    return apart / size if size else apart
