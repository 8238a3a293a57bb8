"""What optimizers are set to, in words, and of which it is compared."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import fullframe as ff
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
    assert known.options() == none
    bias.step()
    bias.param_groups[0]["lr"], part.param_groups[0]["lr"] = 0.25, 0.125
    rates = [f"the optimizer's lr, group 0, is {lr}" for lr in (0.5, 0.25)]
    assert [said for said in known.options() if "'s lr" in said] == rates
    known.compared()
    assert known.options() == none


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
