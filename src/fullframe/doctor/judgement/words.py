"""Sentences about names and numbers."""

from collections.abc import Collection, Iterable


def some(names: Iterable[str], most: int = 3) -> str:
    """'a, b, c and 4 more'."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def on_ranks(ranks: Collection[int]) -> str:
    """'on rank 1', 'on ranks 0, 2'."""
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def share(part: float) -> str:
    """'38 %'."""
    return f"{100 * part:.0f} %"
