"""A block that is run many times on its own result, with the gradients of the plain loop in less memory.

Unrolled reconstruction (CT, MRI), iterative flow and stereo: `state = block(state, *inputs)`, 8 to 30 times. What is
kept for backward is chosen by a schedule of states that are kept and iterations that are run again, on one device or
on several.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fullframe.errors import DeviceError, GradientError, ShapeError, StrategyError, require_count
from fullframe.ranks.tags import line
from fullframe.spatial.tensor import local_or_whole
from fullframe.techniques import schedules
from fullframe.techniques.offload import saving_to_host
from fullframe.techniques.recompute import Recomputed
from fullframe.techniques.schedules import Schedule

_KINDS = ("none", "iterations", "nested")
_MOST_NODES = 200  # of the state's graph that are looked through for an earlier result
_MADE_AT = "fullframe: unrolled at"


def unroll(
    block: nn.Module | Sequence[nn.Module],
    iterations: int,
    *,
    recompute: bool | str | int = "none",
    placement: str | Sequence[torch.device | str] = "here",
    return_all: bool = False,
) -> "Unrolled":
    """A module called as `module(state, *inputs)`, each iteration `state = block(state, *inputs)`.

    `block` is one module, whose weights all iterations share, or one for each iteration. `state` is a tensor or a tree
    of tensors (tuples, lists, dicts) of any shapes, which no iteration changes, plain or split; `inputs` are what every
    iteration reads. It returns the last state, or with `return_all` the list of all of them, for losses on each.

    `recompute` says what backward finds: "none", every iteration's graph; True or "iterations", every state, and each
    iteration is run a second time; "nested", about two square roots of the states, and a third time; a number of
    bytes, as many states as fit into it beside the one iteration that is worked on, and as few iterations as that
    allows are run again. With `return_all` the caller keeps all states, so the latter two are as "iterations". Batch
    norm counts once, dropout draws the same, whatever is run again.

    `placement="host"` lets what is kept wait in host memory. A list of devices gives each an equal run of iterations,
    with its graphs: blocks of their own move there for good, a shared one is copied there in each call, and its
    gradients come home; the result is on the device of the state.

    Raises StrategyError for options that are none; in a call ShapeError where an iteration changes the shape of the
    state, StrategyError where one that is run again writes to its state, GradientError where the state hangs on a graph
    that an earlier backward pass has freed.
    """
    return Unrolled(block, iterations, recompute, placement, return_all)


class Unrolled(nn.Module):
    """Made by `unroll`. Its parameters are those of `block`."""

    def __init__(self, block: Any, iterations: int, recompute: Any, placement: Any, return_all: bool):
        super().__init__()
        require_count(StrategyError, "iterations", iterations)
        if not isinstance(block, nn.Module):
            block = nn.ModuleList(block)
        if isinstance(block, nn.ModuleList) and len(block) != iterations:
            raise StrategyError(f"{len(block)} blocks for {iterations} iterations; give one for each, or one for all")
        self.block, self.iterations, self.return_all = block, iterations, return_all
        self._recompute = _known_kind(recompute)
        self._on_host = placement == "host"
        self._devices = () if isinstance(placement, str) else tuple(map(torch.device, placement))
        if isinstance(placement, str) and placement not in ("here", "host"):
            raise StrategyError(f'placement must be "here", "host" or a list of devices, got {placement!r}')
        self._saving: Callable[[], AbstractContextManager[None]] | None = None
        if self._devices and isinstance(block, nn.ModuleList):
            for number, own in enumerate(block):
                own.to(self.device_of(number))

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, recompute={self._recompute!r}"

    def forward(self, state: Any, *inputs: Any) -> Any:
        """The last state, or a list of all of them."""
        tensors = _tensors(state)
        if not tensors:
            raise ShapeError(f"the state holds no tensor: {type(state).__name__}")
        _require_live(tensors)
        home = tensors[0].device
        if not self._devices:
            _require_device(self.block, home)
        if self._on_host and self._saving is None:
            self._saving = saving_to_host(home)
        run, schedule = _Run(self, state), self.schedule_for(state)
        states: list[Any] = []
        with self._saving() if self._saving is not None else nullcontext():
            for each in run.states(schedule, state, inputs):
                states = [*states, each] if self.return_all else [each]
        run.bring_buffers_home()
        states = [_moved(each, home) for each in states] if self._devices else states
        for tensor in _tensors(states[-1]):
            node: Any = local_or_whole(tensor).grad_fn
            if node is not None:
                node.metadata[_MADE_AT] = line()
        return states if self.return_all else states[-1]

    def schedule_for(self, state: Any) -> Schedule:
        """What is run, and run again, for a state like this one."""
        if self._recompute == "none" or not torch.is_grad_enabled():
            return schedules.in_place(self.iterations)
        if self._recompute == "iterations" or self.return_all:
            return schedules.each_again(self.iterations)
        if self._recompute == "nested":
            return schedules.nested(self.iterations)
        state_bytes = sum(local_or_whole(tensor).nbytes for tensor in _tensors(state))
        fitting = self._recompute // max(state_bytes, 1)
        if not fitting:
            raise StrategyError(
                f"a budget of {self._recompute} bytes does not hold one state, which has {state_bytes}; give unroll "
                f"recompute={2 * state_bytes} or more"
            )
        return schedules.binomial(self.iterations, min(self.iterations, fitting))

    def block_of(self, number: int) -> nn.Module:
        """The block of an iteration."""
        return self.block[number] if isinstance(self.block, nn.ModuleList) else self.block

    def device_of(self, number: int) -> torch.device:
        """Where an iteration runs, of several devices."""
        return self._devices[number * len(self._devices) // self.iterations]

    @property
    def has_own_blocks(self) -> bool:
        """Whether each iteration has a block of its own."""
        return isinstance(self.block, nn.ModuleList)


def _known_kind(recompute: Any) -> Any:
    if isinstance(recompute, bool):
        return "iterations" if recompute else "none"
    if isinstance(recompute, int):
        require_count(StrategyError, "a recompute budget in bytes", recompute)
    elif recompute not in _KINDS:
        raise StrategyError(f"recompute must be one of {', '.join(_KINDS)}, or a number of bytes, got {recompute!r}")
    return recompute


class _Run:
    """One call."""

    def __init__(self, unrolled: Unrolled, state: Any):
        self._of = unrolled
        self._form = _form(state)
        self._weights: dict[torch.device, dict[str, Tensor]] = {}  # of a shared block, on the devices so far
        self.buffers: dict[str, Tensor] = {}  # of a shared block, where the last iteration ran
        if unrolled._devices and not unrolled.has_own_blocks:
            self.buffers = dict(unrolled.block.named_buffers())

    def states(self, schedule: Schedule, state: Any, inputs: tuple[Any, ...]) -> Iterator[Any]:
        """The state after each part of the schedule."""
        for part in schedule:
            state = self._iterate(part, state, inputs) if isinstance(part, int) else self._again(part, state, inputs)
            yield state

    def _again(self, schedule: Schedule, state: Any, inputs: tuple[Any, ...]) -> Any:
        first, last = _first(schedule), _last(schedule)
        what = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        part = _Part(self, schedule, [self._of.block_of(number) for number in range(first, last + 1)])
        name = f"{what} of {type(part.blocks[0]).__name__}"
        return Recomputed(part, name, "write state = state + step, not state += step")(state, *inputs)

    def _iterate(self, number: int, state: Any, inputs: tuple[Any, ...]) -> Any:
        block = self._of.block_of(number)
        if self._of._devices:
            result = self._iterate_on(self._of.device_of(number), block, state, inputs)
        else:
            result = block(state, *inputs)
        form = _form(result)
        if form != self._form:
            raise ShapeError(
                f"iteration {number} of {type(block).__name__} got a state of {_told(self._form, form)} and returned "
                f"{_told(form, self._form)}; bring it back to that inside the block, as the next iteration gets it"
            )
        return result

    def _iterate_on(self, device: torch.device, block: nn.Module, state: Any, inputs: tuple[Any, ...]) -> Any:
        state, inputs = _moved(state, device), _moved(inputs, device)
        if self._of.has_own_blocks:
            return block(state, *inputs)
        if device not in self._weights:
            self._weights[device] = {name: value.to(device) for name, value in block.named_parameters()}
        self.buffers = {name: value.to(device) for name, value in self.buffers.items()}
        with _lent(block, self._weights[device], self.buffers):
            return block(state, *inputs)

    @torch.no_grad()
    def bring_buffers_home(self) -> None:
        """What the iterations on other devices made of a shared block's buffers is the block's."""
        for name, buffer in self._of.block.named_buffers() if self.buffers else ():
            if self.buffers[name] is not buffer:
                buffer.copy_(self.buffers[name])


@contextmanager
def _lent(block: nn.Module, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the block has these in the place of its own; `buffers` then holds what it has made of them.

    As `torch.func.functional_call`, which forgets a buffer that forward sets anew.
    """
    own_weights, own_buffers = dict(block.named_parameters()), dict(block.named_buffers())
    lent = {id(own): weights[name] for name, own in own_weights.items()}
    lent |= {id(own): buffers[name] for name, own in own_buffers.items()}
    held: list[tuple[Any, dict[str, Any]]] = [
        (named, dict(named)) for module in block.modules() for named in (module._parameters, module._buffers)
    ]
    try:
        for named, own in held:
            named.update({name: lent[id(value)] for name, value in own.items() if value is not None})
        yield
        buffers.update(dict(block.named_buffers()))
    finally:
        for named, own in held:
            named.update(own)


