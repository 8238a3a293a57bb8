"""From findings to the module to look at, on findings made by hand; and what counts as a difference."""

import json
import math
from typing import Any

import pytest
import torch

from fullframe.errors import UnsupportedOp
from fullframe.verification.diagnosis import Evidence, Named, PartEvidence, judged, refused
from fullframe.verification.module_tensors import compared
from fullframe.verification.verdict import FirstDifference, Found, Place, Value, Verdict

# The model calls a, then b with what a returned, then adds something of its own, then calls c.
#
#     value  0 -> [a] -> 1 -> [b] -> 2 -> (code) -> 3 -> [c] -> 4
MODEL = ("", "Net")
PLACES = [
    (Place("input", "", 0, 0, "Net", None, ""), 0),
    (Place("input", "a", 0, 0, "Conv2d", *MODEL), 0),
    (Place("output", "a", 0, 0, "Conv2d", *MODEL), 1),
    (Place("input", "b", 0, 0, "ReLU", *MODEL), 1),
    (Place("output", "b", 0, 0, "ReLU", *MODEL), 2),
    (Place("input", "c", 0, 0, "Conv2d", *MODEL), 3),
    (Place("output", "c", 0, 0, "Conv2d", *MODEL), 4),
    (Place("output", "", 0, 0, "Net", None, ""), 4),
]
GRADIENT_ORDER = {4: 0, 3: 1, 2: 2, 1: 3}
GOOD, OFF = Found(1e-15, 1.0), Found(1e-3, 1.0, True, "", (1, 2), 1)
SHAPES = {"a.weight": (3,), "c.weight": (3,), "b.mean": (2,)}
CLASSES = {"": "Net", "a": "Conv2d", "b": "ReLU", "c": "Conv2d"}


def verdict(
    forward: set[int] = frozenset(),
    backward: set[int] = frozenset(),
    parameter: Found = GOOD,
    buffer: Found = GOOD,
    losses: tuple[float, float] = (2.0, 2.0),
    dtype: str = "torch.float64",
    unexpected: tuple[Place, ...] = (),
    missing: dict[str, str] | None = None,
    absent: set[int] = frozenset(),
    off: Found = OFF,
    narrow: dict[str, str] | None = None,
) -> Verdict:
    """The verdict when the values `forward`, and the gradients at the values `backward`, are off, others `absent`."""
    values = [Value(shape=(1, 4), dtype=dtype, gradient_order=GRADIENT_ORDER.get(n)) for n in range(5)]
    part = PartEvidence(
        places=PLACES,
        values=values,
        forward={p[:4]: off if number in forward else GOOD for p, number in PLACES if number not in absent},
        backward={number: off if number in backward else GOOD for number in sorted({*GRADIENT_ORDER, *backward})},
        unexpected=unexpected,
    )
    dtypes = dict.fromkeys(SHAPES, "torch.float64")
    evidence = Evidence(
        parts=[part],
        losses=losses,
        parameters=Named(
            found={"a.weight": GOOD, "c.weight": parameter}, missing=missing or {}, shapes=SHAPES, dtypes=dtypes
        ),
        buffers=Named(found={"b.mean": buffer}, missing={}, shapes=SHAPES, dtypes=dtypes),
        classes=CLASSES,
        narrow=narrow or {},
    )
    return judged(evidence, {"data": 1, "height": 1, "width": 2}, "cpu", 1e-9, [])


def test_nothing_beyond_the_tolerance_is_exact() -> None:
    found = verdict()
    assert (found.exact, found.exit_code, found.first_difference) == (True, 0, None)
    assert (found.values, found.gradients) == (8, 4)


