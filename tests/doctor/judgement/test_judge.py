"""All together: each kind once, the worst first, causes without their consequences."""

from fullframe.doctor.judgement.judge import judge, ordered
from fullframe.doctor.probes import kinds
from tests.doctor.judgement.made import ONE, OTHER, backward, codes, job, ranks, update, weights


def test_the_worst_comes_first_and_each_kind_once() -> None:
    unused, drifted, sought = kinds.UNUSED, kinds.DRIFTED, kinds.SOUGHT_IN_VAIN
    found = [unused.found("a"), drifted.found("b"), unused.found("c"), sought.found("d")]
    assert [(f.code, f.message) for f in ordered(found)] == [("FF303", "b"), ("FF311", "a"), ("FF338", "d")]


def test_what_follows_from_a_cause_is_left_out() -> None:
    assert codes(ordered([kinds.NOTHING_SEEN.found("a"), kinds.FAILED.found("b")])) == ["FF336"]
    assert codes(ordered([kinds.NOTHING_SEEN.found("a")])) == ["FF340"]


def test_several_faults_are_all_found() -> None:
    events = [
        [job(rank), weights(), backward(), update(gradient=gradient, missing=("spare",)), backward()]
        for rank, gradient in enumerate((ONE, OTHER))
    ]
    assert codes(judge(ranks(*events))) == ["FF301", "FF311"]
