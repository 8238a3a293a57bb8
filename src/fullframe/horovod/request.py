"""What a rank asks for, as the other ranks hear of it, and whether what they all ask for fits together. No messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fullframe.ranks.agreement import first_difference


class ReduceOp(IntEnum):
    """How values of several ranks become one; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One collective, of one tensor or of a group that is done together.

    `name` is "" where the user gave none. `splits`: rows for each rank, of an alltoall. `terms`: what else the ranks
    must have in common, in words, one a line.
    """

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    terms: str = ""


def mismatch(requests: Sequence[Request], joined: bool) -> str | None:
    """Why these requests of the ranks for the same collective cannot be met, or None. `joined`: some rank has none."""
    first = requests[0]
    kind, label = first.kind, first.name or "without a name"
    terms = [request.terms.splitlines() for request in requests]
    if any(one != terms[0] for one in terms):
        expected, _, found = first_difference(terms)
        text = f"one rank has {expected}, another rank has {found}"
        return f"{kind} '{label}' does not mean the same on all ranks: {text}; all ranks must ask for the same"
    for what, value in _COMPARED:
        different = next((r for r in requests if value(r) != value(first)), None)
        if different is not None:
            text = f"one rank has {value(first)}, another rank has {value(different)}"
            return f"mismatched {what} of {kind} '{label}': {text}; all ranks must ask for the same"
    if joined and kind in ("broadcast", "alltoall", "reducescatter"):
        return f"{kind} '{label}' is not supported once a rank has joined; call it before join()"
    if joined and kind == "allreduce" and first.op not in (ReduceOp.Sum, ReduceOp.Average, ReduceOp.Adasum):
        return f"allreduce '{label}' with {first.op.name}: zeros cannot stand in for a rank that has joined"
    return None


def _fixed_shapes(request: Request) -> object:
    """What of the shapes must be equal: all, but for the first dims of what is gathered or sent piece by piece."""
    if request.kind in ("allgather", "alltoall"):
        return tuple(shape[1:] for shape in request.shapes)
    return request.shapes


_COMPARED: tuple[tuple[str, Callable[[Request], object]], ...] = (
    ("operations", lambda r: r.kind),
    ("number of tensors", lambda r: len(r.shapes)),
    ("data types", lambda r: r.dtypes),
    ("number of dims", lambda r: tuple(map(len, r.shapes))),
    ("tensor shapes", _fixed_shapes),
    ("devices", lambda r: r.device),
    ("reduction operations", lambda r: r.op.name),
    ("prescale factors", lambda r: r.prescale),
    ("postscale factors", lambda r: r.postscale),
    ("root ranks", lambda r: r.root),
)
