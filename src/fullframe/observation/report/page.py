"""The page as a whole: the sections, the style and the script, all in one string."""

import os
import socket
import time
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from fullframe import __version__
from fullframe.observation.out_of_memory.words import happened
from fullframe.observation.report.details import details, messages
from fullframe.observation.report.glance import first_glance
from fullframe.observation.report.out_of_memory import account_of, out_of_memory
from fullframe.observation.report.pictures import pictures
from fullframe.observation.report.sections import Shown, memory, predictions, times, training
from fullframe.observation.report.traces import traces
from fullframe.observation.run_files import RunFiles
from fullframe.observation.summary import summarize
from fullframe.processes.whole_files import replace_text
from fullframe.wording import capital

_COLOURS = [f"var(--c{number})" for number in range(8)]
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(runs: Sequence[RunFiles], out: Path) -> Path:
    """Write the page of one run, or of several side by side, to `out`."""
    return write_page(page(runs), out)


def write_page(html: str, out: Path) -> Path:
    """Put a page that is whole in the place of `out`."""
    replace_text(out, html, writer=f".{socket.gethostname()}.{os.getpid()}")  # several machines may write it at once
    return out


def page(runs: Sequence[RunFiles]) -> str:
    """The HTML."""
    now = time.time()
    shown = [
        Shown(name=name, run=run, summary=summarize(run, now), colour=_COLOURS[number % len(_COLOURS)])
        for number, (name, run) in enumerate(zip(names_of(runs), runs, strict=True))
    ]
    title = " and ".join(one.name for one in shown)
    body = [first_glance(shown), out_of_memory(shown), training(shown), memory(shown), times(shown)]
    body += [predictions(shown), traces(shown), pictures(shown), details(shown), messages(shown)]
    return _html(title, body, now)


def write_out_of_memory(run: RunFiles, out: Path) -> Path:
    """Write the page of a step that ran out of memory to `out`; there must have been one."""
    found, name = run.out_of_memory, names_of([run])[0]
    assert found is not None
    level, lead = "warn" if run.goes_on else "bad", happened(found)
    head = (
        f'<header class="verdict {level}"><span class="badge">Out of memory</span><h1>{escape(name)}</h1>'
        f'<p class="lead">{escape(capital(lead))}.</p><small>{escape(found.devices)}</small></header>'
    )
    cards = f'<div class="grid">{account_of(found, run.goes_on)}</div>'
    return write_page(_html(f"Out of memory: {name}", [head, cards], time.time()), out)


def _html(title: str, body: Sequence[str], now: float) -> str:
    written = datetime.fromtimestamp(now).astimezone().strftime("%d %b %Y %H:%M %Z")
    folder = files("fullframe.observation.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} - fullframe</title><style>{style}</style></head><body><main>"
        f'<button class="theme" hidden>light / dark</button>{"".join(body)}'
        f"<footer>Written {escape(written)} by fullframe {__version__}.</footer></main>"
        f"<script>{script}</script></body></html>\n"
    )


def names_of(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: its folder's, with as many folders before it as make them differ."""
    paths = [run.path.resolve() for run in runs]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]
