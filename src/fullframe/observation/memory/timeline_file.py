"""observed/rank<k>.jsonl: a line for an observed step; thinned, so that it stays short however long a run is."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fullframe.observation.json_files import parsed
from fullframe.processes.whole_files import replace_text

_LINES = 1200  # then every second one goes, but those with a trace


class TimelineFile:
    """Lines by `add`, of every step at first, later of every second, fourth, ...; a disk that is full is left alone."""

    def __init__(self, run_dir: Path, rank: int, done: int):
        """`done` steps are done: what a file of before says of later ones is forgotten."""
        self._path = run_dir / "observed" / f"rank{rank}.jsonl"
        self._lines, self._every = 0, 1
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [row for row in _rows(self._path) if row["step"] <= done] if done else []
            apart = math.gcd(*(row["step"] for row in kept if "bytes" not in row))
            self._every = apart & -apart or 1  # as before: else these would be taken for too many, time and again
            self._replace(kept)

    def wants(self, step: int) -> bool:
        """Whether a line of this step is kept, if nothing special is in it."""
        return step % self._every == 0

    def add(self, row: Mapping[str, Any]) -> None:
        """One more line."""
        with suppress(OSError):
            with open(self._path, "a") as file:
                file.write(json.dumps(row) + "\n")
            self._lines += 1
            if self._lines >= _LINES:
                self._thin()

    def _thin(self) -> None:
        self._every *= 2
        rows = _rows(self._path)
        kept = [row for row in rows if "bytes" in row or row["step"] % self._every == 0]
        if len(kept) > 3 * _LINES // 4:  # the traces of some hundred thousand steps
            kept = kept[1 - len(kept) % 2 :: 2]
        self._replace(kept)

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        replace_text(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        self._lines = len(rows)


def _rows(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError):
        return [row for row in map(parsed, path.read_text().splitlines()) if row and isinstance(row.get("step"), int)]
    return []
