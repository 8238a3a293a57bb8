"""What a prediction says of itself."""

import dataclasses

import pytest

from fullframe.simulation.prediction import Moment, Prediction, said_of_layout


def predicted(step_seconds: float, launch_seconds: float, host_seconds: float) -> Prediction:
    return Prediction(
        peak_bytes=1,
        reserved_bytes=1,
        bytes={},
        step_seconds=step_seconds,
        seconds={"launch": launch_seconds},
        moment=Moment(step=1, phase="backward", module=""),
        largest=(),
        modules={},
        terms={},
        parameters=1,
        host_seconds=host_seconds,
    )


@pytest.mark.parametrize(("step", "launch", "host", "bound"), [(3.0, 1.0, 2.5, True), (3.0, 0.0, 2.5, False)])
def test_bound_by_the_host_when_the_device_waits_for_it(step: float, launch: float, host: float, bound: bool) -> None:
    assert predicted(step, launch, host).bound_by_host is bound


def test_a_step_that_turns_many_maps_says_so() -> None:
    few, many = predicted(10.0, 0.0, 1.0), predicted(10.0, 0.0, 1.0)
    few = dataclasses.replace(few, seconds={"layout": 0.4})
    many = dataclasses.replace(many, seconds={"layout": 2.5})
    assert said_of_layout(few) == "" and said_of_layout(many).startswith("25% of the step brings the channels")
