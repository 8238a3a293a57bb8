"""Data sets that draw from generators of their own, as libraries' transforms do, are read alike by all ranks."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fullframe as ff
from fullframe.training.loading.generators import generators_of, seed_generators
from tests.rank_group import rank_group


class Flip:
    """With the state on the class, as MONAI has it."""

    R = np.random.RandomState()

    def __call__(self, x: Tensor) -> Tensor:
        return x.flip(-1) if self.R.rand() < 0.5 else x


class Noise:
    def __init__(self) -> None:
        self.random_generator, self.py_random = np.random.default_rng(), random.Random()  # as albumentations has it

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.random_generator.normal() * self.py_random.random()


def _shifting(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: x + torch.rand((), generator=generator)


class Frames(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        scaling = random.Random()
        self.transforms = [Flip(), Noise(), Flip(), _shifting(torch.Generator())]
        self.options = {"scaled": partial(lambda x, by: x * by.random(), by=scaling)}
        self.inner, self.process = self, (np.random.mtrand._rand, torch.default_generator)
        torch.seed(), self.transforms[1].py_random.seed(), Flip.R.seed()  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.arange(60.0).view(1, 6, 10) * index
        for transform in (*self.transforms, *self.options.values()):
            x = transform(x)  # type: ignore[operator]
        return {"image": x}


def test_each_is_found_once_and_set_from_the_numbers() -> None:
    data = Frames()
    found = generators_of(data)
    kinds = sorted(type(each).__name__ for each in found)
    assert kinds == ["Generator", "Generator", "Random", "Random", "RandomState"]
    drawn = []
    for numbers in ((1, 2), (1, 2), (1, 3)):
        seed_generators(found, *numbers)
        drawn.append(data[1]["image"])
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    one, other = random.Random(), random.Random()
    seed_generators([one, other], 1)
    assert one.random() != other.random()


def test_lists_of_samples_are_not_walked() -> None:
    assert generators_of({"samples": [random.Random() for _ in range(1001)]}) == []


def _read(width: int, workers: int) -> list[Any]:
    data: Any = Frames()
    loader = ff.ShardedLoader(DataLoader(data, 3, num_workers=workers), ff.init_mesh(width=width))
    images = [batch["image"] for _ in range(2) for batch in loader]
    return [image.full().tolist() if width > 1 else image.tolist() for image in images]


def test_all_ranks_read_what_one_process_reads() -> None:
    (alone,) = rank_group(1).run(_read, 1, 0)
    assert alone[0] != alone[2], "another epoch"
    for workers in (0, 2):
        assert rank_group(2).run(_read, 2, workers) == [alone, alone]
