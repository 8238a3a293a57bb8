"""From a source text to its findings."""

import ast
import gc
import re
import sys
from collections.abc import Iterable

from fullframe.doctor.finding import Finding, Kind, Severity
from fullframe.doctor.lint.interpret import interpret
from fullframe.doctor.lint.rule import Rule
from fullframe.doctor.lint.training import Training
from fullframe.doctor.lint.wanted import has_words, wanted

UNREADABLE = Kind(
    code="FF100",
    title="file cannot be parsed",
    severity=Severity.ERROR,
    reason="Nothing was checked in this file.",
    fix="Mend the syntax error, or leave the file out with --exclude.",
    example="import torch\n\nfor x in loader\n    loss(model(x)).backward()",
    instead="import torch\n\nfor x in loader:\n    loss(model(x)).backward()",
)

_PACKAGES = r"torch|apex|accelerate|lightning|lightning_fabric|pytorch_lightning|transformers|deepspeed|fullframe"
_TORCH = re.compile(rf"^\s*(?:from|import)\s+(?:{_PACKAGES})\b", re.MULTILINE)
_NOQA = re.compile(r"#\s*noqa(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)


def is_about_torch(source: str) -> bool:
    """Whether a file imports torch, or a library that trains by it; others are not looked at."""
    return bool(_TORCH.search(source))


def check_source(source: str, path: str, rules: Iterable[Rule]) -> list[Finding]:
    """All findings in `source`, in order of lines, without those that a `# noqa` comment waives."""
    # A file's values point at each other until it is done: to look for garbage meanwhile takes half of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _checked(source, path, rules)
    finally:
        if was_on:
            gc.enable()


def _checked(source: str, path: str, rules: Iterable[Rule]) -> list[Finding]:
    if not is_about_torch(source) or not has_words(source):
        return []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return [_unreadable(error, path)]
    ids = wanted(source, tree)
    training = Training(interpret(source, tree, lambda node: id(node) in ids))
    lines = training.program.lines
    found: dict[tuple[str, int, int], Finding] = {}
    for each in rules:
        for node, message in each.check(training):
            line, before = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
            column = len(lines[line - 1].encode()[:before].decode(errors="ignore")) + 1  # ast counts bytes
            last = getattr(node, "end_lineno", None) or line
            if not _is_waived(each.kind.code, lines[line - 1 : last]):
                evidence = lines[line - 1].strip()
                finding = each.kind.found(message, evidence=evidence, path=path, line=line, column=column)
                found.setdefault((each.kind.code, line, column), finding)
    return sorted(found.values(), key=lambda f: (f.line or 0, f.column or 0, f.code))


def _is_waived(code: str, lines: Iterable[str]) -> bool:
    for line in lines:
        for comment in _NOQA.finditer(line):
            codes = comment["codes"]
            if codes is None or any(code.startswith(c) for c in re.split(r"[,\s]+", codes.upper())):
                return True
    return False


def _unreadable(error: Exception, path: str) -> Finding:
    if isinstance(error, SyntaxError):
        running = ".".join(map(str, sys.version_info[:2]))
        message, line, column = f"Python {running} says: {error.msg}", error.lineno or 1, error.offset or 1
    else:
        message, line, column = str(error) or "nested too deeply", 1, 1
    return UNREADABLE.found(message, path=path, line=line, column=max(column, 1))
