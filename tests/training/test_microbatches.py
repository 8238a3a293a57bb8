"""A batch cut along its first dim."""

from collections import UserDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import fullframe as ff
from fullframe.errors import RecipeError, ShapeError
from fullframe.training.microbatches import fresh, microbatches
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Plain


class Pair(NamedTuple):
    image: torch.Tensor
    names: list[str]


@dataclass(slots=True)
class Slotted:
    boxes: torch.Tensor | dict[str, "Slotted"]


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


def test_a_tuple_of_tensors_is_none_of_samples_however_many_it_has() -> None:
    _, (x, pair, boxes) = microbatches((torch.zeros(2, 3), (torch.tensor([1, 2]), torch.tensor([3, 4])), ["a", "b"]), 2)
    assert x.shape == (1, 3) and [part.tolist() for part in pair] == [[2], [4]] and boxes == ["b"]
    _, (x, boxes) = microbatches((torch.zeros(2, 3), [torch.zeros(5, 4), torch.ones(1, 4)]), 2)
    assert x.shape == (1, 3) and [len(one) for one in boxes] == [1]


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
        ({"a": torch.zeros(2), "b": deque([torch.zeros(2)])}, "b is a deque, of which it is"),
        ({"a": torch.zeros(2), "b": Slotted(torch.zeros(2))}, "b is a Slotted, of which it is"),
        ({"a": torch.zeros(2), "b": Slotted({"c": Slotted(torch.zeros(2))})}, "b is a Slotted, of which it is"),
        ({"a": torch.zeros(2), "b": [torch.zeros(3)]}, r"b\[0\] has 3 rows, the batch 2 samples"),
        ({"img": torch.zeros(2), "batch_idx": torch.zeros(2)}, "batch_idx counts the images of the whole batch"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: object, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        list(microbatches(batch, 2))


IMAGES = Frames(augment=False).images
BOXES = (2, 0, 1, 3, 1, 0, 4, 1)  # of each image


def collated(samples):
    """Boxes of all images in one tensor, as many YOLOs have them, each with the number of its image in this batch."""
    return {
        "img": torch.stack([IMAGES[sample] for sample in samples]),
        "places": torch.tensor([[5 * box % 9, sample] for sample in samples for box in range(BOXES[sample])]),
        "batch_idx": torch.tensor([n for n, sample in enumerate(samples) for _ in range(BOXES[sample])]),
    }


def cut(batch, count):
    size = len(batch["img"]) // count
    for start in range(0, len(batch["img"]), size):
        mine = (batch["batch_idx"] >= start) & (batch["batch_idx"] < start + size)
        yield {
            "img": batch["img"][start : start + size],
            "places": batch["places"][mine],
            "batch_idx": batch["batch_idx"][mine] - start,
        }


def loss_of_boxes(model, batch):
    y, x = batch["places"].unbind(1)
    at = model(batch["img"])[batch["batch_idx"], :, y, x]
    return (at - 1).square().sum(), at.shape[0]


def step_on_boxes(strategy, given=cut):
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    torch.manual_seed(0)
    model = ff.parallelize(Plain(), mesh)
    share, replica = 8 // strategy.data, mesh.get_local_rank("data")
    batch = collated(range(replica * share, (replica + 1) * share))
    if strategy.parts > 1:
        batch["img"] = ff.shard(batch["img"], mesh)
    step = ff.TrainStep(model, loss_of_boxes, torch.optim.SGD(model.parameters(), lr=0.5), strategy, cut=given)
    return step(batch).loss, [parameter.detach() for parameter in model.parameters()]


def test_boxes_of_all_images_in_one_tensor_are_cut_as_the_recipe_says():
    loss, parameters = step_on_boxes(ff.Strategy())
    for strategy in (
        ff.Strategy(microbatches=4),
        ff.Strategy(width=2, microbatches=2),
        ff.Strategy(data=2, microbatches=2),
    ):
        for found in rank_group(strategy.ranks).run(step_on_boxes, strategy):
            assert found[0] == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(found[1], parameters, rtol=1e-10, atol=1e-13)
    for number in (1, 5):
        with pytest.raises(RecipeError, match=rf"recipe.cut\(batch, 4\) gave {number} batches; it must give 4"):
            step_on_boxes(ff.Strategy(microbatches=4), lambda batch, count, number=number: [batch] * number)


def test_a_recipe_that_cuts_is_simulated():
    recipe = ff.Recipe(
        model=Plain,
        loss=loss_of_boxes,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        data=lambda: range(8),
        collate=collated,
        batch_size=8,
        cut=cut,
    )
    whole, sliced = (ff.simulate(recipe, ff.Strategy(microbatches=count), "V100-16GB") for count in (1, 4))
    assert sliced.peak_bytes < whole.peak_bytes
