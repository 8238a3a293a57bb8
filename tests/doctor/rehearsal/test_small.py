"""What a small form keeps of a recipe."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from fullframe.doctor.rehearsal.small import SmallFrames, is_small, made_small, with_fewer_layers
from tests.doctor.rehearsal import recipes


def test_frames_and_what_is_smaller_by_a_power_of_2_are_cut_alike() -> None:
    sample = SmallFrames(recipes.Frames())[0]
    assert {name: tuple(value.shape) for name, value in sample.items()} == {
        "image": (3, 128, 96),
        "mask": (128, 96),
        "coarse": (1, 32, 24),
    }
    assert torch.equal(sample["mask"], (sample["image"][0] > 0.5).long())
    assert not is_small(recipes.Frames()) and is_small(SmallFrames(recipes.Frames()))


def test_what_has_no_frame_stays() -> None:
    whole = [{"tokens": torch.arange(9), "name": "a"}]
    assert SmallFrames(whole)[0] is whole[0] and len(SmallFrames(whole)) == 1


def test_a_stream_is_cut_as_it_comes() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from map(recipes.Frames().__getitem__, range(2))

    recipe = dataclasses.replace(recipes.sound(), data=Stream, evaluation_data=Stream)
    small = made_small(recipe)
    assert small.evaluation_data is not None
    for data in (small.data(), small.evaluation_data()):
        assert is_small(data) and not is_small(Stream())
        assert [sample["image"].shape for sample in data] == [(3, 128, 96)] * 2


def test_of_layers_alike_in_a_row_the_first_stays_and_the_model_runs() -> None:
    plain = nn.Sequential(
        nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1)
    )
    small = with_fewer_layers(plain)
    assert list(dict(small.named_children())) == ["0", "1", "3", "4", "5", "6"]
    assert small(torch.ones(1, 2)).shape == (1, 1)


def test_a_recipe_keeps_its_loss_and_its_batch() -> None:
    recipe = recipes.sound()
    small = made_small(recipe)
    assert (small.loss, small.batch_size, small.optimizer) == (recipe.loss, recipe.batch_size, recipe.optimizer)
    assert len(small.model().body) == 2 and len(recipe.model().body) == 4
    assert small.evaluation_data is not None and is_small(small.evaluation_data())
