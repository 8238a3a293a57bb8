"""Which rules run and which files are read: the command's options, else `[tool.fullframe.lint]` of pyproject.toml."""

import fnmatch
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.rule import Rule
from fullframe.errors import LintError

_NEVER_SOURCE = {".git", ".hg", ".venv", "venv", "__pycache__", ".tox", ".nox", ".mypy_cache", ".ruff_cache",
                 "node_modules", "build", "dist"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Codes may be shortened (`FF1`); `ALL` stands for every rule."""

    select: tuple[str, ...] = ()  # in place of the rules that are on by default
    extend_select: tuple[str, ...] = ()  # beside them
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # patterns of paths, as in a shell

    def rules(self) -> list[Rule]:
        """The rules that run; raises LintError where a code begins none."""
        for code in (*self.select, *self.extend_select, *self.ignore):
            if not code or not any(_starts(known, [code]) for known in RULES):
                raise LintError(f"no rule's code begins with {code!r}; docs/findings.md lists them, FF101 is the first")
        first = self.select or [code for code, rule in RULES.items() if rule.kind.default]
        chosen = [*first, *self.extend_select]
        return [rule for code, rule in RULES.items() if _starts(code, chosen) and not _starts(code, self.ignore)]

    def files(self, paths: Sequence[Path]) -> Iterator[Path]:
        """The Python files at and below `paths`, each once; a file that is named is read whatever it is called."""
        found: dict[Path, Path] = {}
        for path in self._at(paths):
            found.setdefault(path.resolve(), path)
        yield from found.values()

    def _at(self, paths: Iterable[Path]) -> Iterator[Path]:
        for path in paths:
            if path.is_file():
                if not self._is_left_out(path):
                    yield path
            elif path.is_dir():
                yield from self._below(path)
            else:
                raise LintError(f"there is no file or folder {path}; check the path")

    def _below(self, folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if self._is_left_out(path):
                continue
            if path.is_dir():
                if path.name not in _NEVER_SOURCE and not path.is_symlink():
                    yield from self._below(path)
            elif path.suffix == ".py" and path.is_file():
                yield path

    def _is_left_out(self, path: Path) -> bool:
        return any(
            fnmatch.fnmatch(text, pattern)
            for pattern in self.exclude
            for text in (path.as_posix(), path.name, path.resolve().as_posix())
        )


def _starts(code: str, prefixes: Iterable[str]) -> bool:
    return any(prefix == "ALL" or code.startswith(prefix) for prefix in prefixes)


def configured(paths: Sequence[Path]) -> Configuration:
    """What the nearest pyproject.toml at or above the first path says; raises LintError where that cannot be read."""
    start = (paths[0] if paths else Path()).resolve()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _read(file)
    return Configuration()


def _read(file: Path) -> Configuration:
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LintError(f"{file} cannot be read: {error}") from error
    table: Any = given.get("tool", {}).get("fullframe", {}).get("lint", {})
    return from_table(table, str(file))


def from_table(table: Mapping[str, Any], where: str) -> Configuration:
    """The table's own words checked; raises LintError."""
    known = {field.name.replace("_", "-") for field in fields(Configuration)}
    if not isinstance(table, Mapping):
        raise LintError(f"[tool.fullframe.lint] in {where} must be a table")
    for name, value in table.items():
        if name not in known:
            there = ", ".join(sorted(known))
            raise LintError(f"[tool.fullframe.lint] in {where} has no setting {name!r}; there are {there}")
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise LintError(f"{name} in [tool.fullframe.lint] of {where} must be a list of strings, got {value!r}")
    return Configuration(**{name.replace("-", "_"): tuple(value) for name, value in table.items()})
