"""Each parameter is updated as soon as its gradient is complete, and the gradient dropped: few live at a time.

As LOMO (Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, 2023), for any torch
optimizer. The ranks add up each gradient by itself, in one order, while backward goes on to the next.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fullframe.errors import GradientError, StrategyError
from fullframe.model.unused import has_hooks
from fullframe.ranks.raw_bytes import share_values
from fullframe.ranks.waiting import waiting_for_ranks
from fullframe.spatial.gradients import graph_behind

_TORCHS = ("_opt_called", "_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured")  # its notes


class UpdateInBackward:
    """Hooks on the parameters of `model`, which are numbered as in `names`; they do nothing outside `backward`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: int, replicas: int):
        _require_no_hooks(optimizer)
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._warns = replicas > 1  # of hooks that see the gradient of one replica's loss
        self.names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._numbers: dict[Tensor, int] = {}
        self._number(dict(model.named_parameters()))
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._running = False
        self._turns: deque[int] = deque()  # parameters that are still to be updated
        self._mine: set[int] = set()  # those that this rank's loss depends on
        self._awaited: set[int] = set()  # those whose gradient will come
        self._flying: tuple[int, Tensor, Any] | None = None  # a parameter's gradient that the ranks are adding up
        self._squares: list[Tensor] = []
        self._count = 1.0  # by which gradients are divided
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._hook()

    def _number(self, named: dict[str, nn.Parameter]) -> None:
        for name, parameter in named.items():
            self._numbers[parameter] = len(self.names)
            self.names.append(name)
            self._parameters.append(parameter)

    def begin(self) -> list[nn.Parameter]:
        """Before a forward pass: parameters that the model did not have before, which take the first rank's values."""
        new = {name: p for name, p in self._model.named_parameters() if p not in self._numbers}
        if new and self._ranks > 1:
            share_values(new.values())
        self._number(new)
        return list(new.values())

    def _hook(self) -> None:
        """See the gradients of all parameters that are trained now, after all hooks that users have there by now."""
        for name, parameter in zip(self.names, self._parameters, strict=True):
            if parameter.requires_grad:
                if self._warns and has_hooks(parameter):
                    self._warns = False
                    warnings.warn(
                        f"a gradient hook of {name} gets the gradient of one replica's loss, as in DDP, not of all: "
                        "with update_in_backward and strategy.data > 1 one that does more than scale gives other "
                        "numbers than one process; leave out update_in_backward to have that of all",
                        stacklevel=2,
                    )
                handle, hooks = self._handles.get(parameter), parameter._post_accumulate_grad_hooks
                if handle is None or not hooks or next(reversed(hooks)) != handle.id:
                    if handle is not None:
                        handle.remove()
                    self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived)

    def reached(self, loss: Tensor) -> list[int]:
        """Numbers of the parameters that `loss` depends on, in the order in which backward will come to them.

        That is the reverse of the order in which the forward pass first used them.
        """
        self._hook()
        first_use: dict[int, int] = {}
        for node in graph_behind([loss.grad_fn]):
            for source, _ in node.next_functions:
                number = self._numbers.get(source.variable) if type(source).__name__ == "AccumulateGrad" else None
                if number is not None:
                    first_use[number] = min(first_use.get(number, node._sequence_nr()), node._sequence_nr())
        return sorted(first_use, key=lambda number: -first_use[number])

    def backward(self, loss: Tensor, count: float, turns: Sequence[int], mine: Sequence[int]) -> Tensor:
        """Update the parameters numbered `turns`, in this order on all ranks, by the sum over ranks divided by `count`.

        Not the loss is divided: hooks in the model see the gradients that they see without `update_in_backward`.
        `mine` are those of which this rank has a gradient. Returns the 2-norm of all gradients.
        """
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        self._group_of = {p: group for group in groups for p in group["params"]}
        self._turns, self._mine, self._awaited, self._squares = deque(turns), set(mine), set(mine), []
        self._running, self._count = True, count
        try:
            loss.backward()
            self._advance()
            self._land()
        finally:
            self._running, self._flying = False, None
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        return torch.stack(self._squares).sum().sqrt() if self._squares else torch.zeros(())

    def _arrived(self, parameter: Tensor) -> None:
        if not self._running:
            return
        number = self._numbers[parameter]
        if number not in self._awaited:
            raise GradientError(
                f"{self.names[number]} got a gradient that the loss's graph does not show, or one more, after its "
                "update; use checkpoint(..., use_reentrant=False), or leave out update_in_backward"
            )
        self._awaited.remove(number)
        self._advance()

    def _advance(self) -> None:
        while self._turns and self._turns[0] not in self._awaited:
            self._land()
            self._take_off(self._turns.popleft())
            if self._ranks == 1:
                self._land()

    def _take_off(self, number: int) -> None:
        parameter = self._parameters[number]
        if parameter.grad is None and number in self._mine:  # a Function's backward returned None
            if self._ranks == 1:
                return
            raise GradientError(
                f"{self.names[number]} gets no gradient, though the loss depends on it, which update_in_backward finds "
                "out too late for the other ranks; detach it there, or leave out update_in_backward"
            )
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.resolve_conj()
        parameter.grad = None
        if gradient.stride() != parameter.stride():  # the same order in memory for the other ranks, and for kernels
            gradient = torch.empty_like(parameter).copy_(gradient)
        flat = gradient.as_strided((gradient.numel(),), (1,))
        work = dist.all_reduce(flat, async_op=True) if self._ranks > 1 else None
        self._flying = number, gradient, work

    def _land(self) -> None:
        if self._flying is None:
            return
        number, gradient, work = self._flying
        self._flying = None
        if work is not None:
            with waiting_for_ranks():
                work.wait()
        gradient.div_(self._count)
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        self._squares.append(torch.linalg.vector_norm(real, dtype=torch.float64).square())
        parameter = self._parameters[number]
        if parameter in self._group_of:  # the optimizer may leave some out
            parameter.grad = gradient
            self._update(parameter)
        parameter.grad = None

    def _update(self, parameter: nn.Parameter) -> None:
        own = self._group_of[parameter]
        for group in self._optimizer.param_groups:
            group["params"] = [parameter] if group is own else []
        before = _numbers(own), _numbers(vars(self._optimizer))
        self._optimizer.step()
        has_counted = (_numbers(own), _numbers(vars(self._optimizer))) != before
        if has_counted or not all(isinstance(key, Tensor) for key in self._optimizer.state):
            raise StrategyError(
                f"{type(self._optimizer).__name__} counts steps by itself, and update_in_backward takes one per "
                "parameter; use an optimizer of torch.optim, or leave out update_in_backward"
            )


def _numbers(named: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in named.items() if isinstance(value, (int, float)) and name not in _TORCHS}


def _require_no_hooks(optimizer: Optimizer) -> None:
    hooks: Any = optimizer
    if hooks._optimizer_step_pre_hooks or hooks._optimizer_step_post_hooks:
        raise StrategyError(
            f"{type(optimizer).__name__} has step hooks, and update_in_backward takes one step per parameter; run them "
            "in the loss, or leave out update_in_backward"
        )
