"""An optimizer that needs all parameters at once is refused where it is given some of them; others are not."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.separable import require_separable
from tests.rank_group import rank_group
from tests.training.tiny import loss, recipe


class Own(Optimizer):
    """What a user might write: momentum by itself, or with something taken over all parameters."""

    def __init__(self, params: Any, of_all: str = ""):
        super().__init__(params, {"lr": 0.1, "estimate": 1e-6})
        self.of_all, self.steps, self.first = of_all, 0, self.param_groups[0]["params"][0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm() if self.of_all == "norm" else 1.0
            rate = max(group["lr"], group["estimate"])
            for p in held:
                state = self.state[p]
                begun = torch.zeros_like if self.of_all != "noise at first" else torch.randn_like  # as Gravity does
                buffer = state["momentum"] if state else state.setdefault("momentum", begun(p))
                buffer.mul_(0.9).add_(p.grad / norm)
                noise = torch.randn_like(p) if self.of_all == "noise" else 0.0
                if self.of_all == "decay":  # as AdamS does
                    p.mul_(1 - 1e-4 * rate / torch.stack([q.grad.square().mean() for q in held]).mean().sqrt())
                    p.sub_(rate * buffer.sigmoid())
                else:
                    p.sub_(rate * (buffer + noise) * p.norm() / buffer.norm())
            if held and self.of_all == "estimate":  # as Prodigy finds how far the start is: it enters the next step
                group["estimate"] = max(group["estimate"], float(sum(p.grad.abs().mean() for p in held)) * 1e-5)


def net() -> list[nn.Parameter]:
    return [*nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).parameters()]


@pytest.mark.parametrize("make", [Own, torch.optim.AdamW, torch.optim.Adafactor])
def test_one_that_updates_each_by_itself_is_taken_and_left_as_it_was(make: Any) -> None:
    held = net()
    optimizer = make(held)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: called.append(given))
    before, state = copy.deepcopy([p.data for p in held]), torch.get_rng_state()
    require_separable(optimizer, "shard_optimizer")
    assert all(map(torch.equal, before, held))
    assert not optimizer.state and not called and getattr(optimizer, "steps", 0) == 0
    assert optimizer.param_groups[0].get("estimate", 1e-6) == 1e-6
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("of_all", ["norm", "estimate", "noise", "noise at first", "decay"])
def test_one_that_needs_all_is_refused(of_all: str) -> None:
    with pytest.raises(StrategyError, match="Own updates a parameter by the gradients of others too; leave out shard_"):
        require_separable(Own(net(), of_all), "shard_optimizer")


class Single(Own):
    """Of single precision, as kernels written by hand are."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.dtype != torch.float32 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("expected scalar type Float")
        super().step()


def test_one_of_single_precision_is_tried_in_it() -> None:
    require_separable(Single(net()), "shard_optimizer")
    with pytest.raises(StrategyError, match="Single updates a parameter by the gradients of others too"):
        require_separable(Single(net(), "norm"), "shard_optimizer")


class Fixed(Own):
    """It can be stepped with the parameters of its user alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0] is not self.first:
            raise KeyError("whose is it?")


def test_one_that_cannot_be_tried_is_refused() -> None:
    with pytest.raises(StrategyError, match="cannot be told, as on three small ones it raised KeyError: 'whose is it"):
        require_separable(Fixed(net()), "update_in_backward")


def refused(option: str, of_all: str) -> str:
    job = recipe(optimizer=lambda parameters: Own(parameters, of_all))
    strategy = ff.Strategy(data=2, **{option: True})  # type: ignore[arg-type]
    model = ff.parallelize(job.model(), ff.init_mesh())
    try:
        ff.TrainStep(model, loss, job.optimizer(model.parameters()), strategy)  # type: ignore[arg-type]
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("option", ["shard_optimizer", "update_in_backward"])
def test_training_refuses_it_on_all_ranks(option: str) -> None:
    assert all(option in said for said in rank_group(2).run(refused, option, "norm"))


def test_one_memory_of_two_parameters_is_refused() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [*one.parameters()]}, {"params": [*other.parameters()]}], lr=0.1)
    require_separable(optimizer, "shard_optimizer")
    other.bias.data = one.bias.data
    with pytest.raises(StrategyError, match=r"parameter 1 of group 0 and parameter 1 of group 1 share their memory"):
        require_separable(optimizer, "shard_optimizer")


class Holding(torch.optim.Optimizer):
    """Its steps are those of the optimizer that it holds, whose parameters are the user's."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_one_that_does_not_touch_what_it_is_tried_on_is_refused() -> None:
    with pytest.raises(StrategyError, match="cannot be told, as a copy of it updates none"):
        require_separable(Holding(torch.optim.SGD(net(), 0.1)), "update_in_backward")
