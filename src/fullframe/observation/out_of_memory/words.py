"""A step that ran out of memory, in sentences, and in ten lines of a terminal."""

from collections.abc import Iterator, Mapping
from textwrap import shorten

from fullframe.observation.kinds import name_of
from fullframe.observation.out_of_memory.account import EVALUATION, OutOfMemory, Way
from fullframe.observation.units import seconds_text, size_text
from fullframe.wording import numbered

_SHOWN = 3  # categories, modules
_WIDE = 320  # characters of a line, where it is not a command
_MUCH = 0.01  # of a device, that others hold


def ten_lines(found: OutOfMemory, page: str, goes_on: str = "") -> list[str]:
    """At most ten, for a terminal; `page` is where more stands."""
    lines = [_joined(happened(found), goes_on), place(found), _joined(device(found), remedy(found)), live(found)]
    known = [f"{'  ' * (number > 0)}{shorten(line, _WIDE)}" for number, line in enumerate(filter(None, lines))]
    return [*known, *_ways(found), f"out of memory: {page}"]


def live(found: OutOfMemory) -> str:
    """The largest categories and modules of what was live; "" where nothing is known."""
    if not found.live.bytes:
        return ""
    modules = f"; most activations: {_sizes(found.live.modules)}" if found.live.modules else ""
    return f"live at {found.live.when}: {_sizes(found.live.bytes)}{modules}"


def _joined(*sentences: str) -> str:
    return "; ".join(filter(None, sentences))


def happened(found: OutOfMemory) -> str:
    """Who ran out, when, and what was asked for."""
    others = f", and so did {numbered('rank', found.others)}" if found.others else ""
    asked = f"; {size_text(found.asked_bytes)} were asked for" if found.asked_bytes else ""
    when = f"in the evaluation after step {found.step}"
    if found.phase != EVALUATION:
        when = f"in step {found.step}" + (f", in {name_of(found.phase)}" if found.phase else "")
    return f"rank {found.rank} ran out of memory {when}{others}{asked}"


def place(found: OutOfMemory) -> str:
    """The line of the recipe, and the module; "" where neither is known."""
    source = f" ({found.source})" if found.source else ""
    line = f"at {found.line}{source}" if found.line else ""
    module = f"in module {found.module}" if found.module else ""
    return ", ".join(filter(None, (line, module)))


def device(found: OutOfMemory) -> str:
    """What the device held; of the CPU what the process did."""
    if found.allocated_bytes is None:
        held = f"the process held {size_text(found.host_bytes)}" if found.host_bytes else ""
        free = f"{size_text(found.free_bytes)} were free" if found.free_bytes is not None else ""
        of = f" of the machine's {size_text(found.limit_bytes)}" if free and found.limit_bytes else ""
        known = "; ".join(filter(None, (held, free + of)))
        return f"{known}; no fragmentation to tell of: on the CPU torch keeps no pool" if known else ""
    parts = [f"tensors held {size_text(found.allocated_bytes)}"]
    if found.unused_bytes is not None:
        parts.append(f"{size_text(found.unused_bytes)} more were reserved and in no tensor (fragmentation)")
    if found.limit_bytes:
        free = f", {size_text(found.free_bytes)} free" if found.free_bytes is not None else ""
        parts.append(f"the device has {size_text(found.limit_bytes)}{free}")
        if (found.others_bytes or 0) > _MUCH * found.limit_bytes:
            parts.append(f"other processes had {size_text(found.others_bytes or 0)} of it")
    return "; ".join(parts)


def remedy(found: OutOfMemory) -> str:
    """What helps beside another strategy; "" where nothing does."""
    if found.is_fragmented:
        return "what was asked for was there, in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True joins them"
    return ""


def way_text(way: Way) -> str:
    """What a rank needs with it, and how long a step takes."""
    size = f"{size_text(way.device_bytes)} a rank" if way.device_bytes else ""
    seconds = f"{seconds_text(way.step_seconds)} a step" if way.step_seconds else ""
    return ", ".join(filter(None, (size, seconds)))


def _ways(found: OutOfMemory) -> Iterator[str]:
    if found.ways:
        yield f"these would fit on {found.devices or 'it'}, by simulation, fastest first:"
        for way in found.ways:
            about = way_text(way)
            yield f"  {way.command}" + (f"  # {about}" if about else "")
    elif found.phase == EVALUATION:
        yield "  " + shorten(found.problem, _WIDE)
    elif found.problem:
        yield "  " + shorten(f"no other strategy to name: {found.problem}", _WIDE)


def _sizes(sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:_SHOWN]
    return ", ".join(f"{name or '(the loss)'} {size_text(size)}" for name, size in largest)
