"""Which input rows an output row of `F.interpolate` is made of, against torch itself."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fullframe.spatial.rules.taps import nearest_rows, repeats, taps_of, weighted

F64 = torch.float64
LINES = [(7, 12), (12, 5), (300, 301), (5, 5), (1, 4), (9, 1)]


@pytest.mark.parametrize(("size", "size_out"), LINES)
def test_the_weighted_rows_are_torch_s_line(size: int, size_out: int) -> None:
    x = torch.randn(2, 3, size, dtype=F64, requires_grad=True)
    for mode, corners in (("linear", False), ("linear", True), ("area", None), ("nearest", None)):
        taps = taps_of(size, size_out, mode, corners, None, False, F64)
        expected = F.interpolate(x, size_out, mode=mode, align_corners=corners)
        got = weighted(x, 2, taps, range(size_out), 0)
        assert taps.size_out == size_out and torch.allclose(got, expected, rtol=0, atol=1e-13)
        seed = torch.randn_like(expected)
        (wanted,) = torch.autograd.grad(expected, x, seed)
        (gradient,) = torch.autograd.grad(got, x, seed)
        assert torch.allclose(gradient, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("mode", "antialias"), [("bicubic", False), ("bicubic", True), ("bilinear", True)])
def test_one_dim_of_the_planar_modes(mode: str, antialias: bool) -> None:
    x = torch.randn(1, 1, 6, 17, dtype=F64)
    for size_out in (9, 30):
        taps = taps_of(17, size_out, mode, False, None, antialias, F64)
        expected = F.interpolate(x, (6, size_out), mode=mode, antialias=antialias)
        assert torch.allclose(weighted(x, 3, taps, range(size_out), 0), expected, rtol=0, atol=1e-13)


def test_parts_of_the_output_need_parts_of_the_input_and_shares_add_up() -> None:
    x = torch.randn(2, 17, dtype=F64)
    taps = taps_of(17, 11, "linear", False, None, False, F64)
    whole = weighted(x, 1, taps, range(11), 0)
    for out in (range(0, 4), range(4, 11)):
        need = taps.reads(out)
        got = weighted(x[:, need.start : need.stop], 1, taps, out, need.start)
        assert torch.equal(got, whole[:, out.start : out.stop])
    shares = [taps.share(x[:, own.start : own.stop], 1, own) for own in (range(0, 6), range(6, 17))]
    assert torch.allclose(sum(shares), whole, rtol=0, atol=1e-13)  # type: ignore[arg-type]


def test_copies() -> None:
    assert taps_of(4, 8, "nearest", None, None, False, F64).copies
    assert not taps_of(4, 8, "nearest", None, None, False, F64).copies_all
    assert taps_of(4, 4, "nearest", None, None, False, F64).copies_all
    assert not taps_of(4, 8, "linear", False, None, False, F64).copies
    assert nearest_rows(3, 6, "nearest", None, torch.float32).tolist() == [0, 0, 1, 1, 2, 2]
    assert repeats(3, 6, "nearest", None, torch.float32)
    assert nearest_rows(4, 2, "nearest", 0.7, torch.float32).tolist() == [0, 1]


def test_an_infinity_reaches_the_rows_that_it_reaches_in_torch() -> None:
    for mode, corners, size_out in (("linear", False, 21), ("linear", True, 13), ("area", None, 5)):
        taps = taps_of(11, size_out, mode, corners, None, False, F64)
        for row in range(11):
            x = torch.ones(1, 1, 11, dtype=F64)
            x[..., row] = torch.inf
            expected = F.interpolate(x, size_out, mode=mode, align_corners=corners)
            got = weighted(x, 2, taps, range(size_out), 0)
            assert torch.equal(got.nan_to_num(7.0, 8.0), expected.nan_to_num(7.0, 8.0)), (mode, row)


class Copies(TorchDispatchMode):
    """Counts copies between devices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **kwargs or {})


def test_tables_are_sent_to_a_device_once() -> None:
    taps = taps_of(7, 12, "linear", True, None, False, torch.float32)
    x = torch.empty(2, 7, device="meta")
    weighted(x, 1, taps, range(12), 0)
    taps.share(x, 1, range(7))
    with Copies() as copies:
        assert weighted(x, 1, taps, range(12), 0).device == x.device
        taps.share(x, 1, range(7))
    assert not copies.count


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_nearest_rows_are_those_of_lines_planes_and_volumes(kind: torch.dtype) -> None:
    for size, size_out, mode, dims in product(range(1, 48), range(1, 48, 3), ("nearest", "nearest-exact"), (1, 2, 3)):
        image = torch.arange(size, dtype=kind).view(1, 1, size, *(1,) * (dims - 1))
        resized = F.interpolate(image, (size_out, *(2,) * (dims - 1)), mode=mode)[0, 0]
        rows = nearest_rows(size, size_out, mode, None, kind, dims)
        assert torch.equal(rows, resized.reshape(size_out, -1)[:, 0].long())
