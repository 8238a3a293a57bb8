"""The shares that a clock takes."""

import dataclasses

from fullframe.simulation.clock.efficiency import MEASURED, Efficiency


def test_what_was_measured_is_taken_as_it_is() -> None:
    shares = {
        field.name for field in dataclasses.fields(Efficiency) if not field.name.endswith(("seconds", "launches"))
    }
    assumed, measured = dataclasses.asdict(Efficiency()), dataclasses.asdict(MEASURED)
    assert all(0 < assumed[name] < 1 for name in shares)
    assert {name for name in shares if measured[name] != 1} == {
        "attention",
        "depthwise",
    }  # which calibrate does not ask
    assert measured["kernel_seconds"] == 0 < assumed["kernel_seconds"]
