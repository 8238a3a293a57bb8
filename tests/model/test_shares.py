"""Gradients of which each rank keeps its share: who looks sees the replica's, and the job's mean is one process's."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.model.shares import leave_shares
from fullframe.ranks.mesh import spatial_of
from tests.exactness import mesh, relative
from tests.rank_group import rank_group


def _found(height: int) -> list[Tensor]:
    """Of two parameters the gradients that backward leaves, and what a hook of the second and `autograd.grad` see.

    Each row of the data is one rank's part; a rank's loss is as many times its part as a replica has ranks.
    """
    spatial = spatial_of(mesh(height, 1))
    weights = [nn.Parameter(torch.full((3,), number, dtype=torch.float64)) for number in (0.5, 0.7)]
    leave_shares(weights, spatial)
    hooked: list[Tensor] = []
    weights[1].register_hook(hooked.append)

    def loss(row: int) -> Tensor:
        return spatial.size * (weights[0] * weights[1] * (row + torch.arange(3))).sin().sum()

    looked = torch.autograd.grad(loss(dist.get_rank()), weights[0])
    loss(dist.get_rank()).backward()
    return [weights[0].grad, weights[1].grad, *hooked, *looked]  # type: ignore[list-item]


@pytest.mark.parametrize("height", [1, 2])
def test_each_rank_keeps_its_share_and_who_looks_sees_the_replicas(height: int) -> None:
    a, b, numbers = 0.5, 0.7, torch.arange(3.0, dtype=torch.float64)
    rows = [height * (a * b * (row + numbers)).cos() * (row + numbers) for row in range(2)]
    replicas = [sum(rows) / 2] * 2 if height == 2 else rows
    for rank, (first, second, hooked, looked) in enumerate(rank_group(2).run(_found, height)):
        assert relative(rows[rank] * b, first) < 1e-12
        assert relative(replicas[rank] * a, second) < 1e-12  # a hook makes it the replica's
        assert relative(replicas[rank] * a, hooked) < 1e-12
        assert relative(replicas[rank] * b, looked) < 1e-12
