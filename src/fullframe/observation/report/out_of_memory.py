"""The part of a page about a step that ran out of memory: what was asked, what was there, and what would fit."""

from collections.abc import Iterator, Sequence
from html import escape

from fullframe.observation.kinds import CATEGORIES, in_order
from fullframe.observation.out_of_memory.account import EVALUATION, OutOfMemory
from fullframe.observation.out_of_memory.words import device, happened, place, remedy, way_text
from fullframe.observation.report.charts import Bar, Part, bars, legend_of
from fullframe.observation.report.sections import Shown, colour_of, plain, section
from fullframe.observation.units import size_text
from fullframe.wording import capital

_MODULES = 12


def out_of_memory(shown: Sequence[Shown]) -> str:
    """A section for each run in which a step ran out; "" where none did."""
    parts = []
    for one in shown:
        if one.run.out_of_memory is not None:
            of = f" of {one.name}" if len(shown) > 1 else ""
            cards = account_of(one.run.out_of_memory, one.run.goes_on)
            parts.append(section(f"Out of memory{of}", f'<div class="grid">{cards}</div>'))
    return "".join(parts)


def account_of(found: OutOfMemory, goes_on: str) -> str:
    """The cards of one step, or evaluation."""
    cards = [_what_happened(found, goes_on), _ways(found), _of_device(found)]
    if found.phase != EVALUATION:  # of which nothing is followed
        cards += [_live(found), _modules(found)]
    if found.error:
        error = f"<details><summary>the error in full</summary><pre>{escape(found.error)}</pre></details>"
        cards.append(f'<div class="card wide">{error}</div>')
    return "".join(cards)


def _what_happened(found: OutOfMemory, goes_on: str) -> str:
    sentences = [happened(found), device(found), remedy(found), goes_on]
    text = "".join(f"<p>{escape(capital(sentence))}.</p>" for sentence in sentences if sentence)
    where = f"<p><code>{escape(place(found))}</code></p>" if place(found) else ""
    return f'<div class="card wide"><h3>What happened</h3>{text}{where}</div>'


def _ways(found: OutOfMemory) -> str:
    title = "<h3>What would fit, by simulation, fastest first</h3>"
    if found.phase == EVALUATION:
        return f'<div class="card wide"><h3>What helps</h3><p>{escape(found.problem)}</p></div>'
    if not found.ways:
        text = found.problem or "Looked for when the ranks have ended."
        return f'<div class="card wide">{title}<p class="muted">{escape(text)}</p></div>'
    rows = "".join(
        f"<p><b>{escape(way.words)}</b> <small>{escape(way_text(way))}</small></p><pre>{escape(way.command)}</pre>"
        for way in found.ways
    )
    same = '<p class="muted">With the precision, the optimizer and the batch that the run had.</p>'
    return f'<div class="card wide">{title}{rows}{same}</div>'


def _of_device(found: OutOfMemory) -> str:
    """A bar of what was there, and one of what was asked for, on one scale."""
    parts = list(_held(found))
    if not parts:
        return ""
    limit = found.limit_bytes or sum(part.value for part in parts)
    rows: list[Bar] = [("held", parts, size_text(sum(part.value for part in parts if part.name != "free")))]
    if found.asked_bytes:
        asked = Part(name="asked for", value=found.asked_bytes, text=size_text(found.asked_bytes), colour="var(--bad)")
        rows.append(("asked for", [asked], asked.text))
        limit = max(limit, found.asked_bytes)
    keys = legend_of({part.name: part.colour for part in parts})
    return f'<div class="card wide"><h3>The device</h3>{keys}{bars(rows, limit)}</div>'


def _held(found: OutOfMemory) -> Iterator[Part]:
    of_process = "this process" if found.allocated_bytes is None else "in tensors"
    known = (
        (of_process, found.host_bytes if found.allocated_bytes is None else found.allocated_bytes, "var(--c1)"),
        ("reserved, in no tensor", found.unused_bytes, "var(--c6)"),
        ("other processes", found.others_bytes, "var(--c3)"),
    )
    for name, size, colour in known:
        if size:
            yield Part(name=name, value=size, text=size_text(size), colour=colour)


def _live(found: OutOfMemory) -> str:
    live = found.live
    if not live.bytes:
        text = "No step was followed before, and no simulation could say."
        return f'<div class="card"><h3>What was live</h3><p class="muted">{text}</p></div>'
    sizes = ((kind, live.bytes[kind]) for kind in in_order(live.bytes, CATEGORIES))
    rows = [_row(plain(kind), plain(kind), size, colour_of(kind)) for kind, size in sizes if size > 0]
    whole = f": {size_text(live.peak_bytes)}" if live.peak_bytes else ""
    return (
        f'<div class="card"><h3>What was live{whole}</h3><p class="muted">At {escape(live.when)}, on rank {found.rank}.'
        f"</p>{bars(rows)}</div>"
    )


def _modules(found: OutOfMemory) -> str:
    largest = sorted(found.live.modules.items(), key=lambda pair: -pair[1])[:_MODULES]
    colour = colour_of("activation")
    rows = [_row(name or "(the loss)", "activations", size, colour) for name, size in largest if size > 0]
    body = bars(rows) if rows else '<p class="muted">Not measured by module.</p>'
    return f'<div class="card"><h3>Modules with most activations</h3>{body}</div>'


def _row(label: str, name: str, size: int, colour: str) -> Bar:
    return label, [Part(name=name, value=size, text=size_text(size), colour=colour)], size_text(size)