class _Part(nn.Module):
    """Some iterations, as a module that can be run again."""

    def __init__(self, run: _Run, schedule: Schedule, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(dict.fromkeys(blocks))
        self._run, self._schedule = run, schedule
        self._before: dict[str, Tensor] | None = None  # buffers on other devices, before the first time

    def forward(self, state: Any, *inputs: Any) -> Any:
        run = self._run
        if self._before is None:
            self._before = {name: value.clone() for name, value in run.buffers.items()}
            return self._last_state(state, inputs)
        now, run.buffers = run.buffers, {name: value.clone() for name, value in self._before.items()}
        try:
            return self._last_state(state, inputs)
        finally:
            run.buffers = now

    def _last_state(self, state: Any, inputs: tuple[Any, ...]) -> Any:
        for each in self._run.states(self._schedule, state, inputs):
            state = each
        return state


def _first(schedule: Schedule) -> int:
    return schedule[0] if isinstance(schedule[0], int) else _first(schedule[0])


def _last(schedule: Schedule) -> int:
    return schedule[-1] if isinstance(schedule[-1], int) else _last(schedule[-1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _form(tree: Any) -> tuple[Any, list[Any]]:
    leaves, spec = tree_flatten(tree)
    return spec, [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


def _told(form: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> str:
    """A state's form, as far as it differs from another's."""
    if form[0] != other[0]:
        return f"{len(form[1])} parts ({form[0]})"
    number = next(number for number, (a, b) in enumerate(zip(form[1], other[1], strict=True)) if a != b)
    return f"shape {form[1][number]}" + (f" (part {number})" if len(form[1]) > 1 else "")


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def _require_device(block: nn.Module, state: torch.device) -> None:
    parameter = next(block.parameters(), None)
    if parameter is not None and parameter.device != state:
        raise DeviceError(
            f"the state is on {state} and the weights of {type(block).__name__} on {parameter.device}; move one of "
            "them, or give unroll the devices: placement=[...]"
        )


def _require_live(tensors: Sequence[Tensor]) -> None:
    """Raises GradientError where the state hangs on an earlier result whose graph a backward pass has freed."""
    for tensor in tensors:
        nodes: deque[Any] = deque([local_or_whole(tensor).grad_fn])
        seen, made_at = 0, ""
        while nodes and seen < _MOST_NODES:
            node = nodes.popleft()
            if node is None:
                continue
            seen += 1
            made_at = made_at or node.metadata.get(_MADE_AT, "")
            if made_at and _is_freed(node):
                raise GradientError(
                    f"the state hangs on the result of an earlier call at {made_at}, whose graph a backward pass has "
                    "freed, so the next one would end with 'Trying to backward through the graph a second time'; "
                    "give unroll state.detach() to start anew from its values, or call backward once, on the sum of "
                    "the losses"
                )
            nodes += [following for following, _ in node.next_functions]


def _is_freed(node: Any) -> bool:
    """Whether backward has let go of what the node saved; a node that saves nothing cannot tell."""
    try:
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                getattr(node, name)
    except RuntimeError:
        return True
    return False
