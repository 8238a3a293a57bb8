"""Charts as HTML with inline SVG: lines, stacked areas, stacked bars.

Only what has no text is SVG, stretched to whatever width there is; labels are HTML, so that they stay readable on a
narrow screen. The page's script adds a cross-hair, and nothing is missing without it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fullframe.observation.report.scales import Scale, linear_ticks, scale_for, step_scale, thinned, tick_text

_UNITS = 1000  # of the drawing, either way


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart. `colour` is a CSS colour; a faint line is background to another, and has no legend."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: str
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A horizontal line with a label: a limit, a prediction."""

    name: str
    value: float
    colour: str = "var(--muted)"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a stacked bar; `text` is its value for people."""

    name: str
    value: float
    text: str
    colour: str


Bar = tuple[str, Sequence[Part], str]  # label, pieces, text at the end


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    note: str = "",
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
    wide: bool = False,
) -> str:
    """Lines over steps."""
    values = [value for line in lines for value in line.values]
    scale = scale_for(values, from_zero=from_zero, may_be_logarithmic=may_be_logarithmic)
    steps = [step for line in lines for step in line.steps]
    across = step_scale(min(steps, default=0), max(steps, default=1))
    drawn, kept = [], []
    for line in lines:
        indices = thinned(line.values)
        points = [(line.steps[i], line.values[i]) for i in indices]
        kind = "faint" if line.faint else "line"
        drawn.append(f'<path class="{kind}" style="stroke:{line.colour}" d="{_path(points, across, scale)}"/>')
        if len(points) == 1:
            drawn.append(_dot(points[0], across, scale, line.colour))
        kept.append({"name": line.name, "colour": line.colour, "points": [[x, _short(y)] for x, y in points]})
    above = sum(
        math.isfinite(value) and value > scale.high for line in lines if not line.faint for value in line.values
    )
    if above:
        note = f"{note + '; ' if note else ''}{above} above the frame"
    legend = [(line.name, line.colour) for line in lines if not line.faint]
    legend = legend if len(legend) > 1 else []
    return _frame(title, note, legend, drawn, (), scale, across, kept, wide)


def area_chart(
    title: str,
    steps: Sequence[int],
    layers: Sequence[tuple[str, Sequence[float], str]],
    *,
    note: str = "",
    marks: Sequence[Mark] = (),
) -> str:
    """Layers (name, a value for each step, colour) on top of each other, the first at the bottom."""
    totals = [sum(values) for values in zip(*(layer[1] for layer in layers), strict=True)]
    scale = scale_for([*totals, *(mark.value for mark in marks)], from_zero=True)
    scale = Scale(low=0.0, high=max(scale.high, 1.05 * max(totals, default=0.0)) or 1.0)
    across = step_scale(min(steps, default=0), max(steps, default=1))
    indices = thinned(totals)
    drawn, kept, below = [], [], [0.0] * len(steps)
    for name, values, colour in layers:
        above = [low + value for low, value in zip(below, values, strict=True)]
        top: list[tuple[float, float]] = [(steps[i], above[i]) for i in indices]
        bottom: list[tuple[float, float]] = [(steps[i], below[i]) for i in reversed(indices)]
        if len(indices) == 1:  # one step: a bar across
            top = [(across.low, top[0][1]), (across.high, top[0][1])]
            bottom = [(across.high, bottom[0][1]), (across.low, bottom[0][1])]
        path = _path([*top, *bottom], across, scale)
        drawn.append(f'<path class="area" style="fill:{colour}" d="{path}Z"/>')
        kept.append({"name": name, "colour": colour, "points": [[steps[i], _short(values[i])] for i in indices]})
        below = above
    kept.append({"name": "total", "colour": "", "points": [[steps[i], _short(totals[i])] for i in indices]})
    legend = [(name, colour) for name, _, colour in reversed(layers)]
    return _frame(title, note, legend, drawn, marks, scale, across, kept, wide=True)


def bars(rows: Sequence[Bar], most: float | None = None, mark: Mark | None = None) -> str:
    """Stacked bars (label, parts, text at the end), one below the other on one scale that ends at `most`."""
    full = most or max((sum(part.value for part in parts) for _, parts, _ in rows), default=0.0) or 1.0
    drawn = []
    for label, parts, text in rows:
        pieces = "".join(
            f'<i style="width:{100 * part.value / full:.3f}%;background:{part.colour}" '
            f'title="{escape(f"{part.name}: {part.text}")}"></i>'
            for part in parts
            if part.value > 0
        )
        at = f'<b class="limit" style="left:{100 * mark.value / full:.3f}%"></b>' if mark is not None else ""
        drawn.append(
            f'<div class="bar"><span class="label">{escape(label)}</span><span class="track">{pieces}{at}</span>'
            f'<span class="value">{escape(text)}</span></div>'
        )
    return f'<div class="bars">{"".join(drawn)}</div>'


def legend_of(names: Mapping[str, str]) -> str:
    """What the colours mean: name to colour."""
    keys = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names.items())
    return f'<div class="legend">{"".join(keys)}</div>'


def _frame(
    title: str,
    note: str,
    legend: Sequence[tuple[str, str]],
    drawn: Sequence[str],
    marks: Sequence[Mark],
    scale: Scale,
    across: Scale,
    kept: Sequence[object],
    wide: bool,
) -> str:
    rows = [(scale.place(value), tick_text(value)) for value in scale.ticks()]
    grid = "".join(f'<path class="grid" d="M0 {_y(at)}H{_UNITS}"/>' for at, _ in rows)
    left = "".join(f'<span style="bottom:{100 * at:.2f}%">{text}</span>' for at, text in rows)
    steps = [value for value in linear_ticks(across.low, across.high, 8) if value == int(value)]
    below = "".join(f'<span style="left:{100 * across.place(x):.2f}%">{tick_text(x)}</span>' for x in steps)
    lines, names = "", ""
    for mark in marks:
        at = scale.place(mark.value)
        if 0 <= at <= 1:
            lines += f'<path class="mark" style="stroke:{mark.colour}" d="M0 {_y(at)}H{_UNITS}"/>'
            names += f'<em style="bottom:{100 * at:.2f}%;color:{mark.colour}">{escape(mark.name)}</em>'
    width = max((len(text) for _, text in rows), default=1)
    data = {"x": [across.low, across.high], "y": [scale.low, scale.high], "log": scale.logarithmic, "lines": kept}
    said = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<figure class="chart{" wide" * wide}"><figcaption><h3>{escape(title)}</h3>{said}</figcaption>'
        f"{legend_of(dict(legend)) if legend else ''}"
        f'<div class="plot" style="--labels:{width}ch" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'<div class="left">{left}</div><div class="field">'
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{grid}{"".join(drawn)}{lines}</svg>{names}</div><div class="below">{below}</div></div></figure>'
    )


def _path(points: Sequence[tuple[float, float]], across: Scale, scale: Scale) -> str:
    places = (f"{_UNITS * across.place(x):.1f} {_y(scale.place(y))}" for x, y in points)
    return "M" + "L".join(places) if points else ""


def _dot(point: tuple[float, float], across: Scale, scale: Scale, colour: str) -> str:
    x, y = _UNITS * across.place(point[0]), _y(scale.place(point[1]))
    return f'<path class="dot" style="stroke:{colour}" d="M{x:.1f} {y}h0"/>'


def _y(place: float) -> str:
    """From the top; what is far outside stays near, where the drawing ends anyway."""
    return f"{_UNITS * (1 - min(max(place, -1.0), 2.0)):.1f}"


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
