"""No rule launches more kernels than its table says, on an inner rank, forward and backward.

`launches.json` has of each case: torch's forward and backward, the rule's forward and backward. It is written anew by
`python -m tests.cuda_like.launches --write`; a larger number in it is a decision.
"""

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.simulation.fake.replaced import replaced
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.rules import convolution
from tests.cuda_like.launches import RANK, RANKS, Launches, asked, kernels, launches, table
from tests.cuda_like.ranks import device_ranks
from tests.spatial.cases import all_cases, one

# Of the ops that a network is made of, forward and backward together.
MOST = {
    "convolution: conv 3/1/1": 10,
    "convolution: conv 3/2/1": 10,
    "convolution: conv 1/1/0": 2,
    "normalization: batch_norm": 10,
    "pooling: max_pool 3/2/1": 6,
    "pointwise: relu in place": 4,  # two of them
    "softmax: softmax over channels": 5,
    "normalization: layer_norm channels last": 3,
}


def _mine() -> dict[str, Launches | None]:
    return launches(sorted(all_cases())[dist.get_rank() :: dist.get_world_size()])


@pytest.mark.timeout(900)
def test_no_rule_launches_more_than_its_table_says() -> None:
    found = {name: counts for rank in device_ranks().run(_mine, timeout_seconds=800) for name, counts in rank.items()}
    assert found.keys() == all_cases().keys()
    known = table()
    told = {name: counts for name, counts in found.items() if counts is not None}
    assert told.keys() == known.keys(), "python -m tests.cuda_like.launches --write"
    more = {n: (c, known[n]) for n, c in told.items() if c.forward > known[n].forward or c.backward > known[n].backward}
    assert more == {}, "more launches (found, table)"
    assert {n: c for n, c in told.items() if n in MOST and c.forward + c.backward > MOST[n]} == {}


def _of_large_maps() -> tuple[int, int]:
    with fake_job(RANK, RANKS), replaced(convolution, "JOINED_BYTES", {"cuda_like": 0}):
        return kernels(asked(all_cases()["convolution: conv 3/1/1"], ff.init_mesh(width=RANKS)))


def test_a_large_map_is_convolved_with_its_borders_apart() -> None:
    forward, backward = device_ranks().run(_of_large_maps)[0]
    assert 3 < forward <= 10 and backward <= 9


def _counted() -> list[tuple[int, int]]:
    twice = one(lambda x: torch.relu(torch.relu(x)))
    with fake_job(RANK, RANKS):
        mesh = ff.init_mesh(width=RANKS)
        return [kernels(asked(*run)) for run in ((one(torch.relu), None), (one(torch.relu), mesh), (twice, mesh))]


def test_one_more_kernel_is_one_more() -> None:
    assert device_ranks().run(_counted)[0] == [(1, 1), (1, 1), (2, 2)]
