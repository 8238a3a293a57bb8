"""Findings and answers as text, the worst first."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullframe.wording import plural

if TYPE_CHECKING:
    from fullframe.doctor.finding import Finding
    from fullframe.doctor.judgement.checklist import Answer

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_findings(console: Console, findings: "Sequence[Finding]") -> None:
    """Each with its evidence and its remedy."""
    for finding in findings:
        head = Text(f"{finding.code} {finding.severity}: ", style=_STYLES[finding.severity])
        console.print(head.append(Text(finding.title, style="bold")), soft_wrap=True)
        where = f"{finding.path}, line {finding.line}: " if finding.path else ""
        console.print(f"  {where}{finding.message}", soft_wrap=True)
        for line in finding.evidence.splitlines():
            console.print(f"  {line}", style="dim", soft_wrap=True)
        if finding.fix:
            console.print(f"  fix: {finding.fix}", soft_wrap=True)


def exit_code(findings: "Sequence[Finding]", as_json: bool) -> int:
    """1 where something was found, else 0; with `as_json` the findings are one JSON list on stdout."""
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    return 1 if findings else 0


def print_answers(console: Console, answers: "Sequence[Answer]") -> None:
    """One row a question."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for answer in answers:
        table.add_row("ok" if answer.fine else "!!", answer.question, answer.text)
    console.print(table)


def summary(findings: "Sequence[Finding]", checked: str) -> str:
    """One sentence: how many, of what severity."""
    if not findings:
        return f"nothing found in {checked}"
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in _STYLES}
    listed = ", ".join(plural(count, kind) for kind, count in counts.items() if count)
    return f"{listed} in {checked}"
