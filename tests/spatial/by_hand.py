"""What users do with gradients by hand, on a mesh as in one process: the runner of tables of such programs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fullframe as ff
from tests.exactness import mesh, relative
from tests.rank_group import rank_group

Case = Callable[[DeviceMesh | None], list[Tensor]]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def image(seed: int = 1) -> Tensor:
    return drawn(2, 3, 9, 13, seed=seed)


def whole(value: Any) -> Tensor:
    value = value.full() if isinstance(value, ff.SpatialTensor) else value
    return value.detach().clone()  # type: ignore[no-any-return]


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def all_as_in_one_process(cases: Sequence[Case], meshes: Sequence[tuple[int, int]]) -> Callable[[int, int], None]:
    """A test of all cases, which are functions of a module, on each mesh."""

    @pytest.mark.parametrize(("height", "width"), meshes)
    def test(height: int, width: int) -> None:
        for found in rank_group(height * width).run(_differences, cases, height, width):
            wrong = {name: error for name, error in found.items() if error not in (0.0,) and not float(error) < 1e-9}
            assert wrong == {}

    return test


def _differences(cases: Sequence[Case], height: int, width: int) -> dict[str, Any]:
    """By case the largest difference from one process, not averaged over the ranks."""
    found: dict[str, Any] = {}
    for case in cases:
        expected, got = case(None), case(mesh(height, width))
        same = len(expected) == len(got)
        found[case.__name__] = max(map(relative, expected, got)) if same else f"{len(got)} for {len(expected)}"
    return found
