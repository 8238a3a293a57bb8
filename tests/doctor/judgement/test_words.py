"""Sentences about ranks and shares."""

from fullframe.doctor.judgement.words import on_ranks, share


def test_words() -> None:
    assert on_ranks([2, 0]) == "on ranks 0, 2" and on_ranks([1]) == "on rank 1"
    assert share(0.385) == "38 %"
