"""Heads of messages: what they say, and where the program is."""

import torch

from fullframe.ranks.tags import HEAD_BYTES, Rows, head_of, line, line_of, padded, text_of


def test_a_head_names_exchange_rows_dtype_shape_line_and_errors() -> None:
    like = torch.zeros(2, 3, dtype=torch.bfloat16)
    head = head_of("rows", "train.py:3", like, errors=2, rows=Rows(4, 6, 9))
    assert len(head) == HEAD_BYTES
    assert text_of(head) == "rows 4:6 of 9, bfloat16 (2, 3), at train.py:3, after 2 errors"
    assert text_of(head_of("sum", "train.py:3", like, errors=1)).endswith("train.py:3, after 1 error")
    assert text_of(head_of("sum", "train.py:3", like)) == "sum, bfloat16 (2, 3), at train.py:3"


def test_heads_are_equal_where_all_they_say_is() -> None:
    heads = [
        head_of(kind, at, torch.zeros(shape), errors, rows)
        for kind in ("rows", "sum")
        for at in ("a.py:1", "a.py:2")
        for shape in ((2,), (3,))
        for errors in (0, 1)
        for rows in (None, Rows(0, 1, 4), Rows(0, 1, 5))
    ]
    assert len(set(heads)) == len(heads)
    assert head_of("rows", "a.py:1", torch.zeros(2)) == head_of("rows", "a.py:1", torch.ones(2))


def test_a_text_that_is_too_long_loses_its_middle_to_a_checksum() -> None:
    long, other = "a" * 40 + "b" * 40, "a" * 39 + "c" + "b" * 40
    assert len(padded(long, 64)) == 64
    assert text_of(padded(long, 64)).startswith("aaaa") and text_of(padded(long, 64)).endswith("bbbb")
    assert padded(long, 64) != padded(other, 64)  # which differ in the middle alone
    assert text_of(padded("short", 64)) == "short"


def test_the_line_is_the_user_s_own_wherever_torch_calls_from() -> None:
    here = line()
    assert here.startswith("ranks/test_tags.py:")
    seen = []
    module = torch.nn.Linear(1, 1)
    module.register_forward_hook(lambda *args: seen.append(line()))
    module(torch.ones(1))
    assert seen[0].startswith("ranks/test_tags.py:") and seen[0] != here


def test_the_line_of_an_error_is_the_users_own_that_led_to_it() -> None:
    try:
        torch.zeros(2) + torch.zeros(3)
    except RuntimeError as error:
        assert line_of(error.__traceback__).startswith("ranks/test_tags.py:")
    assert line_of(None) == "?"
