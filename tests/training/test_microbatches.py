"""A batch cut along its first dim."""

from collections import UserDict
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fullframe.errors import ShapeError
from fullframe.training.microbatches import fresh, microbatches


class Pair(NamedTuple):
    image: torch.Tensor
    names: list[str]


def test_tensors_and_lists_of_samples_are_cut_and_the_rest_goes_to_every_slice() -> None:
    x = torch.arange(8).view(4, 2)
    batch = {"x": x, "pair": Pair(x * 10, ["a", "b", "c", "d"]), "scale": torch.tensor(3.0), "word": "w", "two": [1, 2]}
    first, second = microbatches(batch, 2)
    assert first["x"].tolist() == [[0, 1], [2, 3]] and second["x"].tolist() == [[4, 5], [6, 7]]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].image[0, 0] == 40 and second["pair"].names == ["c", "d"]
    assert first["scale"] == 3 and second["word"] == "w" and second["two"] == [1, 2]


def test_a_list_of_tensors_is_cut_tensor_by_tensor() -> None:
    slices = list(microbatches([torch.zeros(2, 3), torch.ones(2)], 2))
    assert [[tuple(t.shape) for t in s] for s in slices] == [[(1, 3), (1,)]] * 2


def test_arrays_are_cut_and_mappings_stay_what_they_are() -> None:
    batch = UserDict(boxes=np.arange(8).reshape(4, 2), image=torch.zeros(4, 1))
    _, second = microbatches(batch, 2)
    assert isinstance(second, UserDict) and second["boxes"].tolist() == [[4, 5], [6, 7]] and len(batch["boxes"]) == 4


def test_a_list_with_an_entry_for_each_sample_is_cut_whatever_they_hold() -> None:
    batch = {"image": torch.zeros(2, 3), "boxes": [torch.zeros(2, 4), torch.ones(5, 4)], "batch": [{"a": [1]}, {}]}
    first, second = microbatches(batch, 2)
    assert [len(first["boxes"]), len(second["boxes"][0])] == [1, 5] and second["batch"] == [{}]


def test_containers_are_ones_own_when_fresh() -> None:
    batch = {"image": torch.zeros(2), "more": [{"a": 1}], "pair": Pair(torch.zeros(1), ["a"]), "user": UserDict(b=2)}
    given = fresh(batch)
    given["image"] = given["more"][0]["a"] = given["user"]["b"] = 5
    given["more"].append(7)
    assert batch["image"].shape == (2,) and batch["more"] == [{"a": 1}] and batch["user"]["b"] == 2
    assert given["pair"] is batch["pair"]


def test_one_slice_is_the_batch_itself() -> None:
    batch = object()
    assert list(microbatches(batch, 1)) == [batch]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"a": torch.zeros(4), "b": torch.zeros(6)}, "got a: 4, b: 6"),
        ([torch.zeros(3)], "3 samples a replica cannot be cut into 2"),
        ({"a": torch.tensor(1.0)}, "got no tensor"),
        ({"a": torch.zeros(2), "b": [torch.zeros(2, 4), torch.zeros(2, 4)]}, "b has 2 entries, as there are samples"),
        ({"a": torch.zeros(2), "b": SimpleNamespace(boxes=torch.zeros(2))}, "b is a SimpleNamespace, of which it is"),
        ({"a": torch.zeros(2), "b": [torch.zeros(3)]}, r"b\[0\] has 3 rows, the batch 2 samples"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: object, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        list(microbatches(batch, 2))
