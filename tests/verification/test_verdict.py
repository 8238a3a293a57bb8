"""The rules by which a difference is judged, and verdicts as JSON."""

import math

import pytest

from fullframe.verification.verdict import Difference, Found, Verdict, middle, named_differences


def test_two_ranks_findings_are_one() -> None:
    small, large, wrong = Found(0.1, 5.0), Found(0.2, 3.0, rank=1), Found(0.0, 9.0, problem="another shape", rank=2)
    assert small.joined(large) == large.joined(small) == Found(0.2, 5.0, rank=1)
    assert large.joined(wrong) == Found(0.0, 9.0, problem="another shape", rank=2)


@pytest.mark.parametrize(
    ("found", "peers", "relative"),
    [
        (Found(0.0, 0.0), 0.0, 0.0),
        (Found(1e-3, 2.0), 1.0, 5e-4),
        (Found(1e-16, 1e-15), 1.0, 1e-16),  # noise, measured against its peers
        (Found(1e-9, 1e-6), 1.0, 1e-6),  # small, measured against a thousandth of them
        (Found(1.0, 0.0), 0.0, math.inf),
        (Found(1.0, 50.0, floating=False), 1.0, math.inf),  # whole numbers differ or do not
        (Found(0.0, 1.0, problem="missing"), 1.0, math.inf),
    ],
)
def test_a_difference_over_its_scale(found: Found, peers: float, relative: float) -> None:
    assert found.relative(peers) == pytest.approx(relative, rel=1e-12)


def test_the_middle_scale_leaves_zeros_out() -> None:
    assert middle([0.0, 1.0, 3.0, 8.0]) == 3.0
    assert middle([0.0]) == 0.0


def test_named_differences_are_sorted_and_measured_against_module_and_middle() -> None:
    found = {
        "a.weight": Found(8e-3, 2.0),
        "a.bias": Found(1e-9, 1e-14),  # noise beside a.weight
        "a.count": Found(0.0, 7.0, floating=False),  # the scale of nothing else
        "b.weight": Found(5e-3, 1.0),
        "c.bias": Found(1e-9, 0.0),  # noise beside the middle one of all
    }
    shapes = {name: (1,) for name in (*found, "d.weight")}
    got = named_differences(found, shapes, {"d.weight": "no gradient"})
    assert [d.name for d in got] == ["b.weight", "a.weight", "c.bias", "a.bias", "a.count", "d.weight"]
    assert [d.relative for d in got] == pytest.approx([5e-3, 4e-3, 1e-9, 5e-10, 0, 0])
    assert got[-1].problem == "no gradient"


def verdict(**changed: object) -> Verdict:
    worst = Difference(name="a", shape=(2, 3), max_abs=math.inf, relative=math.inf, problem="NaN")
    facts: dict[str, object] = {
        "exact": False, "loss": None, "first_difference": None, "refused": None, "parameters": (worst,), "buffers": (),
        "values": 3, "gradients": 2, "mesh": {"width": 2}, "device": "cpu", "tolerance": 1e-9, "notes": ("so",),
    }  # fmt: skip
    return Verdict(**{**facts, **changed})  # type: ignore[arg-type]


def test_a_verdict_comes_back_from_json() -> None:
    assert Verdict.from_json(verdict().to_json()) == verdict()
    assert "null" in verdict().to_json() and "Infinity" not in verdict().to_json()


def test_exit_codes() -> None:
    assert verdict().exit_code == 1 and verdict(exact=True).exit_code == 0
