"""One screen of a run: as many lines as the terminal has, none wider than it."""

import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

from fullframe.observation.kinds import CATEGORIES, KINDS, in_order
from fullframe.observation.run_files import RunFiles
from fullframe.observation.summary import Finding, RankNow, Summary, smoothed
from fullframe.observation.units import duration_text, number_text, seconds_text, size_text
from fullframe.observation.watch.drawing import Glyphs, bar, curve, keys, rule
from fullframe.training.run_directory import OF_STEP

_STATES = {"running": "bold green", "finished": "bold green", "stopped": "bold yellow", "unknown": "bold yellow"}
_LEVELS = {"bad": "bold red", "warn": "yellow", "info": "cyan"}
_LABEL, _VALUE = 10, 27  # characters before and after a bar
_MOST_CURVE, _LEAST_FINDINGS = 24, 3
_ROOMY = 4.0  # times what is held: where the device has more than this, bars are not drawn against its limit


def screen(run: RunFiles, summary: Summary, width: int, height: int, glyphs: Glyphs, footer: str = "") -> list[Text]:
    """The lines, at most `height`, each at most `width` wide."""
    head = list(_head(run, summary, width, glyphs))
    foot = [Text(footer, "grey50")] if footer else []
    room = height - len(head) - len(foot)
    findings, more = list[Text](), len(summary.findings)
    for finding in summary.findings:
        said = _said(finding, width, glyphs)
        if len(findings) + len(said) > max(_LEAST_FINDINGS, room - 14):
            break
        findings, more = findings + said, more - 1
    room -= len(findings) + (1 if findings else 0)
    sections = [_times(summary), _memory(run, summary)]
    # Each section: its title, the bars, its keys.
    bars = max((room - 2 * len(sections)) // len(sections), 1)
    body = [line for section in sections for line in section.lines(width, bars, glyphs)]
    left = max(room - len(body), 0)
    lines = head + list(_loss(run, width, min(left, _MOST_CURVE), glyphs)) + body
    if findings:
        title = f"warnings (and {more} more)" if more else "warnings"
        lines += [rule(title, width, glyphs), *findings]
    lines = lines[: height - len(foot)] + foot
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _said(finding: Finding, width: int, glyphs: Glyphs) -> list[Text]:
    """Its lines: what is bad has as many as every screen has room for, anything else one."""
    most = _LEAST_FINDINGS if finding.level == "bad" else 1
    lines = textwrap.wrap(finding.text, max(width - 2, 8), max_lines=most, placeholder=" ...", break_on_hyphens=False)
    return [
        Text(f"{' ' if number else glyphs.dot} {line}", _LEVELS[finding.level]) for number, line in enumerate(lines)
    ]


def _head(run: RunFiles, summary: Summary, width: int, glyphs: Glyphs) -> Iterator[Text]:
    title = Text(f"{glyphs.dot} {run.state}", _STATES.get(run.state, "bold red"))
    facts = run.known
    words = [f"{facts.world_size} ranks" if (facts.world_size or 0) > 1 else "", facts.device, _tail(facts.recipe, 32)]
    known = ", ".join(filter(None, words))
    title.append(f"  {_tail(str(run.path), max(width - len(title) - len(known) - 4, width // 3))}", "bold")
    title.append(f"  {known}", "grey62")
    yield title
    yield _progress(summary, width, glyphs)
    numbers = Text()
    for name, value in (("loss", summary.loss), ("best", summary.best_loss), *_measures(run)):
        if value is not None:
            numbers.append(f"{name} ", "grey62")
            numbers.append(f"{number_text(value)}   ", "bold" if name == "loss" else "")
    yield numbers if numbers else Text("no step is done yet", "grey62")
    pace = Text()
    if summary.step_seconds is not None:
        pace.append(f"{seconds_text(summary.step_seconds)} a step   ")
    if summary.images_per_second is not None:
        pace.append(f"{number_text(summary.images_per_second)} images/s   ")
    if summary.lasted_seconds is not None:
        pace.append(f"{'so far' if run.state == 'running' else 'took'} {duration_text(summary.lasted_seconds)}")
    yield pace


def _tail(path: str, most: int) -> str:
    return path if len(path) <= most else f"...{path[3 - most :]}"


def _measures(run: RunFiles) -> Iterator[tuple[str, float | None]]:
    yield "grad norm", run.table.newest("grad_norm")
    for name in run.table.names:
        if name not in OF_STEP:
            yield name.replace("_", " "), run.table.newest(name)


def _progress(summary: Summary, width: int, glyphs: Glyphs) -> Text:
    steps = f"step {summary.step}" + (f"/{summary.steps}" if summary.steps else "") + "  "
    if not summary.steps:
        return Text(steps)
    left = f"  {summary.step / summary.steps:.0%}"
    if summary.seconds_left is not None:
        left += f", {duration_text(summary.seconds_left)} left"
    space = max(width - len(steps) - max(len(left), 24), 5)
    done = bar([("optimizer", summary.step)], summary.steps, space, glyphs._replace(has_colours=True))
    return Text(steps) + done + Text(left)


def _loss(run: RunFiles, width: int, height: int, glyphs: Glyphs) -> Iterator[Text]:
    """The smoothed loss, its logarithm where it can have one."""
    values = smoothed(run.table.column("loss"))
    known = [value for value in values if math.isfinite(value)]
    if height < 3 or len(known) < 2 or not glyphs.has_curves:
        return
    yield rule("loss", width, glyphs)
    logarithmic = min(known) > 0
    drawn = curve([math.log(v) if logarithmic and v == v else v for v in values], width - _LABEL, height - 1)
    for number, line in enumerate(drawn):
        label = max(known) if number == 0 else min(known) if number == len(drawn) - 1 else None
        yield Text(f"{number_text(label) if label is not None else '':>{_LABEL - 1}} ", "grey62") + Text(line, "blue")


class _Row(NamedTuple):
    """A rank's bar; `mark` is where a line goes through it."""

    rank: int
    parts: Sequence[tuple[str, float]]
    text: str
    mark: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A title, a bar for each rank, and what the colours mean. `rows` has first what matters most."""

    title: str
    rows: Sequence[_Row]
    kinds: Sequence[tuple[str, str]]
    full: float

    def lines(self, width: int, most: int, glyphs: Glyphs) -> list[Text]:
        """At most `most` bars, by their ranks; what they leave out is said in the title."""
        shown = sorted(self.rows[:most], key=lambda row: row.rank)
        more = f", {len(shown)} of {len(self.rows)} ranks" if len(self.rows) > len(shown) else ""
        lines = [rule(self.title + more, width, glyphs)]
        if not shown:
            return [*lines, Text("not measured", "grey62")]
        space = max(width - _LABEL - _VALUE, 8)
        for row in shown:
            drawn = bar(row.parts, self.full, space, glyphs, row.mark)
            lines.append(Text(f"{f'rank {row.rank}':<{_LABEL}}") + drawn + Text(f" {row.text}"))
        return [*lines, keys(self.kinds, width, glyphs)] if self.kinds else lines


def _times(summary: Summary) -> _Section:
    """A usual step of each rank; the one that works most matters most."""
    ranks = sorted((rank for rank in summary.ranks if rank.seconds), key=lambda rank: -rank.busy_seconds)
    slowest = summary.slowest[0] if summary.slowest is not None else None
    rows = []
    for rank in ranks:
        parts = [(kind, rank.seconds[kind]) for kind in in_order(rank.seconds, KINDS)]
        text = seconds_text(sum(rank.seconds.values())) + ("  slowest" if rank.rank == slowest else "")
        rows.append(_Row(rank.rank, parts, text))
    whole = sum(sum(rank.seconds.values()) for rank in ranks)
    kinds = []
    for kind in in_order([kind for rank in ranks for kind in rank.seconds], KINDS):
        share = sum(rank.seconds.get(kind, 0.0) for rank in ranks) / whole if whole else 0.0
        kinds.append((kind, f"{share:.0%}"))
    full = max((sum(rank.seconds.values()) for rank in ranks), default=0.0)
    return _Section(title="step time", rows=rows, kinds=kinds, full=full)


def _memory(run: RunFiles, summary: Summary) -> _Section:
    """Each rank's peak against the device's limit and the prediction; the fullest matters most."""
    prediction = run.prediction
    predicted = prediction.peak_bytes if prediction is not None else None
    ranks = sorted((r for r in summary.ranks if _held(r)), key=lambda rank: -_held(rank))
    limit, rows = summary.limit_bytes, []
    for rank in ranks:
        sizes = rank.bytes or {"other": _held(rank)}
        parts = [(kind, float(sizes[kind])) for kind in in_order(sizes, CATEGORIES)]
        text = size_text(_held(rank)) + (f" of {size_text(rank.limit_bytes)}" if rank.limit_bytes else "")
        text += f" {rank.gpu_percent:.0f}%" if rank.gpu_percent is not None else ""
        rows.append(_Row(rank.rank, parts, text, float(predicted) if predicted else None))
    kinds = []
    for kind in in_order([kind for rank in ranks for kind in rank.bytes], CATEGORIES):
        kinds.append((kind, size_text(statistics.median(rank.bytes.get(kind, 0) for rank in ranks))))
    title = "memory" + (f", predicted {size_text(predicted)}" if predicted else "")
    title += ", GPU use" if any(rank.gpu_percent is not None for rank in ranks) else ""
    full = float(max([predicted or 0, *map(_held, ranks)], default=0))
    if limit and limit <= _ROOMY * full:
        full = max(full, float(limit))
    elif limit:
        title += f"; bars up to {size_text(full)}"
    return _Section(title=title, rows=rows, kinds=kinds, full=full)


def _held(rank: RankNow) -> int:
    return rank.peak_bytes or rank.host_bytes or 0
