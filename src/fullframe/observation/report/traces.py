"""The files that `--trace-step` wrote, with how to look into them."""

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from fullframe.observation.report.sections import Shown, section, table
from fullframe.observation.units import size_text

_OPENED_BY = {
    ".perfetto.json": "ui.perfetto.dev: bytes by category, and the phases",
    ".pickle": "pytorch.org/memory_viz: each block with its module and shape",
    ".jsonl": "a line for each allocation and release",
}


def traces(shown: Sequence[Shown]) -> str:
    """A table of them; "" where there are none. Links hold as long as the page lies in the run's directory."""
    rows = []
    for one in shown:
        for path in one.run.traces:
            opened = next((how for suffix, how in _OPENED_BY.items() if path.name.endswith(suffix)), None)
            if opened is None:
                continue
            name = f"trace/{path.name}"
            cell = f'<a href="{quote(name)}">{escape(name)}</a>' if len(shown) == 1 else escape(f"{one.name}/{name}")
            try:
                size = size_text(path.stat().st_size)
            except OSError:
                continue
            rows.append([cell, size, escape(opened)])
    if not rows:
        return ""
    body = table(["file", "size", "open it in, or what it is"], rows)
    return section("One step in full", f'<div class="card scroll">{body}</div>')
