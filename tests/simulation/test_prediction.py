"""What a prediction says of itself."""

import pytest

from fullframe.simulation.prediction import Moment, Prediction


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
