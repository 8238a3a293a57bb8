"""The parts of the page, each from one or several runs with their summaries."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fullframe.observation.kinds import CATEGORIES, KINDS, in_order, name_of
from fullframe.observation.report.charts import Bar, Line, Mark, Part, area_chart, bars, legend_of, line_chart
from fullframe.observation.run_files import ObservedStep, RunFiles
from fullframe.observation.summary import RankNow, Summary, compared, smoothed
from fullframe.observation.units import seconds_text, share_text, size_text
from fullframe.training.run_directory import OF_STEP
from fullframe.wording import GIB, MIB, capital

_NAMES = {"parameter": "parameters", "gradient": "gradients", "activation": "activations"}
_NAMES |= {"cached": "cached by the allocator"}
_KNOWN = {*CATEGORIES, *KINDS}
_NO_CHART = OF_STEP - {"learning_rate"}
_MODULES, _RANKS, _HOST_RANKS = 12, 32, 8


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A run on the page: its name there, its files, its summary, and the colour of its lines."""

    name: str
    run: RunFiles
    summary: Summary
    colour: str


def colour_of(kind: str) -> str:
    """The CSS colour of a category of memory or a kind of seconds."""
    return f"var(--{kind})" if kind in _KNOWN else "var(--other)"


def plain(kind: str) -> str:
    """A kind's name for people."""
    return _NAMES.get(kind, name_of(kind))


def training(shown: Sequence[Shown]) -> str:
    """Loss, and whatever else was recorded by step."""
    charts = [_loss_chart(shown)]
    names = dict.fromkeys(name for one in shown for name in one.run.table.names)
    for name in [*(n for n in names if n not in _NO_CHART), "grad_norm"]:
        if lines := _lines(shown, name):
            title = name.replace("_", " ")
            charts.append(line_chart(title, lines, may_be_logarithmic=name == "grad_norm"))
    if len(charts) % 2 == 0:  # the first is wide: the last one would stand alone
        charts[-1] = charts[-1].replace('class="chart"', 'class="chart wide"', 1)
    return section("Training", f'<div class="grid">{"".join(charts)}</div>')


def _lines(shown: Sequence[Shown], name: str) -> list[Line]:
    known = [(one, *one.run.table.known(name)) for one in shown]
    return [Line(name=one.name, steps=steps, values=values, colour=one.colour) for one, steps, values in known if steps]


def _loss_chart(shown: Sequence[Shown]) -> str:
    lines, note = [], ""
    for one in shown:
        steps, values = one.run.table.known("loss")
        if len(values) >= 20:
            lines.append(Line(name=f"{one.name}, each step", steps=steps, values=values, colour=one.colour, faint=True))
            values, note = smoothed(values), "each step faint, smoothed bold"
        if steps:
            lines.append(Line(name=one.name, steps=steps, values=values, colour=one.colour))
    if not lines:
        return '<figure class="wide"><p class="muted">No step was recorded yet.</p></figure>'
    return line_chart("loss", lines, note=note, may_be_logarithmic=True, wide=True)


def memory(shown: Sequence[Shown]) -> str:
    """By category over the steps, the peak and what it is made of, the largest modules, all ranks."""
    cards = []
    for draw in (_timeline, _peak_card, _ranks_card, _host_chart):  # the same of all runs beside each other
        for one in shown:
            if _has_memory(one):
                cards.append(draw(one, f" of {one.name}" if len(shown) > 1 else ""))
            elif draw is _timeline:
                cards.append(_missing(f"Memory of {one.name}", "This run wrote nothing of its memory (observed/)."))
    if len(shown) > 1:
        cards = [card.replace(' wide"', '"', 1) for card in cards]
    return section("Memory", f'<div class="grid" style="--columns:{max(2, min(len(shown), 4))}">{"".join(cards)}</div>')


def _has_memory(one: Shown) -> bool:
    return any(row.peak_bytes or row.bytes or row.host_bytes for rows in one.run.observed.values() for row in rows)


