"""Which samples a data set has: the same whatever folder it is in, another in another order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import fullframe as ff
from fullframe.training.loading.listing import listing_of
from tests.rank_group import RankFailure, rank_group


class Files(Dataset[Any]):
    def __init__(self, files: list[Any]):
        self.files, self.other, self.root = files, ["x"] * (len(files) + 1), "anywhere"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return {"index": index}


def test_the_order_counts_and_the_place_does_not() -> None:
    names = ["scene1/0.png", "scene1/1.png", "scene2/0.png"]
    here, there = (Files([f"{root}/{name}" for name in names]) for root in ("/data", "/scratch/7/data"))
    assert listing_of(here) == listing_of(there) != 0
    assert listing_of(here) == listing_of(Files([Path(file) for file in here.files]))
    assert listing_of(here) != listing_of(Files(here.files[::-1]))
    pairs = [(file, number) for number, file in enumerate(here.files)]
    assert listing_of(Files(pairs)) != listing_of(Files([*pairs[:2], (pairs[2][0], 5)]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_indices_and_data_sets_inside(kind: Any) -> None:
    whole = Files(list("abcdef"))
    one, other = Subset(whole, kind([0, 2])), Subset(whole, kind([2, 0]))
    assert listing_of(one) != listing_of(other) and listing_of(one, ordered=False) == listing_of(other, ordered=False)
    assert listing_of(ConcatDataset([one, whole])) != listing_of(ConcatDataset([other, whole]))
    deep = [ConcatDataset([Subset(Subset(each, [0, 1]), [1])]) for each in (one, other)]
    assert listing_of(deep[0]) != listing_of(deep[1])


def test_a_rank_s_own_part() -> None:
    parts = [Subset(Files(list("abcdef")), range(first, 6, 2)) for first in (0, 1)]
    for ordered in (True, False):
        assert listing_of(parts[0], ordered) != listing_of(parts[1], ordered)


def test_a_data_set_that_lists_nothing() -> None:
    assert listing_of(TensorDataset(torch.ones(3, 2))) == listing_of(range(5)) == 0
    images, other = (
        Files(["a", "b"]),
        Files([("a", 0.5, None), ("b", np.ones(2), {})]),
    )  # what is no name is passed over
    images.other = torch.zeros(2, 3, dtype=torch.uint8)  # type: ignore[assignment]
    assert listing_of(images) == listing_of(other) == listing_of(Files(["a", "b"]))


def read(seed_of_all: bool) -> list[int]:
    mesh = ff.init_mesh()
    torch.manual_seed(0 if seed_of_all else dist.get_rank())
    part, _ = random_split(Files(list("abcdefgh")), [6, 2])
    return [int(index) for batch in ff.ShardedLoader(DataLoader(part, 2), mesh) for index in batch["index"]]


def test_ranks_that_split_by_their_own_random_states() -> None:
    first, second = rank_group(2).run(read, True)
    assert len({*first, *second}) == 6
    with pytest.raises(RankFailure, match="reads 6 samples in order, 2 a batch, listed as"):
        rank_group(2).run(read, False)
