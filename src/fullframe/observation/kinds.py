"""The categories of memory and the parts of a step's time: order and names, wherever shown."""

from collections.abc import Iterable, Sequence

CATEGORIES = (
    "parameter", "gradient", "optimizer", "average", "batch", "activation", "temporary", "workspace", "communication",
    "cached",
)  # fmt: skip
KINDS = ("data", "forward", "exchange", "backward", "all_reduce", "optimizer")  # of the seconds of a step


def in_order(kinds: Iterable[str], first: Sequence[str]) -> list[str]:
    """The kinds that are there, each once: those of `first` in its order, then the others."""
    found = dict.fromkeys(kinds)
    return [kind for kind in first if kind in found] + [kind for kind in found if kind not in first]


def name_of(kind: str) -> str:
    """A kind's name for people."""
    return kind.replace("_", "-" if kind == "all_reduce" else " ")
