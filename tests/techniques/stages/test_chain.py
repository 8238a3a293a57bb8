"""A rank's share of a chain."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.errors import GradientError, MeshError, RecipeError
from fullframe.techniques.stages.chain import Criterion, Segment, Stages, require_known
from tests.rank_group import RankFailure, rank_group


def shares(parts: int, bounds: tuple[int, ...] = ()) -> list[range]:
    stages = Stages(ff.init_mesh(stages=3), 1)
    stages.bounds = bounds
    assert stages.share(parts) == stages.share(parts, torch.distributed.get_rank())
    return [stages.share(parts, stage) for stage in range(3)]


def test_all_parts_in_order_and_as_even_as_can_be() -> None:
    assert rank_group(3).run(shares, 14)[1] == [range(0, 5), range(5, 10), range(10, 14)]
    assert rank_group(3).run(shares, 3)[2] == [range(0, 1), range(1, 2), range(2, 3)]
    assert rank_group(3).run(shares, 9, (0, 1, 7, 9))[0] == [range(0, 1), range(1, 7), range(7, 9)]


def test_a_mesh_without_stages() -> None:
    with pytest.raises(MeshError, match="no stages"):
        Stages(ff.init_mesh(), 1)


class Layers:
    """A chain of two layers, of which a weight is frozen."""

    def __init__(self) -> None:
        self.whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).requires_grad_(False)
        self.parts = list(self.whole)
        self.whole[1].bias.requires_grad_()

    def run(self, part: range, state: Any, inputs: Any, before: Any) -> list[Any]:
        return [self.parts[number](state) for number in part]

    def likeness(self, count: int, state: Any) -> Any:
        raise AssertionError


def test_what_is_lent_wants_the_gradients_that_the_parameters_want() -> None:
    assert [alias.requires_grad for alias in Segment(Layers(), range(2), None).lent().values()] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("loss", "got"), [(lambda y: y, r"shape \(2, 2\)"), (lambda y: 0.5, "float"), (lambda y: (y.sum(), 4), "tuple")]
)
def test_a_criterion_that_gives_no_scalar(loss: Any, got: str) -> None:
    with pytest.raises(RecipeError, match=f"the criterion must return a scalar tensor, got {got}"):
        Segment(Layers(), range(1, 2), Criterion(loss, ()))(torch.ones(2, 3), (), (), None)


def test_a_tensor_whose_gradient_would_be_lost() -> None:
    layer, x, outside = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    known = [*layer.parameters(), x.view_as(x)]
    require_known([[layer(x)]], known, 0)
    with pytest.raises(GradientError, match=r"a part on stage 1 uses a tensor of shape \(3,\)"):
        require_known([[layer(x) * outside]], known, 1)


def step_of_energy(x: torch.Tensor, weight: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    """A step down an energy, whose gradient is taken at a leaf of its own; `kept` may hold that."""
    leaf = x.detach().requires_grad_()
    kept.append(leaf)
    (slope,) = torch.autograd.grad((weight * leaf).square().sum(), leaf, create_graph=True)
    return x - slope


def test_a_leaf_that_is_let_go_of() -> None:
    weight, x, kept = nn.Parameter(torch.ones(3)), torch.ones(2, 3), list[torch.Tensor]()
    stepped = step_of_energy(x, weight, kept)
    with pytest.raises(GradientError, match=r"uses a tensor of shape \(2, 3\)"):
        require_known([[stepped]], [weight], 0)
    kept.clear()
    require_known([[stepped]], [weight], 0)


class Energetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.3, 3, dtype=torch.float64).view(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return step_of_energy(x, self.weight, [])


def energy(split: bool) -> float:
    mesh, block = ff.init_mesh(stages=2, width=1 + split), Energetic()
    loop, generator = copy.deepcopy(block), torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, generator=generator)
    run = ff.parallelize(ff.unroll(block, 4, placement="stages", mesh=mesh, microbatches=2), mesh)
    run(ff.shard(x, mesh) if split else x).square().sum().backward()
    for _ in range(4):
        x = loop(x)
    x.square().sum().backward()
    return float((block.weight.grad - loop.weight.grad).abs().max())  # type: ignore[operator]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_the_gradient_of_an_energy_in_a_block(split: bool) -> None:
    assert max(rank_group(2 + 2 * split).run(energy, split)) < 1e-10


class Regular(nn.Module):
    """Leaves a loss of its own in an attribute, as of what came in, what went out, or its weights."""

    def __init__(self, of: str):
        super().__init__()
        self.conv, self.of = nn.Conv2d(2, 2, 3, padding=1), of
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.conv(x).relu()
        self.aux = {"input": x, "output": y, "weight": self.conv.weight}[self.of].mean()
        return y


def left_in_an_attribute(of: str, where: int, ranks: int, afterwards: bool = False) -> None:
    parts = nn.Sequential(*(Regular(of) for _ in range(4)))
    model = ff.parallelize(parts, ff.init_mesh(stages=ranks))
    strategy = ff.Strategy(stages=ranks)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y = model(batch).square().mean()
        if afterwards:
            y.backward()  # type: ignore[no-untyped-call]
            y = y.detach()
        return y + parts[where].aux  # type: ignore[operator]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ff.TrainStep(model, loss, optimizer, strategy)(torch.ones(2, 2, 5, 6))


@pytest.mark.parametrize(("of", "afterwards"), [("input", 0), ("output", 0), ("weight", 0), ("weight", 1)])
def test_a_loss_that_a_part_leaves_in_an_attribute_is_refused(of: str, afterwards: bool) -> None:
    left_in_an_attribute(of, 3, 1, afterwards)
    with pytest.raises(RankFailure, match="GradientError: the loss takes more from a part on stage"):
        rank_group(2).run(left_in_an_attribute, of, 3, 2, afterwards)
