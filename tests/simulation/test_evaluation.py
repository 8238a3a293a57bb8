"""A simulated evaluation against what torch's profiler counts of a real one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fullframe as ff
from fullframe.planning.plan import PlanRequest, plan_in_full
from fullframe.ranks.mesh import init_mesh
from fullframe.simulation.evaluation import EvaluationSample, read_evaluation
from fullframe.simulation.prediction import said_of_evaluation
from fullframe.training.evaluation import evaluate as measure
from fullframe.training.session import assemble
from tests.simulation.real_steps import held_bytes


class Frames(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.ones(3, self.size, self.size), "mask": torch.zeros(self.size, self.size).long()}


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 1))


def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"accuracy": ((model(batch["image"]).argmax(1) == batch["mask"]).double().mean(), 1)}


def recipe(frame: int = 192, **changed: Any) -> ff.Recipe:
    whole = ff.Recipe(
        model=model,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["image"]), batch["mask"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: Frames(32),
        batch_size=2,
        evaluate=evaluate,
        evaluation_data=lambda: Frames(frame),
    )
    return replace(whole, **changed)


def simulated(**changed: Any) -> Any:
    return ff.simulate(recipe(**changed), ff.Strategy(), "cpu", without=("context",))


def measured_bytes() -> int:
    """Of one sample, with the model and the gradients that a step leaves."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        network = model().eval()
        gradients = [torch.zeros_like(parameter) for parameter in network.parameters()]
        batch = {name: value[None] for name, value in Frames(192)[0].items()}
        with torch.no_grad():
            evaluate(network, batch)
        del gradients
    return max(held_bytes(profiled))


def test_a_real_evaluation_holds_as_much() -> None:
    found = simulated()
    assert found.evaluation.moment.phase == "evaluation"
    assert found.evaluation.peak_bytes == pytest.approx(measured_bytes(), rel=0.06)  # the batch of a step is there too
    assert found.device_bytes == found.evaluation.device_bytes > found.step_bytes
    assert "the evaluation takes more than a step" in said_of_evaluation(found)
    small = simulated(evaluation_data=lambda: Frames(8))
    assert small.step_bytes == small.device_bytes and not said_of_evaluation(small)
    assert small.peak_bytes == found.peak_bytes == simulated(evaluate=None, evaluation_data=None).peak_bytes


def test_a_batch_is_there_while_the_next_is_loaded() -> None:
    """Which is where an evaluation of little computing holds most: sample, batch, and the batch before."""
    mean = lambda model, batch: {"mean": (model(batch["image"]).mean(), 1)}  # noqa: E731
    changed: dict[str, Any] = {"model": lambda: nn.Conv2d(3, 8, 1), "evaluate": mean}
    mesh, real = init_mesh(), recipe(**changed)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        session = assemble(real, ff.Strategy(), mesh)
        session.step(next(iter(session.state.loader)))
        measure(real, session.model, mesh)
    found = simulated(**changed).evaluation.peak_bytes
    assert max(held_bytes(profiled)) == pytest.approx(found, rel=0.02)


def test_metrics_are_as_before_and_what_they_keep_of_each_sample_is_counted() -> None:
    metric = torchmetrics.JaccardIndex(task="multiclass", num_classes=8, validate_args=False)

    def scored(model: nn.Module, batch: Any) -> dict[str, Any]:
        metric.update(model(batch["image"]), batch["mask"])
        return {"iou": metric}

    assert simulated(evaluate=scored).evaluation is not None
    assert type(metric.confmat) is Tensor

    class Kept(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", [], dist_reduce_fx="cat")

        def update(self, seen: Tensor) -> None:
            self.seen.append(seen)

        def compute(self) -> Tensor:
            return torch.cat(self.seen).mean()

    keeps = Kept()

    def kept(model: nn.Module, batch: Any) -> dict[str, Any]:
        keeps.update(model(batch["image"]))
        return {"all": keeps}

    found = simulated(evaluate=kept).evaluation
    assert found.bytes["kept by metrics"] == 5 * 8 * 192 * 192 * 4  # of 8 samples three are simulated
    assert keeps.seen == []


def test_the_first_sample_is_read_and_counted() -> None:
    found = read_evaluation(recipe())
    assert isinstance(found, EvaluationSample) and found.first["image"].shape == (3, 192, 192) and found.samples == 8
    assert read_evaluation(recipe(evaluate=None, evaluation_data=None)) is None


def test_what_cannot_be_simulated_is_said() -> None:
    def choosy(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"one": (1.0 if (model(batch["image"]) > 0).any() else 2.0, 1)}

    for changed in ({"evaluate": choosy}, {"evaluation_data": lambda: 1 / 0}):
        found = simulated(**changed)
        assert found.evaluation is None and "the evaluation could not be simulated" in found.notes[0]
    counted = simulated(evaluate=lambda model, batch: {"sum": (model(batch["image"]).sum().item(), 1)})
    assert counted.evaluation is not None and "each is taken to be 1" in counted.notes[0]


def test_a_plan_whose_evaluation_does_not_fit_is_none() -> None:
    found = simulated()
    request = PlanRequest(recipe=recipe(), devices="1xT4", precisions=["fp32"], memory_limit_bytes=2**40)
    fits = plan_in_full(request).plans[0].prediction
    assert fits is not None and fits.evaluation is not None and found.evaluation is not None
    between = int((fits.step_bytes + fits.evaluation.device_bytes) / 2 / 0.94)
    short = plan_in_full(replace(request, memory_limit_bytes=between)).plans[0]
    assert not short.fits and "its steps fit, its evaluation needs" in short.reason
