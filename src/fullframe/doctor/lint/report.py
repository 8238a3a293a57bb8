"""Findings of lint as text, as JSON and as SARIF 2.1.0."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fullframe.doctor.finding import Finding, Kind
from fullframe.wording import plural

_JSON_FIELDS = ("code", "path", "line", "column", "message", "fix")


def as_text(findings: Sequence[Finding], files: int) -> str:
    """A line for each finding, its source line and its remedy; a count at the end."""
    lines = []
    for f in findings:
        lines.append(f"{f.path}:{f.line}:{f.column}: {f.code} {f.title}: {f.message}")
        if f.evidence:
            lines.append(f"    {f.evidence}")
        lines.append(f"    fix: {f.fix}")
    return "\n".join([*lines, _summary(findings, files)])


def _summary(findings: Sequence[Finding], files: int) -> str:
    read = plural(files, "file")
    if not findings:
        return f"nothing found in {read}"
    codes = ", ".join(f"{code} {count}" for code, count in sorted(Counter(f.code for f in findings).items()))
    return f"{plural(len(findings), 'finding')} in {read}: {codes}"


def as_json(findings: Iterable[Finding]) -> str:
    """A list of `{code, path, line, column, message, fix}`."""
    return json.dumps([{name: getattr(f, name) for name in _JSON_FIELDS} for f in findings], indent=2)


def as_sarif(findings: Iterable[Finding], kinds: Iterable[Kind], version: str) -> str:
    """A log of SARIF 2.1.0 with one run, as code scanning services read it."""
    listed = list(kinds)
    positions = {kind.code: position for position, kind in enumerate(listed)}
    driver = {"name": "fullframe", "version": version, "rules": [_sarif_rule(kind) for kind in listed]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(finding, positions) for finding in findings],
    }
    log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2)


def _sarif_rule(kind: Kind) -> dict[str, Any]:
    return {
        "id": kind.code,
        "shortDescription": {"text": kind.title},
        "fullDescription": {"text": kind.reason},
        "help": {"text": kind.fix},
        "defaultConfiguration": {"level": kind.severity, "enabled": kind.default},
    }


def _sarif_result(finding: Finding, positions: dict[str, int]) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    place = {"artifactLocation": {"uri": finding.path}, "region": region}
    return {
        "ruleId": finding.code,
        "ruleIndex": positions[finding.code],
        "level": finding.severity,  # SARIF has the same words
        "message": {"text": f"{finding.title}: {finding.message}. {finding.fix}"},
        "locations": [{"physicalLocation": place}],
    }
