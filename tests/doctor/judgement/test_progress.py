"""How a job ended."""

import pytest

from fullframe.doctor.judgement.progress import judged_progress
from fullframe.doctor.probes.notes import End, Failure, Notes
from tests.doctor.judgement.made import codes, ranks, update


def failed(text: str, consequence: bool = False) -> Failure:
    return Failure(kind="RuntimeError", text=text, trace="File x", path="a.py", line=3, consequence=consequence)


def test_a_job_that_ends_well() -> None:
    assert codes(judged_progress(ranks([update()], [update()]))) == []


def test_the_cause_speaks_and_not_its_consequence() -> None:
    notes = ranks([failed("gloo/transport", consequence=True)], [failed("no such label")], ended=False)
    (found,) = judged_progress(notes)
    assert (found.code, found.path, found.line) == ("FF336", "a.py", 3)
    assert found.message == "RuntimeError on rank 1: no such label"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("element 0 of tensors does not require grad and does not have a grad_fn", "FF310"),
        ("Expected to have finished reduction in the prior iteration before", "FF311"),
        ("unscale_() has already been called on this optimizer", "FF321"),
        ("Expected more than 1 value per channel when training, got input size", "FF328"),
        ("Trying to backward through the graph a second time", "FF317"),
    ],
)
def test_what_torch_says_is_understood(text: str, code: str) -> None:
    assert codes(judged_progress(ranks([failed(text)], [failed(text)]))) == [code]


def test_ranks_that_wait() -> None:
    through = Notes(0, [update(), End(reason="through")])
    waits = Notes(1, [update(), update(2)])
    (found,) = judged_progress([through, waits], {1: '"a.py", line 7 in evaluate'})
    assert found.code == "FF334"
    assert found.message == "rank 1 waited without end while rank 0 is through (rank 0: 1 step, rank 1: 2 steps)"
    assert found.evidence == 'rank 1 at "a.py", line 7 in evaluate'
    assert codes(judged_progress([Notes(0, [update()]), waits])) == ["FF335"]


def test_a_rank_that_lost_one_that_was_through() -> None:
    lost = Notes(0, [update(), update(2), failed("gloo/transport: closed by peer", consequence=True)])
    (found,) = judged_progress([lost, Notes(1, [update(), End(reason="through")])])
    assert found.code == "FF334"
    assert found.message == "rank 0 lost rank 1, whose program is through (rank 0: 2 steps, rank 1: 1 step)"


def test_different_numbers_of_steps_and_none() -> None:
    assert codes(judged_progress(ranks([update()], [update(), update(2)]))) == ["FF334"]
    assert codes(judged_progress(ranks([], []))) == ["FF340"]
