"""What the ranks learn to expect, on one rank: the numbers do not change, and a wrong guess is taken back."""

import torch
from torch.distributed import HashStore

from fullframe.horovod.collectives import Collectives
from fullframe.horovod.forecast import Forecast
from fullframe.horovod.request import ReduceOp, Request
from fullframe.horovod.submission import Submission
from fullframe.horovod.table import Due, Key

A = Request("allreduce", "a", ((3,),), ("float32",), op=ReduceOp.Average, postscale=2.0)
B = Request("allreduce", "b", ((2,),), ("float64",))
LARGE = Request("allreduce", "l", ((1 << 20,),), ("float32",))


def forecast(*requests: Request) -> Forecast:
    made = Forecast(Collectives(HashStore(), 0, 1, 10.0, 10.0))
    for request in requests:
        made.learn([Due(Key("allreduce", request.name, 0), (request,))])
    return made


def test_what_came_twice_is_expected() -> None:
    assert forecast(A, A).expected is None
    assert forecast(A, A, A).expected == A
    assert forecast(A, B, A, B, A).expected == B
    assert forecast(A, B, A, A).expected is None
    assert forecast(LARGE, LARGE, LARGE, LARGE).expected is None


def test_two_at_once_are_not_expected() -> None:
    made = forecast(A, A, A)
    made.learn([Due(Key("allreduce", "a", 0), (A,)), Due(Key("allreduce", "b", 0), (B,))])
    assert made.expected is None


def test_the_expected_is_done_and_the_next_one_expected() -> None:
    made = forecast(A, B, A, B, A)
    given = Submission(B, 0, [torch.tensor([1.0, 2.0], dtype=torch.float64)])
    assert made.attempt(given) and given.done
    torch.testing.assert_close(given.outcome()[0], given.inputs[0])
    assert made.expected == A
    target = torch.zeros(3)
    again = Submission(A, 0, [torch.tensor([1.0, 2.0, 3.0])], [target])
    assert made.attempt(again)
    assert target.tolist() == [2.0, 4.0, 6.0]


def test_a_wrong_guess_is_not_made_again() -> None:
    made = forecast(A, A, A)
    assert not made.attempt(None)
    assert made.expected is None
