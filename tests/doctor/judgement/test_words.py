"""Sentences about ranks."""

from fullframe.doctor.judgement.words import on_ranks


def test_words() -> None:
    assert on_ranks([2, 0]) == "on ranks 0, 2" and on_ranks([1]) == "on rank 1"