FIRST: list[tuple[dict[str, Any], str, str | None, str]] = [
    # what is off, phase, module to look at, words of the sentence
    ({"forward": {0, 1, 2, 3, 4}}, "forward", None, "what the recipe's loss passes to the model differs already"),
    ({"forward": {1, 2, 3, 4}}, "forward", "a", "'a' (Conv2d) is the first module whose output differs"),
    ({"forward": {2, 3, 4}}, "forward", "b", "(shape (1, 4), (1, 2) on rank 1; off by 0.001, 0.001 of the largest"),
    ({"forward": {3, 4}}, "forward", "", "code in the forward of the model itself (Net) differs first"),
    ({"forward": {4}, "backward": {1}, "losses": (2, 3)}, "forward", "c", "'c' (Conv2d) is the first module"),
    ({"losses": (2.0, 2.1)}, "loss", None, "the recipe's loss differs, though everything"),
    ({"losses": (2.0, math.nan)}, "loss", None, "off by inf"),
    ({"losses": (-2.0, -2.1)}, "loss", None, "off by 0.1, 0.05 of the largest"),
    ({"losses": (0.0, 1e-3)}, "loss", None, "off by 0.001"),
    ({"absent": {2, 3, 4}}, "forward", "b", "the split step never gets there"),
    ({"backward": {0}}, "backward", "a", "gradient at the input of 'a' (Conv2d) is the first that differs"),
    ({"backward": {0, 1}}, "backward", "b", "output of 'a' (Conv2d) is the first that differs"),
    ({"parameter": Found(math.inf, 0.0, problem="no gradient")}, "parameter", "c", "(no gradient)"),
    ({"backward": {1, 2, 3, 4}}, "backward", None, "look at the backward of the recipe's loss"),
    ({"backward": {1, 2, 3}}, "backward", "c", "gradient at the input of 'c' (Conv2d) is the first that differs"),
    ({"backward": {1, 2}}, "backward", "", "code in the forward of the model itself (Net) behind it"),
    ({"backward": {1}}, "backward", "b", "output of 'a' (Conv2d) is the first that differs: look at the backward of"),
    ({"parameter": OFF}, "parameter", "c", "the gradient of parameter 'weight' of 'c' (Conv2d) differs, though"),
    ({"buffer": OFF, "backward": {1}}, "buffer", "b", "the buffer 'mean' of 'b' (ReLU) differs, though"),
    ({"unexpected": (PLACES[4][0]._replace(call=1),)}, "forward", "b", "call 1 of the module is only made when split"),
]


@pytest.mark.parametrize(("off", "phase", "module", "words"), FIRST)
def test_the_first_difference(off: dict[str, Any], phase: str, module: str | None, words: str) -> None:
    found = verdict(**off)
    first = found.first_difference
    assert not found.exact and found.exit_code == 1 and first is not None
    assert (first.phase, first.module, first.class_name) == (phase, module, CLASSES.get(module, ""))  # type: ignore[arg-type]
    assert words in first.message, first.message
    assert ("--noise 0.01" in first.message) == (phase in ("backward", "parameter") and "no gradient" not in words)


# Which module's work is behind the gradient at value 0, which the places have
BEHIND: list[tuple[list[tuple[str, str]], str, str]] = [
    # kind and path of the places, the module, words
    ([("input", ""), ("input", "a"), ("input", "a.b")], "a.b", "the backward of 'a.b' (Conv2d) ("),
    ([("input", "c"), ("input", "c1")], "c", "the backward of 'c' (Conv2d) or 'c1' (Conv2d) ("),
    ([("input", "same"), ("output", "same"), ("input", "c")], "c", "gradient at the output of 'same' (Conv2d)"),
    ([("input", "")], "", "the backward of the model itself (Conv2d) ("),
]


@pytest.mark.parametrize(("places", "module", "words"), BEHIND)
def test_the_first_difference_in_the_backward_of_any_replica(
    places: list[tuple[str, str]], module: str, words: str
) -> None:
    """The first replica's own comes later, and other places have its numbers."""
    at = [(Place(kind, path, 0, 0, "Conv2d", None, ""), 0) for kind, path in places]
    values = [Value(shape=(1, 4), dtype="torch.float64", gradient_order=n) for n in range(2)]
    later = [(Place("input", "z", 0, 0, "Conv2d", None, ""), n) for n in (1, 0)]
    parts = [
        PartEvidence(places=p, values=values, forward={each[:4]: GOOD for each, _ in p}, backward=b, unexpected=[])
        for p, b in ((later, {0: GOOD, 1: OFF}), (at, {0: OFF}))
    ]
    first = _of_parts(parts)
    assert first.module == module and words in first.message, first


def test_the_first_difference_in_the_forward_of_any_replica() -> None:
    values = [Value(shape=(1, 4), dtype="torch.float64") for _ in range(5)]
    parts = [
        PartEvidence(
            places=PLACES,
            values=values,
            forward={place[:4]: OFF if number >= first else GOOD for place, number in PLACES},
            backward={},
            unexpected=[],
        )
        for first in (4, 1)
    ]
    first = _of_parts(parts)
    assert (first.phase, first.module) == ("forward", "a"), first


