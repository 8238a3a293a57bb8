"""A block that is run many times on its own result, with the gradients of the plain loop in less memory.

Unrolled reconstruction (CT, MRI), iterative flow and stereo: `state = block(state, *inputs)`, 8 to 30 times. What is
kept for backward is chosen by a schedule of states that are kept and iterations that are run again, on one device or
on several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullframe.arguments import checked
from fullframe.errors import ShapeError, StrategyError, require_count
from fullframe.model.lent import lent
from fullframe.ranks.raw_bytes import overwrite
from fullframe.spatial.tensor import SpatialTensor
from fullframe.techniques.offload import saving_to_host
from fullframe.techniques.recompute import Looks, Recomputed
from fullframe.techniques.stages.chain import Criterion, Stages
from fullframe.techniques.stages.through import through_stages
from fullframe.techniques.unrolling import schedules
from fullframe.techniques.unrolling.schedules import Schedule
from fullframe.techniques.unrolling.states import (
    form_of,
    moved,
    note_made,
    require_device,
    require_live,
    tensors_of,
    told,
)

_KINDS = ("none", "iterations", "nested")


@checked
def unroll(
    block: nn.Module | Sequence[nn.Module],
    iterations: int,
    *,
    recompute: bool | str | int = "none",
    placement: str | Sequence[torch.device | str] = "here",
    mesh: DeviceMesh | None = None,
    microbatches: int = 1,
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

    `placement="stages"` runs equal parts of the iterations on the ranks along the axis "stage" of `mesh`
    (`ff.init_mesh(stages=2)`), each with its graphs alone. All of these ranks call it with equal arguments and get the
    result; `ff.parallelize` averages the gradients of the weights over them, as over any ranks. With `microbatches` the
    stages work at the same time, each on another slice of the samples; batch norm sees one slice at a time.

    Raises StrategyError for options that are none; in a call ShapeError where an iteration changes the shape of the
    state, StrategyError where one that is run again writes to its state, DeviceError where it is not on the block's
    device, GradientError where it hangs on a graph that an earlier backward pass has freed.
    """
    unrolled = Unrolled(block, iterations, recompute, placement, return_all)
    if (placement == "stages") != (mesh is not None):
        raise StrategyError(
            f"placement is {placement!r} and mesh {'given' if mesh is not None else 'not given'}; iterations on "
            'several ranks take both: placement="stages", mesh=ff.init_mesh(stages=2)'
        )
    if mesh is not None:
        unrolled.spread(mesh, microbatches)
    elif microbatches != 1:
        raise StrategyError(f"microbatches={microbatches} is for stages; give placement='stages' and a mesh with them")
    return unrolled


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
        self._own_recompute = self._recompute = _known_kind(recompute)
        self._states: int | None = None  # that "nested" may keep; None: about two square roots of them
        self.on_host = placement == "host"
        self.devices = () if isinstance(placement, str) else tuple(map(torch.device, placement))
        if isinstance(placement, str) and placement not in ("here", "host", "stages"):
            raise StrategyError(f'placement must be "here", "host", "stages" or a list of devices, got {placement!r}')
        self.stages: Stages | None = None
        self.looks = Looks()
        self._saving: Callable[[], AbstractContextManager[None]] | None = None
        if self.devices and isinstance(block, nn.ModuleList):
            for number, own in enumerate(block):
                if not any(parameter.is_meta for parameter in own.parameters()):  # there is nothing to move yet
                    own.to(self.device_of(number))

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, recompute={self._recompute!r}"

    def iterated_blocks(self) -> dict[str, nn.Module]:
        """By its name, each block that an iteration runs."""
        own = enumerate(self.block) if isinstance(self.block, nn.ModuleList) else ()
        return {f"block.{number}": block for number, block in own} or {"block": self.block}

    def spread(self, mesh: DeviceMesh, microbatches: int = 1) -> None:
        """From now on the iterations are on stages, in `microbatches`; StrategyError where they have another place."""
        if self.on_host or self.devices:
            raise StrategyError("iterations that wait on the host or run on several devices cannot be on stages too")
        self.stages = Stages(mesh, microbatches)

    def keep(self, recompute: str | None, states: int | None = None) -> None:
        """From now on another `recompute`, of which "nested" may keep so many `states`; None: its own again."""
        self._recompute = self._own_recompute if recompute is None else _known_kind(recompute)
        self._states = states

    def save_by(self, saving: Callable[[], AbstractContextManager[None]]) -> None:
        """With placement="host", enter what `saving` makes around each call, in place of the way to the host."""
        self._saving = saving

    def forward(self, state: Any, *inputs: Any) -> Any:
        """The last state, or a list of all of them; `inputs` are what every iteration reads."""
        tensors = tensors_of(state)
        if not tensors:
            raise ShapeError(f"the state holds no tensor: {type(state).__name__}")
        if torch.is_grad_enabled():
            require_live(tensors)
            self.looks.begin()
        home = tensors[0].device
        if not self.devices:
            require_device(self.block, home)
        if self.on_host and self._saving is None:
            self._saving = saving_to_host(home)
        with self._saving() if self.on_host and self._saving is not None else nullcontext():
            if self.stages is not None:
                states = through_stages(_Iterations(self), self.stages, state, inputs, self.return_all)
            else:
                states = self.run(range(self.iterations), state, inputs)
        states = [moved(each, home) for each in states] if self.devices else states
        note_made(tensors_of(states[-1]))
        return states if self.return_all else states[-1]

    def loss(self, criterion: Callable[..., Tensor], targets: Sequence[Any], state: Any, *inputs: Any) -> Tensor:
        """The sum over the microbatches of `criterion(last state, *targets)`, a scalar on all ranks.

        On stages each microbatch goes back as soon as the criterion is known (1F1B), inside this call, so that a stage
        keeps the graphs of no more microbatches than there are stages; `backward` then multiplies and hands on, so that
        hooks in the block get the gradient of the sum itself. Where the criterion has parameters it must be a module.
        Elsewhere there is one microbatch, and nothing special.

        Raises StrategyError with `return_all`, as the other states are not where the criterion is.
        """
        if self.return_all:
            raise StrategyError(
                "loss() knows the last state alone; with return_all, call the module and take the losses"
            )
        if self.stages is None:
            return criterion(self(state, *inputs), *targets)
        of = Criterion(criterion, tuple(targets))
        loss: Tensor = through_stages(_Iterations(self), self.stages, state, inputs, criterion=of)[0]
        return loss

    def run(
        self, part: range, state: Any, inputs: tuple[Any, ...], before: Callable[[int], None] | None = None
    ) -> list[Any]:
        """The states after the iterations `part`, or the last alone; `before` is told the number of each."""
        run = _Run(self, state, before)
        states: list[Any] = []
        for each in run.states(schedules.later(self.schedule_for(state, len(part)), part.start), state, inputs):
            states = [*states, each] if self.return_all else [each]
        run.bring_buffers_home()
        return states

    def schedule_for(self, state: Any, iterations: int) -> Schedule:
        """What is run, and run again, of so many `iterations`, for a state like this one."""
        if self._recompute == "none" or not torch.is_grad_enabled():
            return schedules.in_place(iterations)
        if self._recompute == "iterations" or self.return_all:
            return schedules.each_again(iterations)
        if self._recompute == "nested" and self._states is None:
            return schedules.nested(iterations)
        if self._states is not None:
            return schedules.binomial(iterations, min(iterations, self._states))
        state_bytes = sum(map(_largest_bytes, tensors_of(state)))
        fitting = self._recompute // max(state_bytes, 1)
        if not fitting:
            raise StrategyError(
                f"a budget of {self._recompute} bytes does not hold one state, which has {state_bytes}; give unroll "
                f"recompute={2 * state_bytes} or more"
            )
        return schedules.binomial(iterations, min(iterations, fitting))

    def block_of(self, number: int) -> nn.Module:
        """The block of iteration `number`, counted from 0."""
        return self.block[number] if isinstance(self.block, nn.ModuleList) else self.block

    def device_of(self, number: int) -> torch.device:
        """Where iteration `number`, counted from 0, runs, of several devices."""
        return self.devices[number * len(self.devices) // self.iterations]

    @property
    def has_own_blocks(self) -> bool:
        """Whether each iteration has a block of its own."""
        return isinstance(self.block, nn.ModuleList)


class _Iterations:
    """The iterations as a chain that can be cut into stages."""

    def __init__(self, unrolled: Unrolled):
        self.whole, self._unrolled = unrolled.block, unrolled
        self.parts = [unrolled.block_of(number) for number in range(unrolled.iterations)]

    def run(self, part: range, state: Any, inputs: tuple[Any, ...], before: Callable[[int], None]) -> list[Any]:
        """As `Unrolled.run`."""
        return self._unrolled.run(part, state, inputs, before)

    def likeness(self, count: int, state: Any) -> Any:
        """The given one: no iteration changes its form."""
        return state


def _largest_bytes(tensor: Tensor) -> int:
    """On the rank that has most of it, as all run the same again."""
    return prod(tensor.spec.largest_shape if isinstance(tensor, SpatialTensor) else tensor.shape) * tensor.itemsize


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

    def __init__(self, unrolled: Unrolled, state: Any, before: Callable[[int], None] | None):
        self._of, self._before = unrolled, before
        self._form = form_of(state)
        self._weights: dict[torch.device, dict[str, Tensor]] = {}  # of a shared block, on the devices so far
        self.buffers: dict[str, Tensor] = {}  # of a shared block, where the last iteration ran
        if unrolled.devices and not unrolled.has_own_blocks:
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
        remedies = "write state = state + step, not state += step", 'give its ff.unroll recompute="none"'
        return Recomputed(part, name, *remedies, self._of.looks)(state, *inputs)

    def _iterate(self, number: int, state: Any, inputs: tuple[Any, ...]) -> Any:
        block = self._of.block_of(number)
        if self._before is not None:
            self._before(number)
        if self._of.devices:
            result = self._iterate_on(self._of.device_of(number), block, state, inputs)
        else:
            result = block(state, *inputs)
        form = form_of(result)
        if form != self._form:
            raise ShapeError(
                f"iteration {number} of {type(block).__name__} got a state of {told(self._form, form)} and returned "
                f"{told(form, self._form)}; bring it back to that inside the block, as the next iteration gets it"
            )
        return result

    def _iterate_on(self, device: torch.device, block: nn.Module, state: Any, inputs: tuple[Any, ...]) -> Any:
        state, inputs = moved(state, device), moved(inputs, device)
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
                overwrite(buffer, self.buffers[name])


@contextmanager
def _lent(block: nn.Module, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the block has these in the place of its own; `buffers` then holds what it has made of them."""
    with lent(block, weights | buffers):
        yield
        buffers.update(dict(block.named_buffers()))


class _Part(nn.Module):
    """Some iterations, as a module that can be run again."""

    def __init__(self, run: _Run, schedule: Schedule, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(dict.fromkeys(blocks))
        self._run, self._schedule = run, schedule
        self._before: list[dict[str, Tensor]] = []  # buffers on other devices, before the first time

    def forward(self, state: Any, *inputs: Any) -> Any:
        run = self._run
        if not self._before:  # whose entry stays when it is run again, as an attribute would not
            self._before.append({name: value.clone() for name, value in run.buffers.items()})
            return self._last_state(state, inputs)
        now, run.buffers = run.buffers, {name: value.clone() for name, value in self._before[0].items()}
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
