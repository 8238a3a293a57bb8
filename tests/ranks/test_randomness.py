"""Random states: kept, put back, seeded by numbers."""

import io
import random

import numpy
import torch

from fullframe.ranks.randomness import (
    kept_random_state,
    mixed_seed,
    random_state,
    sample_randomness,
    seed_everything,
    set_random_state,
)


def draw() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), random.gauss(0, 1), float(numpy.random.rand())


def test_a_state_put_back_draws_the_same_also_after_a_file() -> None:
    random.gauss(0, 1)  # which keeps a second number
    state, file = random_state(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    expected = draw()
    assert draw() != expected
    set_random_state(torch.load(file, weights_only=True))
    assert draw() == expected


def test_a_seed_sets_all_of_them() -> None:
    seed_everything(2**32 + 3)
    first = draw()
    seed_everything(2**32 + 3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_what_is_drawn_inside_leaves_the_states_outside() -> None:
    seed_everything(1)
    expected = draw()
    for inside in (kept_random_state(), sample_randomness(1, 2)):
        seed_everything(1)
        with inside:
            draw()
        assert draw() == expected


def test_a_sample_s_draws_follow_from_its_numbers_alone() -> None:
    found = []
    for numbers in ((1, 2), (1, 2), (1, 3), (12,)):
        seed_everything(len(found))
        with sample_randomness(*numbers):
            found.append(draw())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_seeds_of_close_numbers_are_apart_and_fixed_for_ever() -> None:
    assert mixed_seed(0, 1, 2) == 4727102316523150270
    seeds = {mixed_seed(a, b) for a in range(20) for b in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)