def _of_parts(parts: list[PartEvidence]) -> FirstDifference:
    """The first difference where all but the parts agrees."""
    none = Named(found={}, missing={}, shapes={}, dtypes={})
    evidence = Evidence(parts=parts, losses=(1.0, 1.0), parameters=none, buffers=none, classes={})
    first = judged(evidence, {}, "cpu", 1e-9, []).first_difference
    assert first is not None
    return first


def test_low_precision_is_named_as_a_likely_reason() -> None:
    inside = {"narrow": {"b": "torch.float32"}}
    first = verdict(forward={2}, dtype="torch.float32", **inside).first_difference
    assert first is not None and "it is computed in float32, whose rounding may be all of it" in first.message
    assert "some of it" not in first.message
    first = verdict(forward={2}, **inside).first_difference
    assert first is not None and "some of it is computed in less than double precision ('b'" in first.message
    for dtype in ("torch.float32", "torch.float64"):
        first = verdict(forward={2}, off=Found(0.1, 1.0, True, "", (1, 4), 1), dtype=dtype, **inside).first_difference
        assert first is not None and "rounding" not in first.message and "on rank" not in first.message, "too far off"


def test_parameters_without_a_gradient_are_named() -> None:
    found = verdict(missing={"b.mean": "no gradient"})
    assert found.exact
    assert found.notes[0].startswith("1 parameters get no gradient from this batch (b.mean)")


@pytest.mark.parametrize("found", [verdict(), verdict(forward={1}, losses=(2.0, math.inf))])
def test_json_there_and_back(found: Verdict) -> None:
    fields = json.loads(found.to_json())
    assert set(fields) >= {"exact", "loss", "first_difference", "parameters", "buffers", "mesh", "tolerance"}
    assert Verdict.from_json(found.to_json()) == found


def test_a_refusal_there_and_back() -> None:
    error = UnsupportedOp("torch.fft.fft2", ("x",), "mix (Spectral)", "no rule", "Gather first.")
    found = refused(error, {"data": 1}, "cpu", 1e-9, ["a note"])
    assert found.exit_code == 2 and Verdict.from_json(found.to_json()) == found


def test_noise_where_theory_says_zero_is_measured_against_the_peers() -> None:
    noise = Found(2e-16, 3e-16)
    assert verdict(parameter=noise).exact, "a zero gradient beside ordinary ones"
    assert not verdict(parameter=Found(1e-8, 3e-16)).exact, "a difference far beyond noise"
    assert not verdict(parameter=Found(1e-11, 1e-6)).exact, "a small gradient that is off by 1e-5 of itself"
    assert noise.relative(1.0) == 2e-16 and noise.relative(0.0) == pytest.approx(2 / 3)


def test_compared() -> None:
    inf, nan = math.inf, math.nan
    one = torch.tensor([1.0, -4.0, inf, nan, -1e38], dtype=torch.float64)
    assert compared(one, one.clone())[:3] == (0.0, 4.0, True), "infinities and NaN agree and are no scale"
    assert compared(one, one + torch.tensor([0.5, 0, 0, 0, 0]))[:2] == (0.5, 4.0)
    assert compared(one, torch.tensor([1.0, -4.0, inf, 0.0, -1e38], dtype=torch.float64)).max_abs == inf
    assert compared(one, torch.tensor([1.0, -4.0, -inf, nan, -1e38], dtype=torch.float64)).max_abs == inf
    assert compared(torch.zeros(2, 0), torch.zeros(2, 0)).max_abs == 0
    assert compared(torch.tensor([3, 7]), torch.tensor([3, 8])).relative(1.0) == inf
    assert compared(torch.tensor([True]), torch.tensor([True])).relative(1.0) == 0
    assert compared(torch.tensor([1 + 2j]), torch.tensor([1 + 5j])).max_abs == 3
    assert "instead of (2,) torch.float32" in compared(torch.zeros(2), torch.zeros(2).double()).problem
    large = torch.zeros(700, 900)
    large[-1, -1] = 2.0
    assert compared(large, torch.zeros(900, 700).t())[:2] == (2.0, 2.0), "in chunks, of any strides"
