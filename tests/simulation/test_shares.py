"""Parts of split tensors that are uneven: the rank that has most is found from another one's run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation import simulate as simulation
from fullframe.simulation.fake.world import fake_job
from fullframe.simulation.shares import Shares
from fullframe.spatial.shard import even_spec
from fullframe.spatial.tensor import wrap


class Changed(nn.Module):
    """A network on what `change` makes of its frame."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.layers = change, nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.change(x))  # type: ignore[no-any-return]


def recipe(change: Callable[[Tensor], Tensor], **changed: Any) -> ff.Recipe:
    fields: dict[str, Any] = {
        "model": lambda: Changed(change),
        "loss": lambda model, batch: model(batch["image"]).square().mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "data": lambda: None,
        "sample": lambda: {"image": torch.zeros(3, 32, 64)},
        "batch_size": 2,
    }
    return ff.Recipe(**fields | changed)


@pytest.mark.parametrize(
    ("change", "strategy"),
    [
        (lambda x: F.pad(x, (0, 0, 0, 32)), ff.Strategy(height=2)),  # below, to a square
        (lambda x: F.pad(x, (0, 64)), ff.Strategy(width=4)),
        (lambda x: F.pad(x, (64, 0, 32, 0)), ff.Strategy(data=2, height=2, width=2)),
    ],
)
def test_the_rank_that_has_most_is_found(change: Callable[[Tensor], Tensor], strategy: ff.Strategy) -> None:
    found = ff.simulate(recipe(change), strategy, "cpu")
    of_ranks = [ff.simulate(recipe(change), strategy, "cpu", rank=rank) for rank in range(strategy.parts)]
    assert found.peak_bytes == max(each.peak_bytes for each in of_ranks) > 1.5 * min(e.peak_bytes for e in of_ranks)
    assert found.step_seconds == max(each.step_seconds for each in of_ranks)


def test_even_parts_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    of_rank = simulation._of_rank
    monkeypatch.setattr(simulation, "_of_rank", lambda *args: ranks.append(args[-1]) or of_rank(*args))
    ff.simulate(recipe(lambda x: x * 2), ff.Strategy(width=4), "cpu")
    assert ranks == [1]


def test_what_each_rank_has_more() -> None:
    with fake_job(1, 6):
        mesh = ff.init_mesh(height=2, width=3)
        shares = Shares(spatial_of(mesh, draw_seed=lambda generator: 0))
        assert shares.fuller() is None
        even = wrap(torch.ones(100, 2, 3, 4), even_spec((100, 2, 6, 12), mesh))
        shares.add(even)
        shares.add((1, even))
        assert shares.fuller() is None
        shares.add([wrap(torch.ones(1, 1, 2, 3), even_spec((1, 1, 3, 10), mesh))])  # rank 0 has 8 and this one 6
        assert shares.fuller() is None  # which is little beside the others
        for _ in range(200):
            shares.add(wrap(torch.ones(100, 2, 2, 3), even_spec((100, 2, 3, 10), mesh)))
        assert shares.fuller() == 0
