"""Compiled blocks of volumes, and inside of fixed points: gradients of one process."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.compiled.blocks import CompiledBlocks, Programs
from tests.rank_group import rank_group
from tests.training import volumes


class Block(nn.Module):
    """A contraction."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.1 * self.c(state) + self.d(x))


class Fixed(nn.Module):
    def __init__(self, backward: str):
        super().__init__()
        self.found = ff.fixed_point(Block(), tolerance=1e-13, backward=backward)

    def forward(self, x: Tensor) -> Any:
        return self.found(x * 0, x)


VOLUMES = ("enter", "down", "middle", "up")


def compared(kind: str) -> tuple[float, str, list[str]]:
    """The largest difference of gradients and buffers, which blocks were compiled, and what was said of others."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(volumes.Network() if kind == "volumes" else Fixed(kind).double())
    here, there = nets
    mesh = ff.init_mesh(depth=2) if kind == "volumes" else ff.init_mesh(width=2)
    shape = (2, 1, *volumes.SIZE) if kind == "volumes" else (2, 3, 9, 15)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = ff.parallelize(there, mesh)
    compiled = CompiledBlocks(there, VOLUMES if kind == "volumes" else ["found.block"], Programs("aot_eager"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            here(x).square().mean().backward()
            model(ff.shard(x, mesh)).square().mean().backward()
    pairs: list[Any] = [(p.grad, q.grad) for p, q in zip(here.parameters(), there.parameters(), strict=True)]
    pairs += zip(here.buffers(), there.buffers(), strict=True)
    worst = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)) for a, b in pairs)
    return worst, compiled.summary, [str(w.message) for w in said if "not compiled" in str(w.message)]


@pytest.mark.parametrize("kind", ["volumes", "implicit", pytest.param("unrolled", marks=pytest.mark.slow), "phantom"])
def test_gradients_are_those_of_one_process(kind: str) -> None:
    count = 4 if kind == "volumes" else 1
    for rank, (worst, summary, said) in enumerate(rank_group(2).run(compared, kind)):
        assert worst < 1e-9 and summary.startswith(f"{count} of {count} blocks are compiled"), (worst, summary)
        assert len(said) == (kind == "implicit" and rank == 0)
        assert all("backward goes through it several times" in one for one in said)
