"""What one sees first: is the run well, in a sentence, a few numbers and what needs a look."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from fullframe.observation.report.sections import Shown, table
from fullframe.observation.summary import Summary, compared
from fullframe.observation.units import duration_text, number_text, seconds_text, share_text, size_text
from fullframe.wording import plural

_SIGNS = {"bad": "✕", "warn": "!", "info": "i"}
_WORDS = {
    "running": "Running",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "died": "Died",
    "unknown": "State not known",
}
_TONES = {"good": ", all well", "warn": ", needs a look", "bad": ", something is wrong"}
Say = Callable[[float], str]
Row = tuple[str, list[float | None], bool, Say]  # label, a value for each run, whether less is better, for people


def first_glance(shown: Sequence[Shown]) -> str:
    """Whether the run is well, in words and numbers; of several runs a table, a column for each."""
    return _several(shown) if len(shown) > 1 else _verdict(shown[0]) + _tiles(shown[0]) + _findings(shown)


def _verdict(one: Shown) -> str:
    level = one.summary.level
    level = "info" if one.run.state == "unknown" and level == "good" else level
    return (
        f'<header class="verdict {level}"><span class="badge">{_WORDS[one.run.state]}{_TONES.get(level, "")}</span>'
        f"<h1>{escape(one.name)}</h1>"
        f'<p class="lead">{escape(" ".join(_lead(one)))}</p><small>{escape(" · ".join(_facts(one)))}</small></header>'
    )


def _lead(one: Shown) -> Iterator[str]:
    run, summary = one.run, one.summary
    done = f"{summary.step:,} of " if summary.steps and summary.steps != summary.step else ""
    lasted = f" in {duration_text(summary.lasted_seconds)}" if summary.lasted_seconds else ""
    yield f"{done}{plural(summary.steps or summary.step, 'step')}{lasted}."
    if summary.first_loss is not None and summary.loss is not None and summary.step > 1:
        went = "fell" if summary.loss < summary.first_loss else "went"
        yield f"The loss {went} from {number_text(summary.first_loss)} to {number_text(summary.loss)}."
    if run.state == "running" and summary.seconds_left is not None:
        yield f"About {duration_text(summary.seconds_left)} left."
    serious = [finding for finding in summary.findings if finding.level != "info"]
    if not serious:
        yield "Nothing needs a look."


def _facts(one: Shown) -> Iterator[str]:
    facts = one.run.facts
    if facts is None:
        yield str(one.run.path)
        return
    if facts.recipe:
        yield facts.recipe
    if facts.world_size:
        yield plural(facts.world_size, "rank")
    if facts.device:
        yield facts.device.removeprefix("the ")
    if facts.commit:
        yield f"commit {facts.commit[:10]}{'+' * facts.commit.endswith('+')}"
    if facts.started is not None:
        yield facts.started.strftime("%d %b %Y %H:%M")


def _tiles(one: Shown) -> str:
    summary, tiles = one.summary, []
    if summary.loss is not None:
        best = f"best {number_text(summary.best_loss)}" if summary.best_loss is not None else ""
        tiles.append(("last loss", number_text(summary.loss), best, ""))
    if summary.step_seconds is not None:
        tiles.append(("a step", seconds_text(summary.step_seconds), "median of the last", ""))
    if summary.images_per_second is not None:
        tiles.append(("speed", f"{number_text(summary.images_per_second)}/s", "images a second", ""))
    tiles += _memory_tile(summary)
    for each in compared(one.run, summary):
        title, below = f"{each.name.removeprefix('peak ')} over prediction", f"{each.text(each.predicted)} predicted"
        tiles.append((title, share_text(each.share), below, "good" if each.holds else "warn"))
    tiles.append(_trouble_tile(one))
    drawn = []
    for label, number, below, tone in tiles:
        meter = below if below.startswith("<") else f"<span>{escape(below)}</span>"
        drawn.append(f'<div class="card tile {tone}"><span>{escape(label)}</span><b>{escape(number)}</b>{meter}</div>')
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _memory_tile(summary: Summary) -> list[tuple[str, str, str, str]]:
    if summary.peak is None:
        return []
    held = summary.peak[1].peak_bytes or 0
    limit = summary.limit_bytes
    if not limit:
        return [("peak memory", size_text(held), "the fullest rank", "")]
    share = held / limit
    tone = "bad" if share > 0.98 else "warn" if share > 0.95 else "good"
    meter = f"<span>{share:.0%} of {size_text(limit)}</span>"
    meter += f'<span class="meter"><i style="width:{100 * share:.1f}%"></i></span>'
    return [("peak memory", size_text(held), meter, tone)]


def _trouble_tile(one: Shown) -> tuple[str, str, str, str]:
    leaks, skipped = len(one.run.leaks), one.summary.skipped
    restarts = one.run.known.restarts
    counts = [(leaks, "leak"), (skipped, "skipped step"), (restarts, "restart")]
    there = [plural(count, name) for count, name in counts if count]
    total = leaks + skipped + restarts
    tone = "bad" if leaks else "warn" if total else "good"
    return "trouble", str(total) if total else "none", ", ".join(there) or "no leak, skipped step or restart", tone


def _findings(shown: Sequence[Shown]) -> str:
    items = []
    for one in shown:
        of = f"<b>{escape(one.name)}</b>: " if len(shown) > 1 else ""
        for finding in one.summary.findings:
            remedy = f"<small>{escape(finding.remedy)}</small>" if finding.remedy else ""
            sign = f'data-sign="{_SIGNS[finding.level]}"'
            items.append(f'<li class="{finding.level}" {sign}>{of}{escape(finding.text)}{remedy}</li>')
    return f'<ul class="findings">{"".join(items)}</ul>' if items else ""


def _several(shown: Sequence[Shown]) -> str:
    """Side by side: a column for each run."""
    rows = []
    for label, values, is_less_better, say in _rows(shown):
        known = [value for value in values if value is not None]
        best = (min if is_less_better else max)(known, default=None) if len(set(known)) > 1 else None
        rows.append([escape(label), *(_cell(value, values[0], best, say) for value in values)])
    states = [f'<span class="badge {one.summary.level}">{_WORDS[one.run.state]}</span>' for one in shown]
    head = ["", *(f'<i style="color:{one.colour}">●</i> {escape(one.name)}' for one in shown)]
    body = table(head, [["state", *states], *rows])
    names = " · ".join(one.name for one in shown)
    return (
        f'<header class="verdict info"><span class="badge">{len(shown)} runs side by side</span>'
        f'<h1>{escape(names)}</h1></header><div class="card scroll">{body}</div>{_findings(shown)}'
    )


def _cell(value: float | None, first: float | None, best: float | None, say: Say) -> str:
    """A number, how it compares with the first run's, and whether it is the best."""
    if value is None:
        return '<span class="muted">not measured</span>'
    share = value / first - 1 if first and value != first else 0.0
    text = escape(say(value)) + (f"<small>{escape(share_text(share))}</small>" if share else "")
    return f'<span class="best">{text}</span>' if value == best else text


def _rows(shown: Sequence[Shown]) -> Iterator[Row]:
    summaries = [one.summary for one in shown]
    yield "steps", [float(s.step) for s in summaries], False, lambda value: f"{value:,.0f}"
    yield "last loss", [s.loss for s in summaries], True, number_text
    yield "best loss", [s.best_loss for s in summaries], True, number_text
    yield "a step", [s.step_seconds for s in summaries], True, seconds_text
    yield "images a second", [s.images_per_second for s in summaries], False, number_text
    peaks = [float(s.peak[1].peak_bytes or 0) if s.peak is not None else None for s in summaries]
    yield "peak memory, fullest rank", peaks, True, size_text
    yield "lasted", [s.lasted_seconds for s in summaries], True, duration_text
    yield "skipped steps", [float(s.skipped) for s in summaries], True, lambda value: f"{value:.0f}"
    yield "leaks", [float(len(one.run.leaks)) for one in shown], True, lambda value: f"{value:.0f}"
