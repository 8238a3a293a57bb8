"""Elementwise ops on DTensors, by their parts: as DTensor itself has it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import fullframe as ff
from fullframe.simulation.fake.sharded import on_parts, own_parts
from fullframe.simulation.fake.world import fake_job

aten = torch.ops.aten


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_job(1, 3):
        yield DeviceMesh("cpu", torch.arange(3))


def spread(mesh: DeviceMesh, seed: int, *placements: Placement) -> list[DTensor]:
    """Of 7 x 4 numbers, and 5: of the latter the third rank has one."""
    torch.manual_seed(seed)
    found = []
    for shape, placement in zip(((7, 4), (5,)), placements, strict=True):
        rows = [3, 2][len(found)] if isinstance(placement, Shard) else shape[0]
        part = torch.rand(rows, *shape[1:], dtype=torch.float64)
        found.append(
            DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=(4, 1)[-len(shape) :])
        )
    return found


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


CASES: list[tuple[Any, Callable[..., tuple[Any, ...]]]] = [
    (aten._foreach_add_.Scalar, lambda a, b, c: (a, 0.5)),
    (aten._foreach_mul_.Scalar, lambda a, b, c: (a, 0.5)),
    (aten._foreach_lerp_.Scalar, lambda a, b, c: (a, b, 0.25)),
    (aten._foreach_addcmul_.Scalar, lambda a, b, c: (a, b, c, 0.25)),
    (aten._foreach_addcdiv_.ScalarList, lambda a, b, c: (a, b, c, [0.25, 0.5])),
    (aten._foreach_div_.ScalarList, lambda a, b, c: (a, [0.25, 0.5])),
    (aten._foreach_sqrt.default, lambda a, b, c: (a,)),
    (aten._foreach_add.List, lambda a, b, c: (a, b)),
    (aten.zeros_like.default, lambda a, b, c: (a[0],)),
]


@pytest.mark.parametrize(("func", "arguments"), CASES)
@pytest.mark.parametrize("placements", [(Shard(0), Shard(0)), (Shard(0), Replicate())])
def test_the_parts_are_those_of_dtensor(func: Any, arguments: Any, placements: Any, mesh: DeviceMesh) -> None:
    def outcome(by: Callable[..., Any]) -> list[tuple[Tensor, Any, Any]]:
        lists = [spread(mesh, seed, *placements) for seed in range(3)]
        out = by(func, arguments(*lists), {})
        assert out is not NotImplemented
        tensors = [
            *(out if isinstance(out, list) else [out] if out is not None else []),
            *(t for each in lists for t in each),
        ]
        return [(own_parts(t), t.placements, (t.shape, t.stride(), t.dtype)) for t in tensors]

    for mine, torchs in zip(outcome(lambda *call: on_parts(run, *call)), outcome(run), strict=True):
        assert torch.equal(mine[0], torchs[0]) and mine[1:] == torchs[1:]


def test_dtensor_is_asked_about_anything_else(mesh: DeviceMesh) -> None:
    sharded, whole = spread(mesh, 0, Shard(0), Shard(0)), spread(mesh, 0, Replicate(), Shard(0))
    part = [DTensor.from_local(torch.ones(7, 4), mesh, [Partial()], run_check=False)]
    plain = [own_parts(tensor) for tensor in sharded]
    for func, args in (
        (aten._foreach_norm.Scalar, (sharded, 2)),  # of which each rank has a part
        (aten._foreach_add_.List, (sharded, whole)),
        (aten._foreach_add_.List, (sharded, plain)),
        (aten._foreach_add_.Scalar, (part, 1.0)),
        (aten._foreach_mul_.Tensor, (sharded, sharded[0])),
        (aten._foreach_add_.Scalar, (plain, 1.0)),
        (aten.mm.default, (sharded[0], sharded[0])),
        (aten.zeros_like.default, (plain[0],)),
    ):
        assert on_parts(run, func, args, {}) is NotImplemented


def test_parts_are_found_within_lists(mesh: DeviceMesh) -> None:
    sharded = spread(mesh, 0, Shard(0), Shard(0))
    parts = own_parts([sharded[0], 3, (sharded[1],)])
    assert [parts[0].shape, parts[1], parts[2][0].shape] == [(3, 4), 3, (2,)]
    kept = [torch.ones(2), 1]
    assert own_parts(kept) is kept


class _Framed(nn.Module):
    """Pads by a number that it keeps as a parameter."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.layer = reads, nn.Conv2d(3, 4, 1)
        self.margins = nn.Parameter(torch.tensor([1, 5, 2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        margin = int(self.margins.max()) if self.reads else 5
        return self.layer(nn.functional.pad(x, (margin,) * 4))  # type: ignore[no-any-return]


def test_numbers_of_a_frozen_parameter_can_be_read_where_parameters_are_sharded() -> None:
    def simulated(reads: bool) -> int:
        recipe = ff.Recipe(
            model=lambda: _Framed(reads),
            loss=lambda model, batch: model(batch["image"]).mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=lambda: [{"image": torch.zeros(3, 20, 36)}] * 4,
            batch_size=2,
        )
        return ff.simulate(recipe, ff.Strategy(data=2, shard_parameters=True), device="cpu").peak_bytes

    assert simulated(reads=True) == simulated(reads=False)
