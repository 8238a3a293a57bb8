"""What the run was: its strategy, versions, command and surroundings, and what it said."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from fullframe.observation.report.sections import Shown, section, table
from fullframe.observation.run_files import RunFiles
from fullframe.strategy import Strategy
from fullframe.wording import plural

_DEFAULT = Strategy()


def details(shown: Sequence[Shown]) -> str:
    """Strategy and facts, a column for each run; where runs differ, the row is marked."""
    cards = []
    for title, read in (("Strategy", _strategy), ("Run", _facts)):
        columns = [dict(read(one.run)) for one in shown]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [[escape(name), *(column.get(name, "") for column in columns)] for name in names]
        classes = ["apart" if len(set(row[1:])) > 1 else "" for row in rows]
        head = ["", *(escape(one.name) for one in shown)] if len(shown) > 1 else []
        body = table(head, rows, classes) if rows else '<p class="muted">Its file is not there.</p>'
        wide = " wide" if len(shown) > 1 else ""
        cards.append(f'<div class="card scroll{wide}"><h3>{title}</h3>{body}</div>')
    return section("Strategy and versions", f'<div class="grid">{"".join(cards)}</div>')


def messages(shown: Sequence[Shown]) -> str:
    """The end of log.txt."""
    parts = []
    for one in shown:
        if one.run.log:
            of = f" of {escape(one.name)}" if len(shown) > 1 else ""
            count = plural(len(one.run.log), "line")
            text = escape("\n".join(one.run.log))
            parts.append(f'<details class="card"><summary>log.txt{of}: {count}</summary><pre>{text}</pre></details>')
    return section("What it said", "".join(parts)) if parts else ""


def _strategy(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Fields, and their values as HTML: what is no default stands out."""
    for name, value in (run.strategy or {}).items():
        word = escape(_word(value))
        is_usual = isinstance(value, list) or value == getattr(_DEFAULT, name, None)
        yield name, word if is_usual else f"<b>{word}</b>"


def _word(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    yield "directory", escape(str(run.path))
    facts = run.facts
    if facts is None:
        return
    known: Mapping[str, object] = {
        "command": "fullframe " + " ".join(facts.arguments) if facts.arguments else "",
        "recipe": facts.recipe,
        "commit": facts.commit,
        "batch size": facts.batch_size,
        "device": facts.device,
        "ranks": facts.world_size,
        "restarts": facts.restarts,
        "host": facts.host,
        "started": facts.started.strftime("%d %b %Y %H:%M:%S %Z") if facts.started is not None else "",
        "ended": facts.ended.strftime("%d %b %Y %H:%M:%S %Z") if facts.ended is not None else "",
        "reason": facts.reason,
        **facts.versions,
        **facts.environment,
    }
    for name, value in known.items():
        if value not in ("", None):
            yield name, escape(str(value))
