"""Docstrings as the site shows them: lists of `name: what it is` become lists, and `raises` stays a sentence.

In the source a field stands in a line of its own, `name:   what it is`, and goes on below, indented or aligned.
"""

import re
from typing import Any

import griffe

FIELD = re.compile(r"^([A-Za-z_][\w, `*.]*?): +(\S.*)$")


def as_markdown(text: str) -> str:
    """`text` with its fields as a Markdown list."""
    lines: list[str] = []
    within = False  # a field
    for line in text.splitlines():
        field = FIELD.match(line)
        if field and all(part.strip(" `*").isidentifier() for part in field[1].split(",")):
            if not within and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{part.strip(' `')}`" for part in field[1].split(","))
            lines.append(f"- {names}: {field[2]}")
            within = True
        elif within and line[:1] == " ":
            lines.append(f"  {line.strip()}")
        else:
            if within and line:
                lines.append("")
            within = within and not line
            lines.append(line)
    return "\n".join(lines)


class Fields(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
