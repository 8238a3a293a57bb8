"""What optimizers are set to, in words, and of which it is compared."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import fullframe as ff
from fullframe.errors import DivergenceError
from fullframe.model.same.optimizers import Stepped, options_of
from tests.rank_group import rank_group


def test_plain_values_of_every_group_by_name() -> None:
    one, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    groups = [{"params": [one]}, {"params": [other], "lr": torch.tensor(0.5), "betas": (0.8, 0.9)}]
    found = options_of(torch.optim.Adam(groups, lr=0.1, capturable=True))
    assert found["the optimizer"] == "Adam"
    assert found["the optimizer's lr, group 0,"] == 0.1 and found["the optimizer's betas, group 1,"] == (0.8, 0.9)
    assert not {"the optimizer's lr, group 1,", "the optimizer's params, group 0,"} & found.keys()


def test_optimizers_of_a_model_that_have_stepped_are_known_by_their_groups_until_they_are_compared() -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    known, none = Stepped(model), ["no optimizer of all parameters has stepped since the backward pass before"]
    weight, bias, part, others = (torch.optim.SGD(each, lr=0.5) for each in (
        [model.weight], [model.bias], [model.weight], other.parameters(),
    ))  # fmt: skip
    for each in (weight, weight, part, others):
        each.step()
    assert known.said().options == none
    bias.step()
    bias.param_groups[0]["lr"], part.param_groups[0]["lr"] = 0.25, 0.125
    rates = [f"the optimizer's lr, group 0, is {lr}" for lr in (0.5, 0.25)]
    assert [said for said in known.said().options if "'s lr" in said] == rates
    known.compared()
    assert known.said().options == none


def sharded_states(width: int) -> list[float]:
    """Weights after steps of torch's optimizer whose states are sharded: there is one parameter for two ranks."""
    mesh, image = ff.init_mesh(width=width), torch.arange(300.0).view(1, 3, 10, 10).cos()
    torch.manual_seed(0)
    model = ff.parallelize(torch.nn.Conv2d(3, 2, 3, bias=False), mesh)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(ff.shard(image, mesh)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.weight.flatten().tolist()


@pytest.mark.parametrize("width", [1, 2])
def test_an_optimizer_that_steps_with_each_ranks_part_alone_is_no_other_step(width: int) -> None:
    first, second = rank_group(2).run(sharded_states, width)
    assert first == second


class WeightedLosses(torch.nn.Module):
    """Two losses, whole numbers, by weights that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.variances = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        difference = found - wanted
        losses = torch.stack([difference.abs().mean(), difference.square().mean()])
        return (losses * (-self.variances).exp() + self.variances).sum()


def weighted(width: int, is_parallel: bool, own_seed: bool, shard_parameters: bool) -> list[float] | str:
    """The weights after three steps on samples of which each replica has its own, or what was said."""
    mesh = ff.init_mesh(width=width)
    torch.manual_seed(0)
    network = torch.nn.Conv2d(1, 1, 3, padding=1).double()
    model = ff.parallelize(network, mesh, shard_parameters=shard_parameters)
    criterion = WeightedLosses()
    if own_seed:
        criterion.variances.data += mesh.get_rank() if width == 1 else mesh["width"].get_local_rank()
    losses = ff.parallelize(criterion, mesh) if is_parallel else criterion
    optimizer = torch.optim.SGD([*model.parameters(), *losses.parameters()], lr=0.1)
    samples = torch.arange(198.0, dtype=torch.float64).view(2, 1, 9, 11).sin()
    mine = samples if mesh["data"].size() == 1 else samples[mesh["data"].get_local_rank()][None]
    try:
        for _ in range(3):
            optimizer.zero_grad()
            losses(model(ff.shard(mine, mesh)), ff.shard(mine.cos(), mesh)).backward()
            optimizer.step()
    except DivergenceError as error:
        return str(error)
    return criterion.variances.tolist()


@pytest.mark.parametrize("shard_parameters", [False, True])
def test_a_criterion_whose_weights_meet_whole_numbers_is_refused_where_nobody_averages_them(
    shard_parameters: bool,
) -> None:
    ranks = rank_group(2)
    for said in ranks.run(weighted, 1, False, False, shard_parameters):
        assert isinstance(said, str) and "no parallel model holds" in said and "group 0, shape (2,)" in said
    expected = pytest.approx(rank_group(1).run(weighted, 1, False, False, False)[0], rel=1e-12)
    assert ranks.run(weighted, 1, True, False, shard_parameters) == [expected, expected]


def test_one_whose_weights_each_rank_of_a_replica_has_drawn_is_refused_too() -> None:
    ranks = rank_group(2)
    assert all("no parallel model holds" in said for said in ranks.run(weighted, 2, False, True, False))
    expected = pytest.approx(rank_group(1).run(weighted, 1, False, False, False)[0], rel=1e-12)
    assert ranks.run(weighted, 2, False, False, False) == [expected, expected]
