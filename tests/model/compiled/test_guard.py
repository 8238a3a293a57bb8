"""What a capture may have read: a change of it is seen, and equal blocks are told to be equal."""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fullframe.model.compiled.guard import Guard, memory

FACTOR = 2.0


class Config:
    def __init__(self) -> None:
        self.gain, self.sizes = 1.0, [1, 2]


CONFIG = Config()


@dataclass(slots=True)
class Slots:
    gain: float = 1.0
    sizes: list[int] = field(default_factory=list)


class Named(dict[str, Any]):
    """A dict with attributes."""

    __getattr__ = dict.__getitem__


class Hidden:
    __slots__ = ("__gain",)

    def __init__(self) -> None:
        self.change(1.0)

    def change(self, gain: float) -> None:
        self.__gain = gain


SLOTS, DROP, HIDDEN = Slots(), nn.Dropout(), Hidden()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.config, self.flags, self.table = CONFIG, [1.0, [2.0]], {"a": 1}
        self.register_buffer("kept", torch.zeros(2))
        self.slots, self.others = SLOTS, [nn.Sequential(nn.ReLU())]
        self.bound = partial(Config.__init__, CONFIG)
        self.last, self.named, self.hidden = deque([1.0], maxlen=2), Named(a=1), HIDDEN

    def forward(self, x: Tensor) -> Tensor:
        return DROP(self.inner(x)) * FACTOR  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda block: setattr(block, "gain", 2.0),
    "a number inside": lambda block: setattr(block.inner[1], "eps", 1e-3),
    "a mode": lambda block: block.inner[1].eval(),
    "a list": lambda block: block.flags.__setitem__(0, 3.0),
    "a list in a list": lambda block: block.flags[1].append(3.0),
    "a key": lambda block: block.table.update(b=block.table.pop("a")),
    "a dict": lambda block: block.table.update(a=2),
    "a configuration": lambda block: setattr(CONFIG, "gain", 2.0),
    "a list of a configuration": lambda block: CONFIG.sizes.append(3),
    "a deque": lambda block: block.last.rotate() or block.last.append(2.0),
    "an attribute of a dict": lambda block: setattr(block.named, "gain", 2.0),
    "a private slot": lambda block: block.hidden.change(2.0),
    "a slot": lambda block: setattr(block.slots, "gain", 2.0),
    "a list in a slot": lambda block: block.slots.sizes.append(1),
    "a slot that is gone": lambda block: delattr(block.slots, "gain"),
    "a module in a list": lambda block: block.others[0][0].eval(),
    "another module in a list": lambda block: block.others[0].append(nn.ReLU()),
    "a module that is a global": lambda block: DROP.train(not DROP.training),
    "a hook": lambda block: block.inner[0].register_forward_hook(lambda *args: None),
    "another module": lambda block: block.inner.__setitem__(0, nn.Linear(2, 2)),
    "another parameter": lambda block: setattr(block.inner[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "another buffer": lambda block: setattr(block, "kept", torch.ones(2)),
    "a method": lambda block: setattr(block.inner, "forward", lambda x: x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CONFIG", Config())
    monkeypatch.setitem(globals(), "SLOTS", Slots())
    block = Block()
    guard = Guard(block)
    assert guard.holds()
    CHANGES[name](block)
    assert not guard.holds()


def test_a_global_number_that_forward_reads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(Block())
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert not guard.holds()


def test_of_a_large_model_the_last_module_is_seen_too() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(400)))
    last = model[-1]
    last.flags = [1]
    guard = Guard(model)
    last.flags.append(2)
    assert not guard.holds()
    guard = Guard(model)
    last.register_forward_hook(lambda *args: None)
    assert not guard.holds() and not guard.refusal


def test_more_than_can_be_looked_at_is_refused() -> None:
    block = Block()
    block.table["b"] = [[number] for number in range(3000)]  # type: ignore[assignment]
    why = "its attribute table holds too many lists, dicts and objects to look at before each call"
    assert Guard(block).refusal == why


DRAWS: dict[str, Callable[[], Any]] = {
    "Generator": np.random.default_rng,
    "Generator in a list": lambda: [[np.random.default_rng()]],
    "Generator's method": lambda: np.random.default_rng().random,
    "count": itertools.count,
    "count's method": lambda: itertools.count().__next__,
    "count for what is missing": lambda: defaultdict(itertools.count().__next__),
    "generator": lambda: (n for n in range(3)),
    "ndarray of objects": lambda: np.array([[1]], dtype=object),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_may_change_unseen_is_refused(name: str) -> None:
    block = Block()
    block.table["b"] = DRAWS[name]()
    kind = name.partition(" ")[0].partition("'")[0]
    assert Guard(block).refusal == f"its attribute table is or holds a {kind}, which may change unseen"


def test_a_zero_is_told_from_another_by_its_sign() -> None:
    blocks = [nn.Identity() for _ in range(2)]
    blocks[0].shift, blocks[1].shift = 0.0, -0.0  # type: ignore[assignment]
    assert Guard(blocks[0]).structure != Guard(blocks[1]).structure


def test_a_hook_on_a_module_that_it_does_not_own_may_do_anything() -> None:
    block = Block()
    assert not Guard(block).has_hooks
    block.others[0][0].register_forward_hook(lambda *args: None)
    assert Guard(block).has_hooks


def test_what_a_step_changes_is_no_change() -> None:
    block = Block()
    guard = Guard(block)
    block(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(block.parameters(), 0.1).step()
    block.zero_grad()
    assert guard.holds() and not guard.has_hooks and not guard.gives_outputs


def test_equal_blocks_share_a_structure_and_others_do_not() -> None:
    first, second, third, fourth = Block(), Block(), Block(), Block()
    third.flags[0] = 5.0
    fourth.config = Config()
    assert Guard(first).structure == Guard(second).structure
    assert hash(Guard(first).structure) == hash(Guard(second).structure)
    assert len({Guard(block).structure for block in (first, second, third, fourth)}) == 3


def test_tied_parameters_are_one_tensor_in_two_places() -> None:
    tied, apart = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    guard = Guard(tied)
    assert len(guard.tensors) == 3 and [number for _, _, number in guard.places] == [0, 1, 0, 2]
    assert guard.structure != Guard(apart).structure


def test_a_hook_on_a_module_inside_may_do_anything() -> None:
    block = Block()
    block.register_forward_hook(lambda *args: None)  # of the block itself: it runs outside
    assert not Guard(block).has_hooks
    block.inner.register_forward_pre_hook(lambda *args: None)
    assert Guard(block).has_hooks


def test_a_tensor_that_is_no_parameter_tells_blocks_apart() -> None:
    blocks = [nn.Identity() for _ in range(2)]
    for block in blocks:
        block.scale = SimpleNamespace(value=torch.ones(1))  # type: ignore[assignment]
    assert Guard(blocks[0]).structure != Guard(blocks[1]).structure


def test_what_parameters_are_is_measured_anew_only_where_it_has_changed() -> None:
    block = Block()
    guard = Guard(block)
    first = guard.measures()
    torch.optim.SGD(block.parameters(), 0.1).step()
    assert guard.measures() is first
    block.inner.requires_grad_(False)
    frozen = guard.measures()
    assert frozen is not first and frozen.facts != first.facts
    block.inner.requires_grad_(True)
    assert guard.measures() is first
    block.inner[0].weight.data = torch.ones(4, 4)[::2, ::2]
    strided = guard.measures()
    assert strided.facts != first.facts and strided.memory != first.memory


def test_memory_that_tensors_share_is_seen() -> None:
    x = torch.ones(4, 4)
    assert memory(x) == memory(x[1:, 1:]) != memory(x.clone())
    assert memory(torch.ones(0)) != memory(torch.ones(0)[:0])
