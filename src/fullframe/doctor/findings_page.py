"""`python -m fullframe.doctor.findings_page`: writes `docs/findings.md` from the kinds of findings."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from fullframe.doctor.environment import kinds as environment
from fullframe.doctor.finding import Kind
from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.check import UNREADABLE
from fullframe.doctor.probes import kinds as run
from fullframe.wording import capital

# One row a check: its heading, what it looks at, and its kinds in order of their codes.
SECTIONS: tuple[tuple[str, str, tuple[Kind, ...]], ...] = (
    (
        "`fullframe doctor lint`: the source text",
        "Nothing is run. `# noqa: FF101` at the end of a line waives a finding there.",
        (UNREADABLE, *(rule.kind for rule in RULES.values())),
    ),
    ("`fullframe doctor env`: the machine", "Looks and measures; changes nothing.", environment.KINDS),
    ("`fullframe doctor run`: a run", "Seen in a few steps on real ranks: [doctor.md](how_to/doctor.md).", run.KINDS),
)

_HEAD = """# Findings

What `fullframe doctor` can find: code, why it matters, what to do. This page is written by
`python -m fullframe.doctor.findings_page` from the rules themselves; a test holds it to them.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for heading, about, kinds in SECTIONS:
        parts.append(f"## {heading}\n\n{about}\n\n{_table(kinds)}")
        parts += [_described(kind) for kind in kinds]
    return "\n".join(parts)


def _table(kinds: Iterable[Kind]) -> str:
    rows = ["| code | | severity | on by default |", "|---|---|---|---|"]
    for kind in kinds:
        on = "yes" if kind.default else "no"
        rows.append(f"| [{kind.code}](#{kind.code.lower()}) | {kind.title} | {kind.severity} | {on} |")
    return "\n".join(rows) + "\n"


def _described(kind: Kind) -> str:
    lines = [f"### {kind.code}", "", f"**{capital(kind.title)}.** {kind.reason} *{kind.fix}*", ""]
    if kind.example:
        lines += ["```python", kind.example, "```", ""]
    if kind.instead:
        lines += ["instead:", "", "```python", kind.instead, "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Write the page, by default to the repository's docs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/findings.md"), help="the file to write")
    parser.parse_args().out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
