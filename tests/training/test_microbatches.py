"""A batch cut along its first dim."""

from typing import NamedTuple

import pytest
import torch

from fullframe.errors import ShapeError
from fullframe.training.microbatches import microbatches


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


def test_one_slice_is_the_batch_itself() -> None:
    batch = object()
    assert list(microbatches(batch, 1)) == [batch]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"a": torch.zeros(4), "b": torch.zeros(6)}, "got a: 4, b: 6"),
        ([torch.zeros(3)], "3 samples a replica cannot be cut into 2"),
        ({"a": torch.tensor(1.0)}, "got no tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: object, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        list(microbatches(batch, 2))
