"""Pooling: ceil mode, dilation, counts of padding, ties, infinities, integers, maps too small for the ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fullframe as ff
from fullframe.geometry.window import Window
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.tensor import wrap
from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.corners import (
    BF16,
    F16,
    F64,
    ODD,
    Corners,
    autocast,
    corners_as_in_torch,
    deep,
    flat,
    last,
    merged,
    noise,
    spoiled,
)
from tests.spatial.windows import geometries, require_exact, windowed, windows

CASES: dict[str, Case] = {
    "max_pool 3/2/1": one(lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max_pool 2/2": one(lambda x: F.max_pool2d(x, 2)),
    "max_pool 3/1/1 dilation 2, ceil": one(lambda x: F.max_pool2d(x, 3, 2, 1, 2, True)),
    "max_pool 3/3/0 ceil, nothing borrowed, below zero": one(lambda x: F.max_pool2d(x - 9, 3, 3, 0, 1, True)),
    "max_pool 3d": Case(lambda x: F.max_pool3d(x, 3, 2, 1), ((1, 2, 6),)),
    "max_pool of relu, many ties": one(lambda x: F.max_pool2d(x.relu(), 3, 2, 1)),
    "avg_pool 2/2": one(lambda x: F.avg_pool2d(x, 2)),
    "avg_pool 3/2/1": one(lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "avg_pool 3/2/1 without pad": one(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "avg_pool 3/2/1 ceil": one(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "avg_pool divisor": one(lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=5)),
    "avg_pool 3d": Case(lambda x: F.avg_pool3d(x, 3, 2, 1), ((1, 2, 6),)),
    "lp_pool": one(lambda x: F.lp_pool2d(x.abs(), 3, 2, 1)),
}  # fmt: skip
CORNERS = Corners()


def pooling() -> None:
    numbers = (noise(*ODD) * 50 - 100).to(torch.int32)
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    plane = {"kernel_size": (1, 3, 3), "stride": 2, "padding": (0, 1, 1)}
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
        CORNERS.add(f"max of {dtype}", partial(F.max_pool2d, **window), [numbers.to(dtype)])
        CORNERS.add(f"max 3d of {dtype}", deep(partial(F.max_pool3d, **plane)), [numbers.to(dtype)])
    for value in (math.inf, -math.inf, math.nan):
        for name, op in {
            "max": partial(F.max_pool2d, **window),
            "max 1d": flat(partial(F.max_pool1d, **window)),
            "max 3d": deep(partial(F.max_pool3d, **plane)),
            "average": partial(F.avg_pool2d, **window),
            "average 1d": flat(partial(F.avg_pool1d, **window, count_include_pad=False)),
            "uncounted": partial(F.avg_pool2d, **window, count_include_pad=False, ceil_mode=True),
            "over 3": partial(F.avg_pool2d, **window, divisor_override=3),
            "lp": partial(F.lp_pool2d, norm_type=2, kernel_size=3, stride=2),
        }.items():
            CORNERS.add(f"{name} {value}", op, [spoiled(*ODD, value=value)])
    low = torch.full(ODD, -math.inf, dtype=F64)
    low[..., 9:, 9:] = 1
    for dilation in (1, 2):
        CORNERS.add(f"max of -inf {dilation}", partial(F.max_pool2d, **window, dilation=dilation), [low])
        op = deep(partial(F.max_pool3d, kernel_size=3, stride=2, padding=1, dilation=dilation))
        CORNERS.add(f"max 3d of -inf {dilation}", op, [noise(1, 4, 13, 11).clamp(max=0) * math.inf])
    CORNERS.add("ties", partial(F.max_pool2d, kernel_size=3, stride=1, padding=1), [noise(*ODD).round()])
    CORNERS.add("ties apart", partial(F.max_pool2d, kernel_size=2), [noise(*ODD).round()])
    for name, options in {"uncounted": {"count_include_pad": False}, "over 4": {"divisor_override": 4}}.items():
        CORNERS.add(f"integers {name}", partial(F.avg_pool2d, **window, **options), [numbers.long()])
    for dtype in (BF16, F16):
        x = noise(*ODD, dtype=dtype, scale=300)
        uncounted = partial(F.avg_pool2d, kernel_size=5, stride=2, padding=2, ceil_mode=True, count_include_pad=False)
        CORNERS.add(f"average {dtype}", uncounted, [x])
        CORNERS.add(f"adaptive {dtype}", partial(F.adaptive_avg_pool2d, output_size=(5, 6)), [x])
        CORNERS.add(f"lp {dtype}", partial(F.lp_pool2d, norm_type=2, kernel_size=2), [x.abs() / 30])
    x = noise(*ODD, dtype=BF16)
    CORNERS.add("average autocast", autocast(partial(F.avg_pool2d, **window)), [x])
    CORNERS.add("average 3d autocast", autocast(deep(partial(F.avg_pool3d, **plane))), [x])
    adaptive = deep(partial(F.adaptive_avg_pool3d, output_size=(1, 5, 4)))
    CORNERS.add("adaptive 3d autocast", autocast(adaptive), [x])


def pooling_shapes() -> None:
    for name, op in {
        "max": partial(F.max_pool2d, kernel_size=3, stride=1, padding=1),
        "max apart": partial(F.max_pool2d, kernel_size=2),
        "max strided": partial(F.max_pool2d, kernel_size=3, stride=2, padding=1),
        "average": partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1),
        "uncounted": partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False),
        "adaptive": partial(F.adaptive_avg_pool2d, output_size=(19, 17)),
        "adaptive max": partial(F.adaptive_max_pool2d, output_size=(19, 17)),
        "lp": partial(F.lp_pool2d, norm_type=2, kernel_size=2),
    }.items():
        CORNERS.add(f"shapes, {name} channels last", op, [last(noise(2, 3, 23, 22).abs())])
        CORNERS.add(f"shapes, {name} empty", op, [noise(0, 3, 23, 22)])
        CORNERS.add(f"shapes, {name} merged", merged(op), [noise(1, 3, 2, 6, 8).abs()])
        CORNERS.add(f"shapes, {name} few", op, [noise(1, 2, 3, 4).abs()])
    for name, op in {
        "max": partial(F.max_pool3d, kernel_size=3, stride=1, padding=1),
        "average": partial(F.avg_pool3d, kernel_size=3, stride=1, padding=1),
        "adaptive": partial(F.adaptive_avg_pool3d, output_size=(5, 19, 17)),
        "adaptive max": partial(F.adaptive_max_pool3d, output_size=(5, 19, 17)),
    }.items():
        CORNERS.add(f"shapes, {name} 3d channels last", op, [last(noise(2, 3, 9, 23, 22))])


pooling()
pooling_shapes()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _sees_data(window: Window, size: int, ceil: bool) -> bool:
    """Whether every output row reads a row of the image; where one does not, torch's own max pool reads elsewhere."""
    rows = range(window.output_size(size, ceil_mode=ceil))
    starts = [o * window.stride - window.padding for o in rows]
    return all(any(0 <= s + window.dilation * j < size for j in range(window.kernel)) for s in starts)


