"""Whether a rank's model learns."""

from dataclasses import replace
from typing import Any

import pytest

from fullframe.doctor.judgement.learning import judged_learning
from fullframe.doctor.probes.notes import Oddity, Repeated, Scaling, Sketch, Untrained
from tests.doctor.judgement.made import ONE, backward, codes, job, ranks, update, weights

ZERO, BROKEN = Sketch(0, 0.0, (0.0,)), Sketch(5, float("nan"), (float("nan"),))


def judged(*events: Any) -> list[str]:
    return codes(judged_learning(ranks([job(), *events])))


def steps(count: int = 4, **fields: Any) -> list[Any]:
    return [event for n in range(1, count + 1) for event in (backward(nodes=9), update(n, alive=9, **fields))]


def test_a_sound_run() -> None:
    assert judged(weights(), *steps()) == []


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([backward(attached=False)], "FF310"),
        ([replace(update(n, missing=("w",)), gradients={}) for n in (1, 2)], "FF310"),  # and not FF311 too
        (steps(missing=("spare",)), "FF311"),
        ([weights(frozen_in_optimizer=("conv",)), *steps()], "FF312"),
        ([Untrained(names=("head",)), *steps()], "FF313"),
        (steps(gradient=ZERO), "FF314"),
        (steps(unchanged=("w",)), "FF315"),
        (steps(stale=("w",)), "FF316"),
        ([backward(nodes=3 * n) for n in range(1, 5)], "FF317"),
        ([update(n, alive=3 * n) for n in range(1, 6)], "FF318"),
        (steps(gradient=BROKEN), "FF323"),
        ([replace(backward(), loss=float("nan"))], "FF323"),
        ([Oddity(kind="nothing updated", text="step 1 has loss nan")], "FF323"),
        ([Repeated(first={"loss": 1.0}, second={"loss": 1.5}, contents=(1, 1))], "FF325"),
        ([Repeated(first={"loss": 1.0}, second={"loss": 1.5}, contents=(1, 2))], "FF326"),
        ([Oddity(kind="few values in a batch norm", text="4", where="tail")], "FF328"),
        ([Oddity(kind="pixels as bytes", text="whole numbers from 0 to 255, 97 on average", where="stem")], "FF342"),
        ([Oddity(kind="statistics of a frozen part", text="2 batch norms", where="a, b")], "FF341"),
        ([Oddity(kind="statistics of evaluation", text="Net", where="norm")], "FF329"),
        ([backward(modules=("norm",))], "FF330"),
        ([backward(), *(backward(evaluating=("Net",)) for n in (2, 3))], "FF331"),
        ([Oddity(kind="evaluation keeps a graph", text="Net")], "FF332"),
    ],
)
def test_each_fault_is_named(events: list[Any], code: str) -> None:
    assert judged(*events) == [code]


@pytest.mark.parametrize(
    "events",
    [
        [*steps(1, missing=("spare",)), *steps(3)],  # used in other steps
        [*steps(1, gradient=ZERO), *steps(3)],  # as behind a layer scale of zero
        steps(1, gradient=ZERO),
        [update(1, gradient=ZERO), replace(update(2, missing=("w",)), gradients={"v": ONE})],
        [replace(backward(scaled=True), loss=float("inf"))],  # the scaler finds its scale
        [*steps(1, unchanged=("w",)), *steps(3)],  # the first step of a warm-up
        [backward(nodes=9 + n % 2) for n in range(1, 6)],
        [update(n, alive=9 + n % 2) for n in range(1, 6)],
        [Repeated(first={"loss": float("nan")}, second={"loss": float("nan")}, contents=(1, 1))],
    ],
)
def test_what_is_no_fault(events: list[Any]) -> None:
    assert judged(*events) == []


EMPTY = Sketch(0, 0.0, ())  # of a rank that holds no row


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((ONE, EMPTY), []),
        ((ONE, ZERO), []),  # dead channels, which nobody sees of a weight that lies whole
        ((ZERO, EMPTY), ["w"]),
        ((ZERO, ZERO), ["w"]),
        ((EMPTY, EMPTY), []),  # of a parameter without elements
    ],
)
def test_parts_of_a_sharded_parameter(parts: tuple[Sketch, Sketch], said: list[str]) -> None:
    """A parameter's gradient is of zeros where that of every rank's part is."""
    of_ranks = [
        [job(), *(replace(update(n), gradients={"v": ONE, f"w[0:{rank}]": part}) for n in (1, 2))]
        for rank, part in enumerate(parts)
    ]
    found = list(judged_learning(ranks(*of_ranks)))
    assert [finding.message.rpartition(": ")[2] for finding in found] == said


def test_a_part_is_called_by_its_parameter() -> None:
    (found,) = judged_learning(ranks([job(), *steps(missing=("spare[0:1]",))]))
    assert found.message.endswith("had no gradient in 4 steps: spare")


def test_a_bias_whose_updates_are_below_its_rounding_is_no_fault() -> None:
    many = {"w": ONE, "b": ONE, "c": ONE}
    still = [replace(update(n), gradients=many, parameters=many, unchanged=("b",)) for n in (1, 2)]
    assert judged(*still) == []
    assert judged(*(replace(one, unchanged=("b", "c")) for one in still)) == ["FF315"]


def test_messages_of_every_microbatch() -> None:
    ddp, passes = job(frameworks=("DistributedDataParallel",)), [backward(), backward()]
    twice = [*passes, update(1), *passes, update(2)]
    once = [event for n in (1, 2) for event in (backward(synchronizes=False), backward(), update(n))]
    scaled = [*passes, Scaling(action="step"), update(1), *passes, Scaling(action="step"), update(2)]
    two_optimizers = [*passes, update(1), replace(update(1), optimizer=1), *passes, update(2)]
    anew = backward(adds=False)
    two_models = [event for n in (1, 2) for event in (*passes, anew, update(n))]
    for sent_often in (twice, scaled, two_optimizers, two_models):
        assert codes(judged_learning(ranks([ddp, *sent_often]))) == ["FF333"]
    trials = [event for n in (1, 2) for event in (anew, anew, anew, update(n))]
    for sent_once in (once, [*twice, backward(), update(3)], trials):
        assert codes(judged_learning(ranks([ddp, *sent_once]))) == []
    assert codes(judged_learning(ranks([replace(ddp, ranks=1), *twice]))) == []


def test_unused_parameters_that_are_sought() -> None:
    asked = job(unused_are_sought=True)
    assert codes(judged_learning(ranks([asked, *steps(missing=("spare",))]))) == []
    assert codes(judged_learning(ranks([asked, *steps()]))) == ["FF338"]