def _timeline(one: Shown, title: str) -> str:
    """The fullest rank's memory over the steps."""
    rank = one.summary.peak[0] if one.summary.peak is not None else next(iter(one.run.observed))
    rows = [row for row in one.run.observed[rank] if row.bytes]
    limit, marks = one.summary.limit_bytes, list[Mark]()
    prediction = one.run.prediction
    note = f"rank {rank}, the fullest" if len(one.run.observed) > 1 else ""
    if not rows:
        return _heights(one, rank, title, note)
    steps = [row.step for row in rows]
    if len(rows) == 1:  # a line needs two ends
        note = f"as measured in step {rows[0].step}" + (f"; {note}" if note else "")
        rows, steps = rows * 2, [rows[0].step, max(one.run.observed[rank][-1].step, rows[0].step + 1)]
    highest = max(sum(row.bytes.values()) for row in rows)
    unit, name = (GIB, "GiB") if highest >= 0.2 * GIB else (MIB, "MiB")
    if prediction is not None and prediction.peak_bytes:
        marks.append(Mark(name=f"predicted {size_text(prediction.peak_bytes)}", value=prediction.peak_bytes / unit))
    if limit and limit < 3 * highest:
        marks.append(Mark(name=f"limit {size_text(limit)}", value=limit / unit, colour="var(--bad)"))
    kinds = in_order((kind for row in rows for kind in row.bytes), CATEGORIES)
    layers = [(plain(kind), [row.bytes.get(kind, 0) / unit for row in rows], colour_of(kind)) for kind in kinds]
    said = f"{name} at a step's peak" + (f"; {note}" if note else "")
    return area_chart(f"memory by category{title}", steps, layers, note=said, marks=marks)


def _heights(one: Shown, rank: int, title: str, note: str) -> str:
    """Where no categories were measured: the peak of each step."""
    found = [(row.step, row.peak_bytes / GIB) for row in one.run.observed[rank] if row.peak_bytes]
    if not found:
        return ""
    steps, values = [step for step, _ in found], [value for _, value in found]
    line = Line(name="peak", steps=steps, values=values, colour="var(--c0)")
    return line_chart(f"memory{title}", [line], note=f"GiB{'; ' + note if note else ''}", from_zero=True, wide=True)


def _peak_card(one: Shown, title: str) -> str:
    """What the fullest moment was made of."""
    peak = one.summary.peak
    if peak is None:
        return _missing(f"The peak{title}", "No peak was measured.")
    rank, row = peak
    body = [f"<h3>The peak{escape(title)}: {size_text(row.peak_bytes or 0)} on rank {rank} in step {row.step}</h3>"]
    traced = _traced(row, one.run.observed[rank])
    body.append(f"<p>{escape(_peak_sentence(one, row, traced))}</p>")
    if traced.bytes:
        rows = [(plain(kind), [_size_part(kind, size)], size_text(size)) for kind, size in _sorted(traced.bytes)]
        body.append(bars(rows))
    body.append("<h3>Largest modules</h3>")
    modules = traced.modules or next((r.modules for r in reversed(one.run.observed[rank]) if r.modules), {})
    if modules:
        largest = _sorted(modules)[:_MODULES]
        body.append(
            bars([(m or "(the loss)", [_size_part("activation", size)], size_text(size)) for m, size in largest])
        )
    else:
        body.append('<p class="muted">Not measured by module.</p>')
    return f'<div class="card">{"".join(body)}</div>'


def _traced(row: ObservedStep, rows: Sequence[ObservedStep]) -> ObservedStep:
    """The step itself where it was measured by category, else the fullest that was."""
    return row if row.bytes else max(rows, key=lambda other: (bool(other.bytes), other.peak_bytes or 0))


def _peak_sentence(one: Shown, row: ObservedStep, traced: ObservedStep) -> str:
    whole = row.peak_bytes or 0
    parts = []
    if traced.bytes and whole:
        kind, size = _sorted(traced.bytes)[0]
        when = "" if traced is row else f" in step {traced.step}, which was measured by category"
        parts.append(f"{size / (traced.peak_bytes or whole):.0%} of it is {plain(kind)}{when}")
    if row.reserved_bytes and whole:
        parts.append(f"the allocator held {size_text(row.reserved_bytes)}, {row.reserved_bytes / whole - 1:.0%} more")
    if row.others_bytes:
        parts.append(f"other processes held {size_text(row.others_bytes)} of the device")
    limit = one.summary.limit_bytes
    if limit and whole:
        free = max(1 - (max(row.reserved_bytes or 0, whole) + (row.others_bytes or 0)) / limit, 0)
        parts.append(f"the device has {size_text(limit)}, of which {free:.0%} was free")
    text = "; ".join(parts)
    return capital(text) + "." if text else "What it was made of was not measured."


