"""What functions and modules remember of a run on fake tensors is forgotten."""

import gc
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fullframe as ff
from fullframe.model.kept_fakes import no_fakes_kept
from fullframe.techniques.stages.models import kept_bytes

GRIDS: dict[int, Tensor] = {}
GRID: Tensor | None = None
PAIR: Any = None


@lru_cache(maxsize=4)
def remembered(columns: int) -> Tensor:
    return torch.arange(float(columns))


@cache
def pair_remembered(columns: int) -> tuple[Tensor, int]:
    return torch.arange(float(columns)), columns


def in_a_dict(columns: int) -> Tensor:
    if columns not in GRIDS:
        GRIDS[columns] = torch.arange(float(columns))
    return GRIDS[columns]


def in_a_global(columns: int) -> Tensor:
    global GRID
    if GRID is None or len(GRID) != columns:
        GRID = torch.arange(float(columns))
    return GRID


def in_a_new_global(columns: int) -> Tensor:
    if "NEW" not in globals():
        globals()["NEW"] = torch.arange(float(columns))
    new: Tensor = globals()["NEW"]
    return new


WAYS: list[Callable[[int], Tensor]] = [
    remembered,
    lambda columns: pair_remembered(columns)[0],
    in_a_dict,
    in_a_global,
    in_a_new_global,
]


@pytest.fixture(autouse=True)
def _nothing_yet() -> None:
    global GRID, PAIR
    GRID = PAIR = None
    GRIDS.clear()
    remembered.cache_clear(), pair_remembered.cache_clear()
    globals().pop("NEW", None)


class Net(nn.Module):
    """Positions are added to what a convolution makes."""

    def __init__(self, positions: Callable[[int], Tensor]):
        super().__init__()
        self.convolution, self.positions = nn.Conv2d(3, 2, 3, padding=1), positions
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        columns = x.shape[-1]
        if columns not in self.kept:
            self.kept[columns] = self.positions(columns)
        return self.convolution(x) + self.kept[columns]


def recipe(positions: Callable[[int], Tensor]) -> ff.Recipe:
    return ff.Recipe(
        model=lambda: Net(positions),
        loss=lambda model, batch: model(batch["image"]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [{"image": torch.ones(3, 8, 9)}] * 4,
        batch_size=2,
    )


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_simulation_leaves_nothing_for_real_steps(way: int, is_frozen: bool) -> None:
    if is_frozen:
        gc.freeze()
    try:
        for strategy in (ff.Strategy(), ff.Strategy(width=2)):
            ff.simulate(recipe(WAYS[way]), strategy, "2xcpu")
    finally:
        gc.unfreeze()
    assert torch.equal(WAYS[way](9), torch.arange(9.0))


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_nor_does_a_trial_of_layers_under_autocast(way: int) -> None:
    net = Net(WAYS[way])
    with torch.autocast("cpu", torch.bfloat16):
        assert len(kept_bytes([net], torch.ones(2, 3, 8, 10))) == 1
    assert not net.kept and torch.equal(WAYS[way](10), torch.arange(10.0))


def test_what_was_there_is_there_again() -> None:
    global GRID, PAIR
    fake, other = FakeTensorMode(), FakeTensorMode()
    before = GRID = torch.zeros(3)
    GRIDS[3] = before
    with other:
        PAIR = of_another = torch.ones(2)
    with no_fakes_kept(fake) as found, fake:
        in_a_global(4), in_a_dict(4), remembered(4)
        PAIR = [GRID]  # not looked into: it is no dict
    assert sorted(found) == ["GRID", "GRIDS", "cache of remembered"]
    assert GRID is before and GRIDS[3] is before and 4 not in GRIDS
    assert isinstance(of_another, FakeTensor)


def test_of_a_mode_all_others_are_left() -> None:
    fake, other = FakeTensorMode(), FakeTensorMode()
    with no_fakes_kept(fake) as found, other:
        in_a_dict(5)
    assert not found and isinstance(GRIDS[5], FakeTensor)
    with no_fakes_kept():
        with no_fakes_kept() as inner, fake:
            in_a_dict(6)
        assert not inner and isinstance(GRIDS[6], FakeTensor)
    assert 5 not in GRIDS and 6 not in GRIDS
