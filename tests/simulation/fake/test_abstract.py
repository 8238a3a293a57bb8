"""A recipe's model and batch without their memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fullframe.errors import RecipeError
from fullframe.recipe import Recipe
from fullframe.simulation.fake.abstract import (
    LIKE_THE_FIRST,
    abstract_batch,
    abstract_model,
    plain_tensors,
    read_sample,
)


def recipe(**changed: Any) -> Recipe:
    facts: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 2),
        "loss": lambda model, batch: model(batch).mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "data": lambda: [{"x": torch.arange(3.0), "name": "a"}] * 4,
        "batch_size": 4,
    }
    return Recipe(**{**facts, **changed})


class Large(nn.Module):
    """64 GiB of parameters, of which one is shared and one frozen; and a small buffer computed from numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2**16, 2**18, bias=False)
        self.two = nn.Linear(2**16, 2**18, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("steps", torch.linspace(0, 1, 5).cumsum(0))
        self.register_buffer("map", torch.empty(2**16, 2**15))
        assert float(self.steps[-1]) == 2.5  # small tensors are real while the model is built


def test_what_is_large_is_never_allocated() -> None:
    with FakeTensorMode() as fake:
        pass
    model = abstract_model(recipe(model=Large), fake)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(isinstance(t.detach(), FakeTensor) and t.device.type == "cpu" for t in tensors)
    assert model.one.weight is model.two.weight and model.one.weight.requires_grad
    assert not model.frozen.requires_grad and model.map.shape == (2**16, 2**15)
    assert nn.Linear(1, 1).weight.device.type == "cpu"  # torch is as before


class Sparse(nn.Module):
    """As a tomograph's projection matrix, of which most elements are zero."""

    def __init__(self, size: int, persistent: bool) -> None:
        super().__init__()
        place = torch.arange(size).expand(2, size)
        matrix = torch.sparse_coo_tensor(place, torch.ones(size), (size, size), check_invariants=True)
        if persistent:
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = matrix


@pytest.mark.parametrize(("size", "persistent"), [(3, True), (2000, True), (2000, False)])
def test_a_sparse_tensor_is_not_taken_for_a_dense_one(size: int, persistent: bool) -> None:
    with pytest.raises(RecipeError, match=rf"holds a sparse tensor \({size}, {size}\) \(torch\.sparse_coo\)"):
        abstract_model(recipe(model=lambda: Sparse(size, persistent)), FakeTensorMode())


class Asking(nn.Module):
    """As networks do that ask their backbone for the size of its map, or fill a buffer beside a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4))
        self.register_buffer("table", torch.zeros(3))
        if how == "runs":
            self.head = nn.Linear(self.backbone(torch.zeros(1, 3, 9, 9)).shape[-1], 2)
        elif how == "gives":  # the first offsets of deformable attention
            self.head = nn.Linear(4, 2)
            self.head.bias.data = torch.arange(2.0).cos()
        elif how == "marks":  # the channels that LoRA adapts
            self.head = nn.Linear(4, 2)
            self.adapted = self.head.weight.new_zeros(2, dtype=torch.bool)
            self.adapted[1:] = True
        else:
            self.table.copy_(torch.arange(3.0, device=self.backbone[0].weight.device))
            self.head = nn.Linear(4, 2)


@pytest.mark.parametrize("how", ["runs", "fills", "gives", "marks"])
def test_a_constructor_may_compute_with_its_parameters(how: str) -> None:
    model = abstract_model(recipe(model=lambda: Asking(how)), FakeTensorMode())
    assert model.head.weight.shape == (2, 4)
    assert how != "marks" or model.adapted.tolist() == [False, True]
    assert all(isinstance(t.detach(), FakeTensor) for t in (*model.parameters(), *model.buffers()))


class Marked(nn.Module):
    """Parameters with marks, set before and after the module has them."""

    def __init__(self, adam: bool = True) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4))
        weight.rate = 0.5
        self.weight, self.bias = weight, nn.Parameter(torch.ones(4))
        weight.adam, self.bias.adam = adam, not adam


def test_what_is_set_on_parameters_stays() -> None:
    model = abstract_model(recipe(model=Marked), FakeTensorMode())
    assert model.weight.adam is True and model.bias.adam is False and model.weight.rate == 0.5
    assert isinstance(model.weight, nn.Parameter) and not hasattr(model.bias, "rate")


class Holding(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.grid, self.offsets = torch.zeros(2**15, 2**15), [torch.empty(2**21), torch.ones(3)]
        self.table, self.tied = torch.ones(3).cumsum(0).repeat(2**19), (self.weight, "tied")
        self.grid_again, self.scale, self.names = self.grid, torch.tensor(2.0), ["a"]


def test_large_tensors_that_are_mere_attributes_are_fake_too() -> None:
    model = abstract_model(recipe(model=Holding), FakeTensorMode())
    assert all(isinstance(t, FakeTensor) for t in (model.grid, model.offsets[0], model.table))
    assert model.grid is model.grid_again and model.tied[0] is model.weight and model.tied[1] == "tied"
    assert not isinstance(model.offsets[1], FakeTensor) and float(model.scale) == 2.0 and model.names == ["a"]
    held = plain_tensors(model)
    assert len(held) == 7 and model.table in set(held)


def test_a_model_that_cannot_be_built_is_the_recipe_s() -> None:
    def broken() -> nn.Module:
        raise KeyError("weights")

    with pytest.raises(RecipeError, match=r"recipe.model\(\) gives no model: KeyError"):
        abstract_model(recipe(model=broken), FakeTensorMode())


def test_the_first_sample_is_read_with_its_own_random_state() -> None:
    class Drawn(torch.utils.data.Dataset[Tensor]):
        def __getitem__(self, number: int) -> Tensor:
            return torch.rand(3) + number

    before = torch.get_rng_state()
    first = read_sample(recipe(data=Drawn))
    assert torch.equal(first, read_sample(recipe(data=Drawn))) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, read_sample(recipe(data=Drawn, seed=7)))
    assert read_sample(recipe(sample=lambda: "given")) == "given"
    with pytest.raises(RecipeError, match=r"recipe.data\(\) gives no sample: .*give recipe.sample"):
        read_sample(recipe(data=list))


def test_a_batch_is_collated_from_fakes_or_where_numbers_are_wanted_from_the_sample() -> None:
    def reads(samples: list[dict[str, Tensor]]) -> Tensor:
        assert float(samples[0]["x"][2]) == 2.0
        return torch.stack([s["x"] for s in samples])

    fake, sample = FakeTensorMode(), read_sample(recipe())
    batch = abstract_batch(recipe(), sample, 4, fake)
    assert batch["name"] == ["a"] * 4 and batch["x"].shape == (4, 3) and isinstance(batch["x"], FakeTensor)
    other = abstract_batch(recipe(collate=reads), sample, 5, fake)
    assert other.shape == (5, 3) and isinstance(other, FakeTensor)
    with pytest.raises(RecipeError, match=r"recipe.collate gives no batch of 2 samples"):
        abstract_batch(recipe(collate=lambda samples: samples[9]), sample, 2, fake)


@pytest.mark.parametrize("reads", [False, True])
def test_samples_that_stay_apart_in_a_batch_have_memory_each(reads: bool) -> None:
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        assert not reads or float(samples[0]["x"][2]) == 2.0
        return {"x": torch.stack([s["x"] for s in samples]), "masks": [s["x"][1:] for s in samples]}

    said: list[str] = []
    batch = abstract_batch(recipe(collate=collate), {"x": torch.arange(3.0)}, 3, FakeTensorMode(), said.append)
    held = [batch["x"], *batch["masks"]]
    assert all(isinstance(t, FakeTensor) for t in held) and said == [LIKE_THE_FIRST]
    assert len({t.untyped_storage()._cdata for t in held}) == 4
    abstract_batch(recipe(), {"x": torch.arange(3.0), "y": [torch.ones(2)]}, 3, FakeTensorMode(), said.append)
    assert len(said) == 1
