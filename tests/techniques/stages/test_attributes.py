"""What forward keeps in a block that several stages run is one process's on all of them, or refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.stages.attributes import PartAttributes, packed, unpack
from tests.rank_group import RankFailure, rank_group


class Keeping(nn.Module):
    """What it keeps has a say in the next iteration."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64)), way
        self.kept: Any = {"counter": 0, "entries": [], "generator": torch.Generator().manual_seed(5)}.get(way)
        self.register_buffer("mean", None)
        self.mean: Tensor | None

    def forward(self, x: Tensor, measured: Tensor) -> Tensor:
        result = torch.sin(x * self.weight[0]) + measured
        if self.way == "counter":
            result, self.kept = result * self.weight[self.kept], self.kept + 1
        elif self.way == "entries":
            result = result * self.weight[len(self.kept)]
            self.kept.append(1)
        elif self.way == "generator":
            result = result * torch.rand(3, generator=self.kept)
        elif self.way == "buffer":
            self.mean = x.detach().mean() if self.mean is None else 0.9 * self.mean + x.detach().mean()
            result = result - self.mean
        elif self.way == "a first value" and self.kept is None:
            self.kept = x.detach() + 1
        elif self.way in ("hidden", "with its graph"):
            own = x if self.way == "with its graph" else x.detach()
            self.kept = own if self.kept is None else own + 0.5 * self.kept
        elif self.way == "in place":
            self.kept = x.detach().mean() if self.kept is None else self.kept.mul_(0.5).add_(x.detach().mean())
        elif self.way == "object":
            self.kept = object()
        return result * self.kept if isinstance(self.kept, Tensor) else result


def compared(way: str, microbatches: int) -> float:
    """Two calls, one after the other, against the loop in one process."""
    mesh, block = ff.init_mesh(stages=2), Keeping(way)
    loop, found, wanted = copy.deepcopy(block), torch.zeros(()), torch.zeros(())
    model = ff.parallelize(ff.unroll(block, 4, placement="stages", mesh=mesh, microbatches=microbatches), mesh)
    for number in range(2):
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        found = found + model(x, x).square().sum()
        for part in x.chunk(microbatches):
            state = part
            for _ in range(4):
                state = loop(state, part)
            wanted = wanted + state.square().sum()
    found.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    if isinstance(block.kept, torch.Generator):
        block.kept, loop.kept = torch.rand(3, generator=block.kept), torch.rand(3, generator=loop.kept)
    ours, theirs = [found, block.weight.grad], [wanted, loop.weight.grad]
    for one, kept in ((ours, block), (theirs, loop)):
        one += [torch.as_tensor(value) for value in (kept.kept, kept.mean) if value is not None]
    assert len(ours) == len(theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))  # type: ignore[operator]


@pytest.mark.parametrize("way", ["counter", "entries", "generator", "buffer", "hidden", "a first value"])
def test_it_goes_from_stage_to_stage(way: str) -> None:
    assert max(rank_group(2).run(compared, way, 1)) < 1e-10


def test_what_the_first_microbatch_keeps_goes_with_it() -> None:
    assert max(rank_group(2).run(compared, "a first value", 2)) < 1e-10


@torch.inference_mode()
def inferred(way: str) -> list[float]:
    block = Keeping(way)
    block.register_buffer("of_inference", torch.zeros(3))
    loop, x, differences = copy.deepcopy(block), torch.linspace(0.1, 1, 3, dtype=torch.float64).expand(4, 3), []
    run = ff.unroll(block, 4, placement="stages", mesh=ff.init_mesh(stages=2))
    for _ in range(2):
        state = x
        for _ in range(4):
            state = loop(state, x)
        differences.append(float((run(x, x) - state).abs().max()))
    return differences


@pytest.mark.parametrize("way", ["buffer", "in place", "hidden"])
def test_it_goes_in_inference_mode_which_counts_no_writes(way: str) -> None:
    assert np.max(rank_group(2).run(inferred, way)) < 1e-10


@pytest.mark.parametrize(
    ("way", "microbatches", "words"),
    [
        (
            "with its graph",
            1,
            "Keeping sets kept in forward to a tensor that wants a gradient",
        ),
        ("object", 1, "to an object (object)"),
        ("counter", 2, "Keeping changes its attribute kept in forward"),
        ("generator", 2, "Keeping changes its attribute kept in forward"),
    ],
)
def test_what_cannot_go_is_refused_on_all_ranks(way: str, microbatches: int, words: str) -> None:
    with pytest.raises(RankFailure) as raised:
        rank_group(2).run(compared, way, microbatches)
    assert len(raised.value.errors) == 2 and all(words in message for _, _, message, _ in raised.value.errors)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.entries, self.named = 1.5, [1, torch.ones(2)], {"a": [1]}
        self.tensor, self.draws, self.numpys = torch.ones(2), torch.Generator(), np.random.default_rng(1)


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "number": lambda m: setattr(m, "number", 2.5),
    "entries": lambda m: m.entries.append(3),
    "named": lambda m: m.named["a"].append(2),
    "tensor": lambda m: m.tensor.add_(1),
    "draws": lambda m: torch.rand(1, generator=m.draws),
    "numpys": lambda m: m.numpys.random(),
    "later": lambda m: setattr(m, "later", 1),
    "training": lambda m: m.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    module = Holder()
    attributes = PartAttributes({"a": module, "b": nn.Conv2d(1, 1, 1)})
    attributes.begin()
    assert not list(attributes.changed())
    CHANGES[name](module)
    assert [(found.path, found.name) for found in attributes.changed()] == [("a", name)]


def test_the_same_values_anew_are_no_change() -> None:
    module = Holder()
    attributes = PartAttributes({"a": module})
    attributes.begin()
    module.number, module.named = float("1.5"), {"a": [1]}
    assert not list(attributes.changed())


def test_a_generator_that_one_stage_alone_has() -> None:
    there, other = Holder(), nn.Module()
    there.number = 3
    unpack(other, "number", "a.number", packed(there, "number", "a.number"))
    assert other.number == 3
    with pytest.raises(StrategyError, match=r"Module makes a\.draws in forward, on one stage alone"):
        unpack(other, "draws", "a.draws", packed(there, "draws", "a.draws"))
