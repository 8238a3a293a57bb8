"""Linear upsampling where a map lies, its border rows once more: exact, also of infinities and NaN both ways."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.rules import resampling, upsampling
from fullframe.spatial.rules.convolution import JOINED_BYTES
from fullframe.spatial.rules.upsampling import Upsampling
from tests.exactness import mesh, relative
from tests.rank_group import JOINED_BYTES_ON_CPU, rank_group

BOUND = 1e-13
FORMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "x2": ((2, 3, 11, 7), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "x4 to a size": ((1, 2, 9, 9), lambda x: F.interpolate(x, (36, 36), mode="bilinear")),
    "x6, otherwise along the width": ((1, 2, 8, 5), lambda x: F.interpolate(x, (48, 7), mode="bilinear")),
    "x2, scales of other dims": ((1, 2, 9, 5), lambda x: F.interpolate(x, scale_factor=(2, 1.3), mode="bilinear")),
    "lines": ((1, 2, 10), lambda x: F.interpolate(x, scale_factor=4, mode="linear")),
    "volumes": ((1, 2, 9, 3, 4), lambda x: F.interpolate(x, scale_factor=(2, 1, 1.5), mode="trilinear")),
    "channels last": ((1, 5, 9, 6), lambda x: F.interpolate(
        x.contiguous(memory_format=torch.channels_last), scale_factor=2, mode="bilinear")),
}  # fmt: skip


def _both(x: Tensor, op: Callable[[Tensor], Tensor], gradient: Tensor, again: Tensor) -> list[Tensor]:
    """The result, its gradient, and the gradient of that by `gradient` and by `x`, if any."""
    split = isinstance(x, ff.SpatialTensor)
    gradient = gradient.clone().requires_grad_()
    x = x.requires_grad_()
    made = op(x)
    there = ff.shard(gradient, made.device_mesh) if split else gradient  # type: ignore[attr-defined]
    (plain,) = torch.autograd.grad(made, x, there, retain_graph=True)
    (found,) = torch.autograd.grad(made, x, there, create_graph=True)
    again = ff.shard(again, made.device_mesh) if split else again  # type: ignore[attr-defined]
    (twice,) = torch.autograd.grad(found, gradient, again)
    return [t.full() if isinstance(t, ff.SpatialTensor) else t for t in (made, plain, found, twice)]


def _faults(ranks: int, everywhere: bool) -> list[str]:
    """What differs from one process, where all ranks do their borders again, or only those that do so by themselves."""
    before = JOINED_BYTES["cpu"]
    if everywhere:
        JOINED_BYTES["cpu"] = 0
    counted, ask = [0], Upsampling.is_quicker

    def counting(how: Upsampling, local: Tensor) -> bool:
        counted[0] += ask(how, local)
        return ask(how, local)

    Upsampling.is_quicker = counting  # type: ignore[method-assign]
    found = []
    try:
        for name, (shape, op) in FORMS.items():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            gradient = torch.randn(op(x).shape, generator=generator, dtype=torch.float64)
            again = torch.randn(shape, generator=generator, dtype=torch.float64)
            rows, factor = shape[2], gradient.shape[2] // shape[2]
            spoiled: list[tuple[str, int, float]] = [("none", 0, 0.0)]
            if name == "x2":
                spoiled += [("input", row, math.inf) for row in range(rows)]
                spoiled += [("gradient", row, math.inf) for row in range(rows * factor)]
                spoiled += [("input", rows // 2, math.nan), ("gradient", rows // 2 * factor, math.nan)]
            for what, row, value in spoiled:
                x_, gradient_ = x.clone(), gradient.clone()
                if what != "none":
                    (x_ if what == "input" else gradient_).narrow(2, row, 1).fill_(value)
                here = _both(x_.clone(), op, gradient_, again)
                there = _both(ff.shard(x_, mesh(ranks, 1)), op, gradient_, again)
                for part, a, b in zip(("result", "gradient", "with a graph", "twice"), here, there, strict=True):
                    if not relative(a.detach(), b.detach()) <= BOUND:
                        found.append(f"{name}, {what} row {row} {value}: {part}")
    finally:
        JOINED_BYTES["cpu"], Upsampling.is_quicker = before, ask  # type: ignore[method-assign]
    if everywhere and not counted[0]:
        found.append("never done so")
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("everywhere", [True, False])
def test_as_in_one_process(ranks: int, everywhere: bool) -> None:
    assert rank_group(ranks).run(_faults, ranks, everywhere) == [[]] * ranks


@pytest.mark.parametrize(("rows", "limit", "is_so"), [(16, 0, True), (16, JOINED_BYTES_ON_CPU, False), (8, 0, False)])
def test_of_large_maps_with_three_rows_a_rank(
    monkeypatch: pytest.MonkeyPatch, rows: int, limit: int, is_so: bool
) -> None:
    monkeypatch.setitem(JOINED_BYTES, "cpu", limit)
    calls = []
    monkeypatch.setattr(resampling, "upsampled", lambda *args: (calls.append(args), upsampling.upsampled(*args))[1])
    with fake_job(1, 4):
        x = ff.shard(torch.randn(1, 2, rows, 4), mesh(4, 1), check=False)
        F.interpolate(x, scale_factor=2)
        F.interpolate(x, scale_factor=2, mode="bicubic")
        F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        F.interpolate(x, scale_factor=3, mode="bilinear")
        assert not calls
        F.interpolate(x, scale_factor=2, mode="bilinear")
    assert bool(calls) == is_so
