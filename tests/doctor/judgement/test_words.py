"""Sentences about names and numbers."""

from fullframe.doctor.judgement.words import on_ranks, share, some


def test_words() -> None:
    assert some("abcde") == "a, b, c and 2 more" and some("ab") == "a, b"
    assert on_ranks([2, 0]) == "on ranks 0, 2" and on_ranks([1]) == "on rank 1"
    assert share(0.385) == "38 %"
