"""A user's `autograd.Function` on split tensors: its forward and its backward run on them, by the rules of their ops.

Both get what they get in one process: whole tensors, split ones, and one process's gradients. In the graph stands a
function of ours over the local tensors, which saves what the user's saves.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.adjoint import applied
from fullframe.spatial.fallback import plain
from fullframe.spatial.gradients import mean_over_ranks, seen, unseen
from fullframe.spatial.operands import aligned
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import local_or_whole, spec_in, whole, wrap, wrapped_as

Specs = tuple[Spec | None, ...]  # of tensors in their order, None for what is not split

OWN_KERNEL = "its own kernel reads memory, which a split tensor has in parts alone"

NO_SETUP = torch.autograd.Function.setup_context


class _Context:
    """What a user's function gets for torch's context; it keeps whatever else is put into it.

    It does not hold torch's, which holds it: a circle would keep the saved tensors until Python collects.
    """

    def __init__(self, needs_input_grad: Sequence[bool]):
        self.needs_input_grad = tuple(needs_input_grad)
        self._saved: tuple[Any, ...] = ()
        self._constants: tuple[Any, ...] = ()
        self._fills_in = True
        self._read: Callable[[], tuple[Any, ...]] | None = None  # in backward alone

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._constants = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._fills_in = value

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._read() if self._read is not None else self._saved

    saved_variables = saved_tensors


class _Call:
    """One call of a user's function: its operands' specs, and its results' once it has run."""

    def __init__(self, function: Any, operands: Sequence[Any]):
        self.function = function
        self.specs = tuple(map(spec_in, operands))
        self.spatial = next(spec.spatial for spec in self.specs if spec is not None)
        self.results: Specs = ()
        self.saved: Specs = ()
        self.several = False
        self.context = _Context(())

    def forward(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        """The results, of which `several` says whether they are a tuple; split ones are shells."""
        if self.function.setup_context is NO_SETUP:
            made = self.function.forward(self.context, *operands)
        else:
            made = self.function.forward(*operands)
            self.function.setup_context(self.context, tuple(operands), made)
        self.several = isinstance(made, tuple)
        return tuple(map(plain, made if self.several else (made,)))

    def gradient_of_result(self, gradient: Tensor | None, spec: Spec | None) -> Tensor | None:
        """One process's, from what arrived here."""
        if gradient is None:
            return None
        return mean_over_ranks(gradient, self.spatial.replica) if spec is None else wrap(seen(gradient, spec), spec)

    def gradient_of_operand(self, gradient: Any, spec: Spec | None) -> Any:
        """What goes on in backward here, from one process's; as in torch one of a larger shape is summed."""
        if not isinstance(gradient, Tensor) or spec is None:
            return whole(gradient)
        if tuple(gradient.shape) != spec.shape:
            gradient = gradient.sum_to_size(spec.shape)
        return unseen(aligned(gradient, spec), spec)


def obstacle_in(function: Any) -> str | None:
    """Why a user's function cannot run on split tensors, as far as the names in its code tell."""
    steps = [inspect.unwrap(step) for step in (function.forward, function.setup_context, function.backward)]
    for step in (step for step in steps if isinstance(step, FunctionType)):
        if "mark_dirty" in step.__code__.co_names:
            return "an autograd.Function that writes to its input would lose its gradient"
        if any(_is_compiled(step.__globals__.get(name)) for name in step.__code__.co_names):
            return OWN_KERNEL
    return None


def _is_compiled(value: Any) -> bool:
    """Whether it is an extension module, or a function of one, that is neither Python's own nor torch's."""
    home = value if inspect.ismodule(value) else inspect.isbuiltin(value) and inspect.getmodule(value)
    spec: Any = getattr(home, "__spec__", None)
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        return False
    return spec.name.split(".")[0] not in (*sys.stdlib_module_names, "torch")


class _Composed(torch.autograd.Function):
    """A call's local results from its local operands."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> tuple[Any, ...]:
        call.context = context = _Context(ctx.needs_input_grad[1:])
        results = call.forward(wrapped_as(operands, call.specs))
        saved = tuple(map(plain, context._saved))
        call.results, call.saved = tuple(map(spec_in, results)), tuple(map(spec_in, saved))
        context._saved = ()
        ctx.save_for_backward(*map(local_or_whole, saved))
        ctx.mark_non_differentiable(*map(local_or_whole, context._constants))
        context._constants = ()
        ctx.set_materialize_grads(context._fills_in)
        ctx.call = call
        return tuple(map(local_or_whole, results))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call: _Call = ctx.call
        arrived = map(call.gradient_of_result, gradients, call.results)
        call.context._read = lambda: tuple(wrapped_as(ctx.saved_tensors, call.saved))
        try:
            found = call.function.backward(call.context, *arrived)
        finally:
            call.context._read = None
        found = found if isinstance(found, tuple) else (found,)
        missing = len(call.specs) - len(found)
        if missing > 0 or any(gradient is not None for gradient in found[len(call.specs) :]):
            raise RuntimeError(
                f"function {call.function.__name__}Backward returned an incorrect number of gradients "
                f"(expected {len(call.specs)}, got {len(found)})"
            )
        return None, *map(call.gradient_of_operand, found, call.specs)


_composed = applied(_Composed)


def composed(function: Any, operands: Sequence[Any]) -> Any:
    """`function.apply(*operands)`, some of which are split, by the rules of what its forward and backward do."""
    call = _Call(function, operands)
    results = wrapped_as(_composed(call, *map(local_or_whole, operands)), call.results)
    return tuple(results) if call.several else results[0]
