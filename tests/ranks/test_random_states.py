"""The ranks of a replica draw the same whole values."""

import random

import numpy
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.ranks.mesh import spatial_of
from fullframe.ranks.random_states import NAMES, digests, share_random_states
from tests.rank_group import rank_group


def test_a_digest_changes_with_its_own_generator_alone() -> None:
    draws = {"torch": lambda: torch.rand(1), "random": random.random, "numpy.random": numpy.random.rand}
    assert len(digests()) == len(NAMES)
    for name, draw in draws.items():
        before, repeated = digests(), digests()
        draw()
        changed = [other for other, old, new in zip(NAMES, before, digests(), strict=True) if old != new]
        assert before == repeated and changed == [name]


def _drawn() -> list[tuple[float, ...]]:
    found = []
    for height, width in ((1, 2), (1, 1)):
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(dist.get_rank() + 1)
        share_random_states(spatial_of(ff.init_mesh(height, width)))
        found.append((float(torch.rand(())), random.random(), float(numpy.random.rand())))
    return found


def test_a_replica_s_ranks_draw_what_its_first_draws() -> None:
    (first, alone), (second, other_alone) = rank_group(2).run(_drawn)
    assert first == second == alone  # a replica of one rank keeps what it has
    assert all(a != b for a, b in zip(alone, other_alone, strict=True))
