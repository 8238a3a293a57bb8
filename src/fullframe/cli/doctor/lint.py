"""`fullframe doctor lint`: mistakes in training code, found without running it."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fullframe.errors import LintError

if TYPE_CHECKING:
    from fullframe.doctor.finding import Finding
    from fullframe.doctor.lint.configuration import Configuration


@dataclass(frozen=True, kw_only=True)
class Lint:
    """Find mistakes in training code that waste memory or time or break gradients; nothing is run.

    docs/findings.md lists the rules. `# noqa: FF101` at the end of a line waives one there. Settings of a project
    stand in pyproject.toml under [tool.fullframe.lint]: select, extend-select, ignore, exclude, each a list of
    strings.

    Exit code: 0 nothing found, 1 something found, 2 wrong use.
    """

    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="[PATH ...]")] = (Path("."),)
    """Files, and folders whose *.py files are read."""
    select: Annotated[tuple[str, ...], arg(metavar="CODE ...")] = ()
    """Run these rules only; a code may be shortened (FF10), ALL is every rule."""
    ignore: Annotated[tuple[str, ...], arg(metavar="CODE ...")] = ()
    """Do not run these."""
    exclude: Annotated[tuple[str, ...], arg(metavar="PATTERN ...")] = ()
    """Leave out paths that match, beside those of pyproject.toml."""
    fix: bool = False
    """Mend what has one sure remedy, in the files themselves, and print what is left; needs the extra "autofix"."""
    format: Literal["text", "json", "sarif"] = "text"
    """How findings are printed."""
    json: bool = False
    """Print one JSON list of {code, path, line, column, message, fix}; the same as --format json."""

    def run(self) -> int:
        """Read, check, print."""
        from fullframe.doctor.lint.configuration import configured

        if self.json and self.format == "sarif":
            raise LintError("--json and --format sarif are both given; leave one out")
        configuration = self._combined(configured(self.paths))
        findings, files = self._found(configuration)
        if self.fix and self._mend(findings):
            findings, files = self._found(configuration)
        self._print(findings, files)
        return 1 if findings else 0

    def _combined(self, configuration: "Configuration") -> "Configuration":
        return replace(
            configuration,
            select=_split(self.select) or configuration.select,
            extend_select=() if self.select else configuration.extend_select,
            ignore=(*configuration.ignore, *_split(self.ignore)),
            exclude=(*configuration.exclude, *self.exclude),
        )

    def _found(self, configuration: "Configuration") -> "tuple[list[Finding], list[Path]]":
        from fullframe.doctor.lint.files import check_files

        files = list(configuration.files(self.paths))
        return check_files(files, configuration.rules()), files

    def _mend(self, findings: "list[Finding]") -> bool:
        from fullframe.doctor.lint.files import mend_files

        done = mend_files(findings)
        for path, count in sorted(done.items()):
            print(f"{path}: {count} mended", file=sys.stderr)
        return bool(done)

    def _print(self, findings: "list[Finding]", files: "list[Path]") -> None:
        from fullframe import __version__
        from fullframe.doctor.lint.catalog import RULES
        from fullframe.doctor.lint.check import UNREADABLE
        from fullframe.doctor.lint.files import any_about_torch
        from fullframe.doctor.lint.report import as_json, as_sarif, as_text

        chosen = "json" if self.json else self.format
        if chosen == "json":
            print(as_json(findings))
        elif chosen == "sarif":
            print(as_sarif(findings, [UNREADABLE, *(rule.kind for rule in RULES.values())], __version__))
        else:
            unread = not findings and files and not any_about_torch(files)
            print(as_text(findings, len(files)) + "; none imports torch, so none was looked at" * bool(unread))


def _split(codes: tuple[str, ...]) -> tuple[str, ...]:
    """Codes with a comma between them are as good as apart."""
    return tuple(code for entry in codes for code in entry.split(",") if code)