def _max_pool(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x: F.max_pool2d(x, g["kernel"], g["stride"], g["padding"], g["dilation"], g["ceil"])  # noqa: E731
    return windowed(op, g, None)


def _avg_pool(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x: F.avg_pool2d(x, g["kernel"], g["stride"], g["padding"], g["ceil"], g["include"])  # noqa: E731
    return windowed(op, g, None)


@settings(max_examples=100)
@given(geometries, st.booleans())
def test_any_window_of_max_pool(g: dict[str, Any], ceil: bool) -> None:
    assume(all(p <= k // 2 for p, k in zip(g["padding"], g["kernel"], strict=True)))
    assume(all(w.output_size(n) >= 1 for w, n in zip(windows(Window, g), g["size"], strict=True)))
    assume(all(_sees_data(w, n, ceil) for w, n in zip(windows(Window, g), g["size"], strict=True)))
    require_exact(_max_pool, g | {"ceil": ceil})


@settings(max_examples=100)
@given(geometries, st.booleans(), st.booleans())
def test_any_window_of_avg_pool(g: dict[str, Any], ceil: bool, include: bool) -> None:
    g = g | {"dilation": (1, 1), "ceil": ceil, "include": include}
    assume(all(p <= k // 2 for p, k in zip(g["padding"], g["kernel"], strict=True)))
    assume(all(w.output_size(n) >= 1 for w, n in zip(windows(Window, g), g["size"], strict=True)))
    require_exact(_avg_pool, g)


FORMATS: dict[str, Any] = {
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "volume": lambda x: F.max_pool3d(x, 3, 2, 1),
    "resize": lambda x: F.interpolate(x, size=(17, 9), mode="bilinear"),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dense", [False, True])
def test_gradients_keep_the_memory_format(name: str, dense: bool) -> None:
    """On a rank among others, of a gradient in the same format and of a contiguous one."""
    shape = (2, 4, 6, 16, 16) if name == "volume" else (2, 4, 16, 16)
    with fake_job(1, 2):
        x = ff.shard(last(torch.randn(shape)), ff.init_mesh(height=2), check=False)
        source = x.local.detach().requires_grad_() * 1
        made = FORMATS[name](wrap(source, x.spec)).local
        seed = torch.ones_like(made, memory_format=torch.contiguous_format if dense else torch.preserve_format)
        (gradient,) = torch.autograd.grad(made, source, seed)
    assert made.stride(1) == gradient.stride(1) == 1


def test_an_average_keeps_nothing() -> None:
    kept = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    with fake_job(1, 2), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        x = ff.shard(torch.randn(2, 4, 15, 16), ff.init_mesh(width=2), check=False)
        F.avg_pool2d(wrap(x.local.detach().requires_grad_() * 1, x.spec), 3, 2, 1)
    assert not kept
