"""What the doctor says: findings are data, each of a kind with a stable code; printing is elsewhere.

Codes: FF1xx the source text (`doctor lint`), FF2xx the machine (`doctor env`), FF3xx a run (`doctor run`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Severity(StrEnum):
    """How much is at stake."""

    ERROR = "error"  # numbers are wrong, or ranks hang
    WARNING = "warning"  # memory or time is lost, or numbers may be wrong
    NOTE = "note"  # an old form that still works


class Finding(NamedTuple):
    """One thing that was found.

    `path`, `line` (from 1) and `column` (from 1) say where in a source text it lies; None where it lies in none.
    """

    code: str
    severity: Severity
    title: str  # of the kind, a few words
    message: str  # one sentence about this very place, with its names and values
    evidence: str = ""  # what was seen: the source line, a measured number
    fix: str = ""  # what to do
    path: str | None = None
    line: int | None = None
    column: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; fields that are not known are left out."""
        return {name: value for name, value in self._asdict().items() if value not in (None, "")}


@dataclass(frozen=True)
class Kind:
    """What findings of one code have in common; `docs/findings.md` lists all kinds."""

    code: str
    severity: Severity
    title: str  # a few words
    reason: str  # why it matters
    fix: str
    example: str = ""  # source text that has the fault; "" where it is not in source text
    instead: str = ""  # the same without the fault
    default: bool = True  # whether it is looked for unless asked otherwise

    def found(self, message: str, **where: Any) -> Finding:
        """A finding of this kind; `where` are Finding's other fields."""
        return Finding(self.code, self.severity, self.title, message, **{"fix": self.fix, **where})
