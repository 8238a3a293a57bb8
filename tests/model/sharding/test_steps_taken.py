"""Steps with sharded parameters that one rank alone takes otherwise are refused on all."""

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import DivergenceError
from fullframe.model.sharding.steps_taken import begin_anew, note_step, steps_taken
from tests.rank_group import rank_group


def test_steps_are_told_by_their_options_and_number() -> None:
    def after(*rates: float) -> int:
        begin_anew()
        for rate in rates:
            note_step(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate))
        return steps_taken()

    assert after() == 0 and after(0.5, 0.25) == after(0.5, 0.25)
    assert len({after(*rates) for rates in ((), (0.5,), (0.5, 0.5), (0.5, 0.25), (0.25, 0.5))}) == 5


IN_WORDS = {
    "lr": "the optimizer's lr, group 0, is 0.1",
    "lr of the last": "the optimizer's lr, group 0, is 0.1",
    "left out": "the optimizer's lr, group 0, is 0.1",
}


def stepped(width: int, change: str) -> str:
    """Three steps; in the second rank 1 does something of its own, or before the last."""
    mesh = ff.init_mesh(width=width)
    image = ff.shard(torch.ones(1, 3, 8, 9), mesh)
    model = ff.parallelize(torch.nn.Conv2d(3, 2, 3), mesh, shard_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for number in range(3):
            apart = number == 1 and dist.get_rank() == 1
            model(image).square().mean().backward()
            if apart and change == "lr":
                optimizer.param_groups[0]["lr"] *= 2
            if apart and change == "loaded":
                model.module.load_state_dict(torch.nn.Conv2d(3, 2, 3).state_dict())
            if apart and change == "assigned":
                model.module.bias.data = torch.zeros(2)
            if not (apart and change == "left out"):
                optimizer.step()
            optimizer.zero_grad()
            if apart and change == "lr of the last":
                optimizer.param_groups[0]["lr"] *= 2
    except DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("change", ["lr", "lr of the last", "left out", "loaded", "assigned"])
def test_a_step_of_one_rank_alone_is_refused_on_all(width: int, change: str) -> None:
    start = "the ranks' optimizers have taken other steps with the sharded parameters"
    if change in IN_WORDS:
        start = f"the ranks do not take the same steps: {IN_WORDS[change]} on rank 0"
    for said in rank_group(2).run(stepped, width, change):
        assert said.startswith(start)
    assert rank_group(2).run(stepped, width, "") == ["", ""]
