"""Parameters that get no gradient: a mask token, layers for another task, a branch that this batch does not take.

They are left without one, as in one process. All ranks know which they are, and the job's first rank says so once.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from fullframe.model.trained import sparse_tables
from fullframe.ranks.agreement import is_first_rank
from fullframe.wording import first_of

Kind = TypeVar("Kind")


class Unused:
    """Which parameters of `model` DDP is made without, since no rank had a gradient for them in the first pass.

    Where others get one later, they change from step to step: from then on DDP is made for all. With `varies` that is
    known from the start, and nothing is said.
    """

    def __init__(self, model: nn.Module, varies: bool):
        self._model, self._varies = model, varies
        self._left_out: frozenset[nn.Parameter] = frozenset()
        self._is_said = varies
        self.is_known = False  # nothing was learned since `others`

    def forget(self) -> None:
        """Other parameters are trained."""
        self._left_out, self.is_known = frozenset(), False

    def others(self, trained: Mapping[nn.Parameter, Kind]) -> dict[nn.Parameter, Kind]:
        """Those for which DDP is to be made."""
        self.is_known = True
        return {parameter: kind for parameter, kind in trained.items() if parameter not in self._left_out}

    def learn(self, lacking: Iterable[nn.Parameter], used: set[nn.Parameter]) -> None:
        """After a pass, on all ranks alike: those that got no gradient on some rank; those that have one."""
        if self._varies:
            return
        self._varies = bool(self._left_out) or any(parameter in used for parameter in lacking)
        self._left_out, self.is_known = frozenset() if self._varies else frozenset(lacking), False
        if not self._is_said:
            self._is_said = True
            them = set(lacking)  # a list would compare values
            say_unused([name for name, parameter in self._model.named_parameters() if parameter in them])


def say_unused(names: Collection[str]) -> None:
    """On the job's first rank: parameters of these names got no gradient."""
    if names and is_first_rank():
        warnings.warn(
            f"{len(names)} parameters got no gradient ({first_of(names)}): they are left without one, as in one "
            "process; where that is meant, requires_grad_(False) or find_unused_parameters=True says so",
            stacklevel=2,
        )


def give_zeros(
    parameters: Collection[nn.Parameter],
    model: nn.Module,
    edges: Mapping[nn.Parameter, GradientEdge],
    hooked: Callable[[nn.Parameter], bool] | None = None,
) -> dict[nn.Parameter, Tensor | None]:
    """In backward: each gets a gradient of zeros, as if it had been used; users' hooks are called with `hooked`.

    Which are those that it says. Those that have one of the `edges` get it there. Returns what gradients were before
    hooks, for `put_back`.
    """
    sparse = {table.weight for table in sparse_tables(model).values()} if parameters else set()
    before: dict[nn.Parameter, Tensor | None] = {}
    for parameter in parameters:
        if hooked and parameter.requires_grad and parameter not in sparse:
            if hooked(parameter):
                before[parameter] = None if parameter.grad is None else parameter.grad.clone()
            with torch.enable_grad():
                used: Tensor = parameter.view_as(parameter)  # in a graph, where `is_accumulated` finds it
            used.backward(parameter.new_zeros(()).expand_as(parameter))
        else:
            with _without_hooks(parameter):
                zeros = parameter.new_zeros(()).expand_as(parameter)  # takes no memory
                if parameter in sparse:
                    zeros = torch.zeros_like(parameter, layout=torch.sparse_coo)
                torch.autograd.backward(edges.get(parameter, parameter), zeros)
    return before


@torch.no_grad()
def put_back(reached: Collection[nn.Parameter], before: Mapping[nn.Parameter, Tensor | None]) -> set[nn.Parameter]:
    """What hooks have made of zeros is not in gradients that no rank's pass has `reached`; those that are put back."""
    untouched = {parameter for parameter in before if parameter not in reached}
    for parameter in untouched:
        old, now = before[parameter], parameter.grad
        parameter.grad = old if old is None or now is None else now.copy_(old)
    return untouched


@contextmanager
def _without_hooks(parameter: nn.Parameter) -> Iterator[None]:
    before: Any = parameter._backward_hooks
    after: Any = parameter._post_accumulate_grad_hooks
    kept = [(hooks, dict(hooks)) for hooks in (before, after) if hooks]
    for hooks, own in kept:
        for key in [key for key, hook in own.items() if hooks is before or not _is_ours(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.clear()
            hooks.update(own)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether someone else would see the gradient before it is averaged."""
    if len(parameter._backward_hooks or ()) > 1:
        return True
    after: Any = parameter._post_accumulate_grad_hooks
    return bool(after) and not all(map(_is_ours, after.values()))


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("fullframe.", "torch."))
