"""Sentences about ranks."""

from collections.abc import Collection


def on_ranks(ranks: Collection[int]) -> str:
    """'on rank 1', 'on ranks 0, 2'."""
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
