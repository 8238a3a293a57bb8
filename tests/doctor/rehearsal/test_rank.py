"""What a rank is asked to do."""

from pathlib import Path

from fullframe.doctor.rehearsal.rank import Request, stack_file


def test_a_request_goes_through_json() -> None:
    words = {"arguments": ("--lr",), "values": ("a=1",)}
    request = Request(program="a.py", folder="/tmp/x", ranks=2, steps=3, batch_size=4, **words)
    assert Request.from_json(request.to_json()) == request


def test_each_rank_has_its_own_file_for_its_stack() -> None:
    assert stack_file(Path("x"), 0) != stack_file(Path("x"), 1)
