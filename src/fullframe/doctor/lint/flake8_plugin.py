"""The rules as a plugin of flake8: `flake8 --select FF` beside its own checks; flake8 reads `# noqa` itself."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fullframe import __version__
from fullframe.doctor.lint.check import check_source
from fullframe.doctor.lint.configuration import configured


class Flake8Plugin:
    """Made by flake8 once for each file; the settings are those of the file's project."""

    name = "fullframe"
    version = __version__

    def __init__(self, tree: object, filename: str, lines: Sequence[str]):
        self._filename, self._source = filename, "".join(lines)

    def run(self) -> Iterator[tuple[int, int, str, type]]:
        """Line from 1, column from 0, text that begins with the code."""
        rules = configured([Path(self._filename)]).rules()
        for found in check_source(self._source, self._filename, rules):
            text = f"{found.code} {found.title}: {found.message}"
            yield found.line or 1, (found.column or 1) - 1, text, type(self)
