"""The clock that runs each distinct op once: what it runs, and how often."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fullframe.simulation.clock.ops import Op
from fullframe.simulation.clock.timed_ops import MeasuredClock
from fullframe.simulation.devices.table import device_named

aten = torch.ops.aten


def timed(clock: MeasuredClock, func: Any, *args: Any) -> float:
    return clock.op_seconds(Op.of(func), func, args, {}, None)[0][1]


def test_an_op_is_run_once_for_each_of_its_shapes_strides_and_dtypes() -> None:
    shared: dict[Any, float] = {}
    clock = MeasuredClock(device_named("cpu"), timings=shared)
    with FakeTensorMode():
        a, b = torch.empty(300, 300), torch.empty(300, 300)
        first = timed(clock, aten.mm.default, a, b)
        assert timed(clock, aten.mm.default, b, a) == first and len(shared) == 1
        for others in ((a[:30], b), (a.t(), b), (a.double(), b.double())):
            timed(clock, aten.mm.default, *others)
    assert first > 0 and len(shared) == 4 and not clock.guessed
    again = MeasuredClock(device_named("cpu"), timings=shared)
    with FakeTensorMode():
        assert timed(again, aten.mm.default, torch.empty(300, 300), torch.empty(300, 300)) == first


def test_what_cannot_be_run_alone_falls_back_on_the_roofline() -> None:
    clock = MeasuredClock(device_named("cpu"))
    with FakeTensorMode():
        out = torch.empty(4, 4)

        def broken(*args: Any) -> None:
            raise ValueError("not alone")

        ((_, seconds, _),) = clock.op_seconds(Op.of(aten.relu.default), broken, (out,), {}, out)
    assert seconds >= 0
    assert list(clock.guessed.values()) == ["ValueError: not alone"]


def test_an_index_op_gets_zeros() -> None:
    clock = MeasuredClock(device_named("cpu"))
    with FakeTensorMode():
        table, rows = torch.empty(5, 3), torch.empty(7, dtype=torch.int64)
        timed(clock, aten.embedding.default, table, rows)
        timed(clock, aten.relu.default, torch.empty(0, 3))
        timed(clock, aten.relu.default, table[:1].expand(4, 3))
    assert not clock.guessed


def test_an_op_is_timed_with_the_precision_of_its_step() -> None:
    """On a GPU fp32 numbers are multiplied in TF32 or not; here the settings are, whatever the CPU makes of them."""
    shared: dict[Any, float] = {}
    seen = []

    def watched(*tensors: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return aten.mm.default(*tensors)

    before = torch.backends.cuda.matmul.fp32_precision
    for precision, kind in (("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32")):
        clock = MeasuredClock(device_named("A100-80GB"), precision, timings=shared)
        clock._place = torch.device("cpu")
        with FakeTensorMode():
            clock.op_seconds(Op.of(aten.mm.default), watched, (torch.empty(8, 8), torch.empty(8, 8)), {}, None)
        assert set(seen) <= {kind}
        seen.clear()
    assert len(shared) == 2 and not clock.guessed
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(0, 3), (), (3,), (5, 4096), (2, 3000, 3)])
def test_operands_are_from_a_half_to_one_or_zeros(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    like = torch.empty(shape, dtype=dtype).mT if len(shape) > 1 else torch.empty(shape, dtype=dtype)
    filled = MeasuredClock(device_named("cpu"))._filled(like)
    assert (filled.shape, filled.stride(), filled.dtype) == (like.shape, like.stride(), dtype)
    numbers = filled.abs() if dtype.is_floating_point or dtype.is_complex else filled.to(torch.float32) + 0.5
    assert bool(((numbers >= 0.5) & (numbers <= 1)).all())
