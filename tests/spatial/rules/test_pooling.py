"""Pooling: ceil mode, dilation, counts of padding, ties, infinities, integers, maps too small for the ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    "adaptive_avg_pool 1": one(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "adaptive_avg_pool 7": one(lambda x: F.adaptive_avg_pool2d(x, 7)),
    "adaptive_avg_pool (3, 5)": one(lambda x: F.adaptive_avg_pool2d(x, (3, 5))),
    "adaptive_avg_pool (None, 2)": one(lambda x: F.adaptive_avg_pool2d(x, (None, 2))),
    "adaptive_avg_pool (2, None)": one(lambda x: F.adaptive_avg_pool2d(x, (2, None))),
    "adaptive_max_pool 1": one(lambda x: F.adaptive_max_pool2d(x, 1)),
    "adaptive_max_pool (4, 6)": one(lambda x: F.adaptive_max_pool2d(x.relu(), (4, 6))),
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


def adaptive() -> None:
    for value in (math.inf, math.nan):
        x = spoiled(*ODD, value=value)
        for sizes in ((5, 7), (1, 7), (2, 1), (1, 1), (13, 4), (9, 9)):
            for pool in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
                op = partial(pool, output_size=sizes)
                CORNERS.add(f"{pool.__name__} {sizes} {value}", op, [x])


def over_all_rows() -> None:
    """Windows that several ranks see whole, as where a pool is written with the map's own size."""
    low = torch.full(ODD, -math.inf, dtype=F64)
    low[..., 9:, 9:] = 1
    maps = {
        "ties": noise(*ODD).relu().round(),
        "zero": noise(*ODD).clamp(max=0),
        "low": low,
        "spoiled": spoiled(*ODD, value=math.nan),
    }
    for name, x in maps.items():
        for kernel in ((13, 11), (1, 11), (13, 1), (13, 3)):
            for indexed in (False, True):
                op = partial(F.max_pool2d, kernel_size=kernel, stride=kernel, return_indices=indexed)
                CORNERS.add(f"max {kernel} {indexed} of {name}", op, [x])
            CORNERS.add(f"average {kernel} of {name}", partial(F.avg_pool2d, kernel_size=kernel), [x])
        for sizes in ((2, 2), (3, 1), (1, 3)):
            op = partial(F.adaptive_max_pool2d, output_size=sizes, return_indices=True)
            CORNERS.add(f"adaptive max {sizes} of {name}", op, [x])
        volume = deep(partial(F.max_pool3d, kernel_size=(1, 13, 11), return_indices=True))
        CORNERS.add(f"max 3d of {name}", volume, [x])
        CORNERS.add(f"max 1d of {name}", flat(partial(F.max_pool1d, kernel_size=11)), [x])
    numbers = (noise(*ODD) * 50).to(torch.int32)
    CORNERS.add("max over all integers", partial(F.max_pool2d, kernel_size=(13, 11)), [numbers])
    CORNERS.add("average over all integers", partial(F.avg_pool2d, kernel_size=(13, 11)), [numbers.long()])
    CORNERS.add("over all, 4", partial(F.avg_pool2d, kernel_size=(13, 11), divisor_override=4), [noise(*ODD)])
    CORNERS.add("over all, few", partial(F.max_pool2d, kernel_size=(3, 4)), [noise(1, 2, 3, 4)])


pooling()
pooling_shapes()
adaptive()
over_all_rows()


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


GLOBAL: dict[str, Any] = {
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive max, 3": lambda x: F.adaptive_max_pool2d(x, 3),
    "max": lambda x: F.max_pool2d(x, (x.shape[2], x.shape[3])),
    "average": lambda x: F.avg_pool2d(x, (x.shape[2], x.shape[3])),
}


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an op inside gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *made])
        return found


@pytest.mark.parametrize("name", GLOBAL)
def test_a_window_over_all_rows_makes_no_map_whole(name: str) -> None:
    with fake_job(1, 4):
        x = ff.shard(torch.randn(2, 4, 16, 64), ff.init_mesh(width=4), check=False)
        source = x.local.detach().requires_grad_()
        with _Largest() as largest:
            GLOBAL[name](wrap(source * 1, x.spec)).sum().backward()
    assert largest.elements == source.numel()


def test_an_average_keeps_no_copy_of_its_map() -> None:
    kept = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.untyped_storage().data_ptr())
        return saved

    with fake_job(1, 2), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        x = ff.shard(torch.randn(2, 4, 15, 16), ff.init_mesh(width=2), check=False)
        source = x.local.detach().requires_grad_() * 1
        F.avg_pool2d(wrap(source, x.spec), 2)
    assert set(kept) == {source.untyped_storage().data_ptr()}
