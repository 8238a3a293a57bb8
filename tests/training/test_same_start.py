"""Ranks that were started with different options are refused by name, on all ranks, before the first step."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import fullframe as ff
from fullframe.training import same_start
from fullframe.training.same_start import require_same_options, require_shared
from tests.rank_group import RankFailure, rank_group
from tests.training.tiny import recipe


def fitted(folder, strategies, changes, options, abouts):
    """A run in which each rank has options of its own."""
    rank = dist.get_rank()
    ff.fit(
        recipe(**changes[rank]), strategies[rank], folder / "run", about=abouts[rank], **{"steps": 2, **options[rank]}
    )


def into_two_places(folder):
    ff.fit(recipe(), ONE, folder / f"run{dist.get_rank()}", steps=1)


def test_another_run_directory_on_each_rank_is_named_at_once(tmp_path):
    with pytest.raises(RankFailure, match=r"run_dir is '.*run0' on rank 0, '.*run1' on rank 1") as caught:
        rank_group(2).run(into_two_places, tmp_path, timeout_seconds=60.0)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["RunError", "RunError"]
    assert not list(tmp_path.iterdir())


def measured_on_other_data(folder):
    """Ranks that would measure samples of unequal numbers, and wait for each other's batches for ever."""
    samples = [0] * (2 + dist.get_rank())
    evaluated = {"evaluate": lambda model, batch: {}, "evaluation_data": lambda: samples}
    ff.fit(recipe(**evaluated), ONE, folder / "run", steps=1)


def test_evaluation_data_of_another_length_is_named(tmp_path):
    with pytest.raises(RankFailure, match=r"len\(recipe.evaluation_data\(\)\) is 2 on rank 0, 3 on rank 1"):
        rank_group(2).run(measured_on_other_data, tmp_path, timeout_seconds=60.0)


NOTHING = ({}, {})
ONE = ff.Strategy(data=2)
STARTS = {
    "batch_size is 4 on rank 0, 6 on rank 1": {"changes": ({"batch_size": 4}, {"batch_size": 6})},
    "seed is 0 on rank 0, 7 on rank 1": {"changes": ({"seed": 0}, {"seed": 7})},
    "precision is 'fp32' on rank 0, 'bf16' on rank 1": {"strategies": (ONE, replace(ONE, precision="bf16"))},
    "data is 2 on rank 0, 1 on rank 1; width is 1": {"strategies": (ONE, ff.Strategy(width=2))},
    "steps is 2 on rank 0, 1 on rank 1": {"options": ({"steps": 2}, {"steps": 1})},
    "resume is False on rank 0, True on rank 1": {"options": ({}, {"resume": True})},
    "check_every is 100 on rank 0, 5 on rank 1": {"options": ({}, {"check_every": 5})},
    r"\(--set\) is \[\] on rank 0, \['lr=0.5'\] on rank 1": {"abouts": ({"values": []}, {"values": ["lr=0.5"]})},
}


@pytest.mark.parametrize("said", STARTS)
def test_what_differs_is_named_on_all_ranks(said, tmp_path):
    given = {"strategies": (ONE, ONE), "changes": NOTHING, "options": NOTHING, "abouts": NOTHING, **STARTS[said]}
    with pytest.raises(RankFailure, match=said) as caught:
        rank_group(2).run(fitted, tmp_path, *given.values(), timeout_seconds=60.0)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["RunError", "RunError"]
    assert not (tmp_path / "run").exists()


def compared(folder):
    """With a recipe's file of each rank's own."""
    require_same_options(recipe(), ONE, {}, {"recipe": str(folder / str(dist.get_rank()) / "recipe.py")})


def test_the_recipes_file_is_compared_by_its_text(tmp_path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "recipe.py").write_text("x = 1\n")
    rank_group(2).run(compared, tmp_path)  # wherever it lies
    (tmp_path / "1" / "recipe.py").write_text("x = 2\n")
    with pytest.raises(RankFailure, match="the text of the recipe's file is"):
        rank_group(2).run(compared, tmp_path)


def apart(folder):
    """Two ranks whose relative path means two directories, as on machines that share none."""
    same_start._SEEING_SECONDS = 0.3
    before = Path.cwd()
    os.chdir(folder / str(dist.get_rank()))
    try:
        ff.fit(recipe(), ONE, "run", steps=1)
    finally:
        os.chdir(before)


def test_a_run_directory_that_is_not_shared_is_refused(tmp_path):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(RankFailure, match="must lie on a file system that all machines share") as caught:
        rank_group(2).run(apart, tmp_path)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["RunError", "RunError"]


def test_what_is_seen_leaves_nothing(tmp_path):
    rank_group(2).run(require_shared, tmp_path)
    assert not list(tmp_path.iterdir())