def _ranks_card(one: Shown, title: str) -> str:
    """Every rank's peak on one scale, the prediction above them."""
    rows: list[Bar] = []
    prediction = one.run.prediction
    if prediction is not None and prediction.peak_bytes:
        parts = [_size_part(kind, size) for kind, size in _by_category(prediction.bytes, prediction.peak_bytes)]
        rows.append(("predicted", parts, size_text(prediction.peak_bytes)))
    ranks = sorted(one.summary.ranks, key=lambda rank: -(rank.peak_bytes or 0))
    for rank in sorted(ranks[:_RANKS], key=lambda rank: rank.rank):
        whole = rank.peak_bytes or 0
        parts = [_size_part(kind, size) for kind, size in _by_category(rank.bytes, whole)]
        rows.append((f"rank {rank.rank}", parts, size_text(whole) if whole else "not measured"))
    limit = one.summary.limit_bytes
    largest = max((sum(part.value for part in parts) for _, parts, _ in rows), default=0.0)
    mark = Mark(name="limit", value=limit) if limit and limit < 3 * largest else None
    colours = {part.name: part.colour for _, parts, _ in rows for part in parts}
    keys = legend_of({name: colours[name] for name in in_order(colours, [plain(kind) for kind in CATEGORIES])})
    said = f'<p class="muted">The dashed line is the device\'s limit, {size_text(limit or 0)}.</p>' if mark else ""
    if len(ranks) > _RANKS:
        said += f'<p class="muted">The {_RANKS} fullest of {len(ranks)} ranks.</p>'
    body = bars(rows, max(largest, limit or 0) if mark else None, mark)
    return f'<div class="card"><h3>Peaks of all ranks{escape(title)}</h3>{keys}{body}{said}</div>'


def _host_chart(one: Shown, title: str) -> str:
    """What each process held on the host, device or none: what grows here is not torch's."""
    lines = []
    for number, (rank, rows) in enumerate(list(one.run.observed.items())[:_HOST_RANKS]):
        found = [(row.step, row.host_bytes / GIB) for row in rows if row.host_bytes]
        if found:
            steps, values = [step for step, _ in found], [value for _, value in found]
            lines.append(Line(name=f"rank {rank}", steps=steps, values=values, colour=f"var(--c{number})"))
    note = "GiB a process holds, the code, other libraries and data read ahead included"
    return line_chart(f"host memory{title}", lines, note=note, from_zero=True, wide=True) if lines else ""


def times(shown: Sequence[Shown]) -> str:
    """Where a step's seconds go on each rank, and how they changed over the run."""
    cards = []
    rows: list[Bar] = []
    for one in shown:
        title = f"{one.name}, " if len(shown) > 1 else ""
        slowest = one.summary.slowest[0] if one.summary.slowest is not None else None
        prediction = one.run.prediction
        if prediction is not None and prediction.step_seconds and one.summary.ranks:
            part = Part(name="predicted", value=prediction.step_seconds, text=seconds_text(prediction.step_seconds),
                        colour="var(--c6)")  # fmt: skip
            rows.append((f"{title}predicted", [part], part.text))
        ranks = sorted(one.summary.ranks, key=lambda rank: -rank.busy_seconds)[:_RANKS]
        for rank in sorted(ranks, key=lambda rank: rank.rank):
            whole = sum(rank.seconds.values())
            text = seconds_text(whole) + " slowest" * (rank.rank == slowest) if rank.seconds else "not measured"
            rows.append((f"{title}rank {rank.rank}", _seconds_parts(rank), text))
    if any(parts for _, parts, _ in rows):
        kinds = in_order((kind for one in shown for rank in one.summary.ranks for kind in rank.seconds), KINDS)
        keys = legend_of({plain(kind): colour_of(kind) for kind in kinds})
        said = "".join(f"<p>{escape(text)}</p>" for text in _time_sentences(shown))
        title = "A usual step of each rank, in the order of its parts"
        cards.append(f'<div class="card wide"><h3>{title}</h3>{said}{keys}{bars(rows)}</div>')
    else:
        cards.append(_missing("A step of each rank", "How a step's seconds divide was not measured (observed/)."))
    if lines := _lines(shown, "step_seconds"):
        cards.append(line_chart("seconds of each step", lines, from_zero=True, wide=True))
    return section("Time", f'<div class="grid">{"".join(cards)}</div>')


