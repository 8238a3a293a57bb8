"""The order of a GradScaler's calls."""

import pytest

from fullframe.doctor.judgement.scaling import judged_scaling
from fullframe.doctor.probes.notes import Scaling
from tests.doctor.judgement.made import codes, ranks


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ("scale unscale clip step update scale unscale clip step update", []),
        ("scale step update scale step update", []),
        ("clip", []),  # without scaling
        ("scale scale unscale clip step update", []),  # two microbatches
        ("scale unscale clip bare update", ["FF319"]),
        ("scale clip step update", ["FF320"]),
        ("scale step scale step", ["FF321"]),
        ("scale step update step update", ["FF321"]),  # once for each optimizer
        ("scale step step update scale step step update", []),  # two optimizers, one update
    ],
)
def test_orders(actions: str, expected: list[str]) -> None:
    events = [Scaling(action=action, scale=8.0) for action in actions.split()]
    assert codes(judged_scaling(ranks(list(events)))) == expected


@pytest.mark.parametrize(
    ("scales", "optimizers", "expected"),
    [
        ((16, 8, 4, 2, 1), 1, ["FF322"]),
        ((16, 8, 4, 2, 1), 2, ["FF322"]),
        ((16, 8, 4, 2), 1, []),
        ((16, 8, 4, 4, 2, 1), 1, []),
        ((1, 1, 1, 1, 1, 1), 1, []),
    ],
)
def test_a_scale_that_falls(scales: tuple[float, ...], optimizers: int, expected: list[str]) -> None:
    actions = ("scale", *["step"] * optimizers, "update")
    events = [Scaling(action=action, scale=scale) for scale in scales for action in actions]
    assert codes(judged_scaling(ranks(list(events)))) == expected
