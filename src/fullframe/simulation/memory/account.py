"""The account of a trace: what was live at the peak and of what kind, where the peak was, which modules hold it.

What a block is follows from its life. Made in a forward pass and still there when backward begins: an activation; by a
recompute and still there when its module is done: likewise. Gone before: temporary. Made in backward or in the update
and still there after the step: the optimizer's.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fullframe.simulation.memory.trace import Block, Phase, Trace
from fullframe.simulation.prediction import LiveTensor, Moment

_LARGEST = 10


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a trace held at its peak; the fields are those of `Prediction`."""

    peak_bytes: int
    bytes: Mapping[str, int]
    moment: Moment
    largest: tuple[LiveTensor, ...]
    modules: Mapping[str, int]


def account(trace: Trace) -> Account:
    """The account of a whole trace."""
    kinds = {block: category_of(trace, block) for block in trace.events}
    peak = _highest(trace, lambda block: True)
    live = _live(trace, peak)
    bytes = Counter[str]()
    for block in live:
        bytes[kinds[block]] += block.bytes
    last = trace.events[peak]
    fullest = _highest(trace, lambda block: kinds[block] == "activation")
    modules = Counter[str]()
    for block in _live(trace, fullest):
        if kinds[block] == "activation":
            modules[block.module] += block.bytes
    return Account(
        peak_bytes=bytes.total(),
        bytes=dict(bytes.most_common()),
        moment=Moment(step=_step(trace, last), phase=phase_of(trace, last), module=last.module),
        largest=tuple(
            LiveTensor(bytes=b.bytes, shape=b.shape, dtype=b.dtype, category=kinds[b], module=b.module)
            for b in sorted(live, key=lambda block: -block.bytes)[:_LARGEST]
        ),
        modules=dict(modules.most_common()),
    )


def _highest(trace: Trace, counts: Callable[[Block], bool]) -> int:
    """The number of the event after which the blocks that count hold most bytes."""
    held = most = where = 0
    for number, block in enumerate(trace.events):
        if counts(block):
            held += block.bytes if number == block.born else -block.bytes
            if held > most:
                most, where = held, number
    return where


def _live(trace: Trace, event: int) -> list[Block]:
    born = (block for number, block in enumerate(trace.events[: event + 1]) if number == block.born)
    return [block for block in born if block.died is None or block.died > event]


def category_of(trace: Trace, block: Block) -> str:
    """What a block is: by its mark, or by when it was born and died."""
    if block.mark is not None:
        return block.mark
    phase, died = phase_of(trace, block), len(trace.events) if block.died is None else block.died
    step = _step(trace, block)
    stays = 0 < step <= len(trace.step_ends) and died >= trace.step_ends[step - 1]
    if phase == "build" or (stays and phase == "forward"):
        return "parameter"  # of the model's own: constants, caches
    if stays and phase in ("backward", "update"):
        return "optimizer"
    if phase == "recompute":
        return "activation" if died >= (block.region_end or 0) else "temporary"
    if phase == "forward":
        return "activation" if died >= _next_backward(trace, block) else "temporary"
    return "temporary"


def phase_of(trace: Trace, block: Block) -> Phase:
    """The tracer cannot know that no backward follows: what it took for forward is the update then."""
    ends = [end for end in trace.step_ends if end > block.born]
    if block.phase == "forward" and ends and _next_backward(trace, block) >= ends[0]:
        return "update"
    return block.phase


def _next_backward(trace: Trace, block: Block) -> int:
    starts = [backward.start for backward in trace.backwards]
    number = bisect_right(starts, block.born)
    return starts[number] if number < len(starts) else len(trace.events)


def _step(trace: Trace, block: Block) -> int:
    return 0 if block.phase == "build" else bisect_right(trace.step_ends, block.born) + 1
