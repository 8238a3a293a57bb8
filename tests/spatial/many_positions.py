"""Reads and writes at so many positions that each rank gets whole rows: a module's `MANY`, against one process."""

from importlib import import_module
from unittest import mock

import torch

from fullframe.spatial.rules import points
from tests.exactness import differences
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES


def _errors(module: str, world: int) -> dict[str, float]:
    x = torch.randn(2, 4, 7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with mock.patch.object(points, "FEW", 0):
        return {
            f"{name} on {shape}": max(differences(op, [x], [], *shape).values())
            for shape in MESHES
            if shape[0] * shape[1] == world
            for name, op in import_module(module).MANY.items()
        }


def require_many_exact(module: str, world: int) -> None:
    """On each mesh of `world` ranks, values and gradients."""
    for errors in rank_group(world).run(_errors, module, world):
        assert not {name: error for name, error in errors.items() if not error <= 1e-12}
