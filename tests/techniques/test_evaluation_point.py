"""Schedule-free optimizers: the run steps at one point, and evaluates, keeps and returns the other."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.evaluation_point import at_evaluation_point, has_evaluation_point
from fullframe.training.checkpoints.export import export
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Plain, recipe


class Averaging(torch.optim.Optimizer):
    """Steps `z`, averages it to `x`, and leaves each parameter between them, as Schedule-Free SGD does."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.5, "count": 0})
        self.placed("between")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(z=p.clone(), x=p.clone())
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / group["count"])
        self.placed("between")

    @torch.no_grad()
    def placed(self, where: str) -> None:
        for p, state in self.state.items():
            p.copy_(state["x"] if where == "average" else torch.lerp(state["z"], state["x"], 0.9))


class Moving(Averaging):
    """The same, which wants to be told, as the libraries' do."""

    told = False

    def train(self) -> None:
        self.told = True
        self.placed("between")

    def eval(self) -> None:
        self.told = False
        self.placed("average")

    def step(self, closure: Any = None) -> None:
        assert self.told, "not in train mode"
        super().step()


def run(kind: type, strategy: ff.Strategy, folder: Any, steps: int, **options: Any) -> tuple[Any, Any]:
    made = []

    def optimizer(parameters: Any) -> Any:
        made.append(kind(parameters))
        return made[0]

    job = recipe(model=Plain, optimizer=optimizer, evaluation_data=Frames, evaluate=measure, evaluate_every=2)
    model = ff.fit(job, strategy, folder, steps=steps, **options)
    averages = [made[0].state[p]["x"] for group in made[0].param_groups for p in group["params"]]
    return [p.detach().clone() for p in model.parameters()], averages


def measure(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    """The parameters' sum, which is the same on every rank."""
    return {"weights": (torch.stack([p.detach().sum() for p in model.parameters()]).sum(), torch.tensor(1.0))}


def on_ranks(folder: Any) -> tuple[Any, ...]:
    told, averages = run(Moving, ff.Strategy(width=2), folder / "told", 6, checkpoint_every=2)
    untold, wanted = run(Averaging, ff.Strategy(width=2), folder / "untold", 6)
    run(Moving, ff.Strategy(width=2), folder / "parts", 3)
    parts, _ = run(Moving, ff.Strategy(width=2), folder / "parts", 6, resume=True)
    with pytest.raises(StrategyError, match="shard_parameters"):
        run(Moving, ff.Strategy(data=2, shard_optimizer=True), folder / "refused", 1)
    return told, averages, untold, wanted, parts


def lines(folder: Any, name: str) -> list[Any]:
    return [json.loads(line).get(name) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_average_is_evaluated_kept_and_returned_and_the_steps_are_the_same(tmp_path: Any) -> None:
    for told, averages, untold, wanted, parts in rank_group(2).run(on_ranks, tmp_path):
        assert all(map(torch.equal, averages, wanted)), "the steps are those of a run that never looks at the average"
        assert all(map(torch.equal, told, wanted)) and not torch.equal(untold[0], wanted[0])
        assert all(map(torch.equal, parts, told))
    assert lines(tmp_path / "told", "loss") == lines(tmp_path / "untold", "loss")
    export(tmp_path / "told", tmp_path / "weights.safetensors")
    kept = load_file(tmp_path / "weights.safetensors")
    assert all(map(torch.equal, (kept[name] for name, _ in Plain().named_parameters()), told))
    measured = lines(tmp_path / "told", "weights")
    assert measured[5] == pytest.approx(sum(float(p.sum()) for p in told), rel=1e-9)
    assert measured[1] != lines(tmp_path / "untold", "weights")[1]


def test_other_optimizers_are_left_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not has_evaluation_point(torch.optim.SGD([parameter]))
    with at_evaluation_point(torch.optim.SGD([parameter])):
        assert parameter.tolist() == [1, 1]
