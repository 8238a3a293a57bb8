"""The ranks' common table, without ranks: each rank's copy is fed with all ranks' messages."""

from fullframe.horovod.request import ReduceOp, Request
from fullframe.horovod.table import Key, Table

A = Request("allreduce", "a", ((3,),), ("float32",))
B = Request("allreduce", "b", ((4,),), ("float32",))
GATHERED = Request("allgather", "a", ((3,),), ("float32",))


def say(table: Table, *rounds: tuple[list[Request], ...], joins: tuple[bool, ...] = ()) -> list[str]:
    """The names of what is due after each round, in order; `joins`: by rank, in the first round."""
    found = []
    for number, requests in enumerate(rounds):
        flags = joins if joins and number == 0 else (False,) * len(requests)
        messages = [table.encode([(r, 0) for r in part], flag) for part, flag in zip(requests, flags, strict=True)]
        due, _ = table.add(messages)
        found.append(" ".join(item.key.name + "!" * bool(item.error) for item in due))
    return found


def test_what_all_ask_for_is_due_in_whatever_order_they_ask() -> None:
    #          rank 0   rank 1
    assert say(Table(2), ([A], [B]), ([], [A]), ([B], [])) == ["", "a", "b"]
    assert say(Table(2), ([A, B], [B, A])) == ["a b"]


def test_what_was_asked_for_before_is_said_in_short() -> None:
    table = Table(2)
    assert table.short(A, 0) is None
    assert say(table, ([A], [A])) == ["a"]
    short = table.short(A, 0)
    assert short == table.encode([(A, 0)], False) and table.short(B, 0) is None
    due, _ = table.add([short, short])
    assert [item.request for item in due] == [A]


def test_the_table_says_who_is_missing() -> None:
    table = Table(3)
    assert say(table, ([A], [], [A])) == [""]
    assert table.missing(Key("allreduce", "a", 0)) == [1]
    assert table.missing(Key("allreduce", "b", 0)) is None
    assert table.is_waiting and not table.is_empty


def test_a_rank_that_has_joined_need_not_ask() -> None:
    table = Table(2)
    assert say(table, ([], []), joins=(False, True)) == [""]
    assert not table.is_empty and not table.is_waiting
    due, last = table.add([table.encode([(A, 0)], False), b""])
    assert due[0].requests == (A, None) and last is None
    assert table.add([table.encode([], True), b""]) == ([], 0)
    assert table.is_empty


def test_what_does_not_fit_is_an_error_of_all() -> None:
    other = Request("allreduce", "a", ((4,),), ("float32",))
    assert say(Table(2), ([A], [other])) == ["a!"]
    maximum = Request("allreduce", "a", ((3,),), ("float32",), op=ReduceOp.Max)
    assert say(Table(2), ([A], [maximum])) == ["a!"]


def test_one_name_for_two_operations_is_an_error_only_when_no_rank_has_both() -> None:
    assert say(Table(2), ([A], [GATHERED])) == ["a! a!"]
    assert say(Table(2), ([A, GATHERED], [GATHERED]), ([], [A])) == ["a", "a"]


def test_what_was_asked_for_before_is_said_shortly() -> None:
    table = Table(2)
    long = len(table.encode([(A, 0)], False))
    say(table, ([A], [A]))
    assert len(table.encode([(A, 0)], False)) < long / 3
    assert say(table, ([A], [B]), ([B], [A])) == ["", "a b"]
    assert table.encode([], False) == b""