def _seconds_parts(rank: RankNow) -> list[Part]:
    kinds = in_order(rank.seconds, KINDS)
    return [Part(name=plain(k), value=rank.seconds[k], text=seconds_text(rank.seconds[k]), colour=colour_of(k))
            for k in kinds]  # fmt: skip


def _time_sentences(shown: Sequence[Shown]) -> Iterator[str]:
    for one in shown:
        of = f"{one.name}: " if len(shown) > 1 else ""
        if one.summary.slowest is not None:
            rank, share = one.summary.slowest
            yield f"{of}rank {rank} is the slowest: it works {share:.0%} longer than the others, who wait for it."
        elif len(one.summary.ranks) > 1 and any(rank.seconds for rank in one.summary.ranks):
            yield f"{of}no rank is slow: their own work differs by less than a tenth."


def predictions(shown: Sequence[Shown]) -> str:
    """Predicted against measured, a table for each run; "" where nothing was predicted."""
    cards = []
    for one in shown:
        rows = list(_predicted(one))
        if rows:
            title = f"<h3>{escape(one.name)}</h3>" if len(shown) > 1 else ""
            head = ["", "predicted", "measured", "measured is"]
            wide = "" if len(shown) > 1 else " wide"
            cards.append(f'<div class="card scroll{wide}">{title}{table(head, rows)}</div>')
    if not cards:
        return ""
    columns = max(2, min(len(shown), 3))
    body = f'<div class="grid" style="--columns:{columns}">{"".join(cards)}</div>'
    return section("Predicted against measured", body)


def _predicted(one: Shown) -> Iterator[list[str]]:
    for each in compared(one.run, one.summary):
        yield [each.name, each.text(each.predicted), each.text(each.measured), share_text(each.share)]
    prediction = one.run.prediction
    if prediction is None or one.summary.peak is None:
        return
    rank, row = one.summary.peak
    measured = _traced(row, one.run.observed[rank]).bytes
    for kind in in_order([*prediction.bytes, *measured], CATEGORIES):
        before, found = prediction.bytes.get(kind, 0), measured.get(kind, 0)
        if measured and max(before, found) > 0:
            share = share_text(found / before - 1) if before else ""
            yield [f"peak: {plain(kind)}", size_text(before), size_text(found), share]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """A table; cells are HTML, `classes` one for each row."""
    marked = [*classes, *[""] * (len(rows) - len(classes))]
    body = "".join(
        f"<tr{f' class={name}' if name else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for row, name in zip(rows, marked, strict=True)
    )
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table>{f'<tr>{top}</tr>' if any(head) else ''}{body}</table>"


def _by_category(sizes: Mapping[str, int], whole: int) -> list[tuple[str, int]]:
    """In order, with what is left of the whole; the whole alone where there are no categories."""
    found = [(kind, sizes[kind]) for kind in in_order(sizes, CATEGORIES)]
    left = whole - sum(sizes.values())
    return [*found, *([("other" if found else "allocated", left)] if left > 0.001 * whole else [])]


def _size_part(kind: str, size: float) -> Part:
    return Part(name=plain(kind), value=size, text=size_text(size), colour=colour_of(kind))


def _sorted(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((k, v) for k, v in sizes.items() if v > 0), key=lambda pair: -pair[1])


def _missing(title: str, text: str) -> str:
    return f'<div class="card wide"><h3>{escape(title)}</h3><p class="muted">{escape(text)}</p></div>'


def section(title: str, body: str) -> str:
    """A part of the page; `title` is text, `body` HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
