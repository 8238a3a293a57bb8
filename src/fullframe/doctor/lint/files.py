"""Checks many files, and mends them, on all cores where that pays, and shows how far it is where that takes long."""

import os
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fullframe.doctor.finding import Finding
from fullframe.doctor.lint.autofix import mended
from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.check import UNREADABLE, check_source, is_about_torch
from fullframe.doctor.lint.rule import Rule

_MANY = 200  # files from which further processes are worth their start


def check_files(files: Sequence[Path], rules: Sequence[Rule]) -> list[Finding]:
    """All findings, in order of files and lines; what a file holds is never run."""
    check = partial(check_file, codes=tuple(rule.kind.code for rule in rules))
    found: list[Finding] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for findings in progress.track(_mapped(check, files), total=len(files), description="reading"):
            found += findings
    return found


def _mapped(check: Callable[[Path], list[Finding]], files: Sequence[Path]) -> Iterator[list[Finding]]:
    cores = len(os.sched_getaffinity(0))
    if len(files) < _MANY or cores == 1:
        yield from map(check, files)
        return
    with ProcessPoolExecutor(cores) as pool:
        yield from pool.map(check, files, chunksize=20)


def check_file(path: Path, codes: Sequence[str]) -> list[Finding]:
    """The findings of one file by the rules that have these codes."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        return [UNREADABLE.found(f"it cannot be read: {error}", path=str(path), line=1, column=1)]
    return check_source(source, str(path), [RULES[code] for code in codes])


def any_about_torch(files: Iterable[Path]) -> bool:
    """Whether one of the files is looked at at all."""
    return any(is_about_torch(path.read_text(encoding="utf-8-sig", errors="replace")) for path in files)


def mend_files(findings: Sequence[Finding]) -> dict[str, int]:
    """Writes files anew where a remedy is sure; how many findings were mended in which file."""
    done: dict[str, int] = {}
    for name in dict.fromkeys(f.path for f in findings if f.path is not None and f.code != UNREADABLE.code):
        path = Path(name)
        with tokenize.open(path) as file:
            encoding = file.encoding
        with path.open(encoding=encoding, newline="") as file:
            source = file.read()
        new, mended_here = mended(source, [f for f in findings if f.path == name])
        if mended_here:
            with path.open("w", encoding=encoding, newline="") as file:
                file.write(new)
            done[name] = len(mended_here)
    return done
