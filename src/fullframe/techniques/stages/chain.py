"""A chain of parts that can be cut into stages, and this rank's share of it."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import GradientError, RecipeError, StrategyError, require_count
from fullframe.ranks.mesh import Axis, spatial_of, stage_axis
from fullframe.ranks.stage_messages import telling_others
from fullframe.spatial.gradients import graph_behind, manage


class Stages:
    """Where a chain's parts are: this rank's place on the axis, and how many microbatches a call goes through in."""

    def __init__(self, mesh: DeviceMesh, microbatches: int):
        require_count(StrategyError, "microbatches", microbatches)
        self.axis: Axis = stage_axis(mesh)
        self.microbatches = microbatches
        self.bounds: tuple[int, ...] = ()  # where the parts are cut; equally many for each stage where that is empty
        self.draw_seed = spatial_of(mesh).draw_seed
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # what is done with each microbatch

    def __deepcopy__(self, memo: Any) -> "Stages":
        """Itself: a copy of the model is on the same ranks."""
        return self

    def __reduce__(self) -> Any:
        """A saved model is on no ranks."""
        return type(None), ()

    def share(self, parts: int, stage: int | None = None) -> range:
        """Which of so many parts are this stage's, or another's."""
        stage = self.axis.coordinate if stage is None else stage
        if self.bounds:
            return range(*self.bounds[stage : stage + 2])
        return range(*(-(-parts * each // self.axis.size) for each in (stage, stage + 1)))


class Chain(Protocol):
    """What is cut into stages. Its parts are numbered, and each turns a state into the next one."""

    @property
    def whole(self) -> nn.Module:
        """The module that has all parameters and buffers."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """What each part runs; several may run the same module."""

    def run(self, part: range, state: Any, inputs: Any, before: Callable[[int], None]) -> list[Any]:
        """The states after each of these parts, or the last one alone; `before` is called with each part's number."""

    def likeness(self, count: int, state: Any) -> Any:
        """A state like that after so many parts, for a simulation, where it comes from ranks that are not there."""


class Criterion(NamedTuple):
    """What is made of the last state of a microbatch: `loss(state, *targets)`, of which the targets are cut too."""

    loss: Callable[..., Tensor]
    targets: tuple[Any, ...]


class Segment(nn.Module):
    """This stage's parts, as a module whose weights can be lent."""

    def __init__(self, chain: Chain, part: range, criterion: Criterion | None):
        super().__init__()
        self.blocks = nn.ModuleList(dict.fromkeys(chain.parts[number] for number in part))
        self.loss = None if criterion is None else criterion.loss
        self._chain, self._part = (chain,), part  # in a tuple, which nn.Module does not look into

    def forward(self, state: Any, inputs: Any, targets: Any, before: Callable[[int], None]) -> list[Any]:
        states = self._chain[0].run(self._part, state, inputs, before)
        if self.loss is None:
            return states
        loss: Any = self.loss(states[-1], *targets)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RecipeError(f"the criterion must return a scalar tensor, got {got}; reduce it with .sum()")
        return [loss]

    def lent(self) -> dict[str, Tensor]:
        """In the place of its parameters others, by name, whose gradients are one call's alone to see."""
        aliases = {}
        for name, parameter in self.named_parameters():
            aliases[name] = parameter.detach().requires_grad_(parameter.requires_grad)
            manage(aliases[name], None)
        return aliases


def require_known(states: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], stage: int) -> None:
    """Raises GradientError where a gradient of the states would go to a tensor that is none of these.

    But a leaf that a part makes and lets go of (for the gradient of an energy by it) has one that nobody can ask for.
    """
    known = {id(tensor._base if tensor._is_view() else tensor) for tensor in tensors}
    for node in graph_behind(tensor.grad_fn for state in states for tensor in state):
        if getattr(node, "variable", None) is None or id(node.variable) in known:
            continue
        if isinstance(node.variable, nn.Parameter) or _is_held(node):
            raise GradientError(
                f"a part on stage {stage} uses a tensor of shape {tuple(node.variable.shape)} that wants a gradient "
                "and is neither a parameter of its block nor an argument of the call; give it to the call as one of "
                "the inputs, and a criterion that has parameters as a module"
            )


class OwnGraph:
    """The graph of a call's parts on this stage, into which gradients come by the states that are handed on alone."""

    def __init__(self, stage: int):
        self._stage = stage
        self._around: int | None = None  # while this stage goes back: the backward pass around its own, -1 for none

    def watch(self, leaves: Iterable[Tensor]) -> None:
        """GradientError, told to the others, where these get a gradient by another way, which would be lost."""
        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_hook(self._require_own)

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Around this stage's own backward passes."""
        self._around = torch._C._current_graph_task_id()
        try:
            yield
        finally:
            self._around = None

    def _require_own(self, gradient: Tensor) -> None:
        if self._around is not None and self._around != torch._C._current_graph_task_id():
            return
        with telling_others():
            raise GradientError(
                f"the loss takes more from a part on stage {self._stage} than the state that it hands on, as a tensor "
                "that forward leaves in an attribute or a hook hands out; other stages do not have it, and its "
                "gradient would be lost: make it a part of the state, detach it, or leave out stages"
            )


def _is_held(node: Any) -> bool:
    """Whether more than the graph holds the leaf of its node: more than a leaf of which that is known."""
    with torch.enable_grad():
        result: Any = torch.ones((), requires_grad=True).neg()
    return sys.getrefcount(node.variable) > sys.getrefcount(result.grad_fn.next_functions[0][0].variable)
