"""What is measured is that of one process, whoever measured which sample or which part of it."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fullframe as ff
from fullframe.errors import RecipeError
from fullframe.ranks.randomness import kept_random_state
from fullframe.spatial.tensor import whole
from fullframe.techniques.ema import ParameterAverage
from fullframe.training.evaluation import OfPart, _alike, evaluate, evaluating
from tests.rank_group import rank_group
from tests.training import tiny

CLASSES = 4


def running():
    """The recipe's evaluate with metrics that are updated in every batch, and a pair beside them."""
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, ignore_index=-1)
    per_class = torchmetrics.Recall(task="multiclass", num_classes=CLASSES, ignore_index=-1, average="none")
    brightness = torchmetrics.PearsonCorrCoef()  # whose states of ranks are not added up
    entropies = torchmetrics.CatMetric()
    square = torchmetrics.MeanSquaredError()

    ratio = square / (square + 1.0)  # one metric in two places

    def measure(model, batch):
        logits = model(batch["image"])
        total, count = tiny.loss(model, batch)
        classes, target = whole(logits.argmax(1)), whole(batch["target"])
        accuracy.update(classes, target)
        per_class.update(classes, target)
        square.update(logits, torch.zeros_like(logits))  # split tensors
        brightness.update(batch["image"].mean()[None], logits.mean()[None])
        entropies.update(total / count)
        return {"entropy": (total, count), "accuracy": accuracy, "recall": per_class, "brightness": brightness} | {
            "entropies": entropies,
            "square": square,
            "ratio": ratio,
        }

    return measure


def fresh():
    """The same as new metrics for every batch."""
    return lambda model, batch: running()(model, batch)


def collection():
    metrics = torchmetrics.MetricCollection(
        [
            torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, ignore_index=-1),
            torchmetrics.Precision(task="multiclass", num_classes=CLASSES, ignore_index=-1),
        ]
    )

    def measure(model, batch):
        metrics.update(whole(model(batch["image"]).argmax(1)), whole(batch["target"]))
        return {"all": metrics}

    return measure


def by_class():
    """In a wrapper, which shows the states of the metric in it as its own."""
    recall = torchmetrics.Recall(task="multiclass", num_classes=CLASSES, average=None, ignore_index=-1)
    metric = torchmetrics.wrappers.ClasswiseWrapper(recall)

    def measure(model, batch):
        metric.update(whole(model(batch["image"]).argmax(1)), whole(batch["target"]))
        return {"recall": metric}

    return measure


def parts(marked):
    """Each rank looks at its own pixels."""
    overlap = torchmetrics.JaccardIndex(task="multiclass", num_classes=CLASSES, ignore_index=-1)

    def local(x):
        return x.local if isinstance(x, ff.SpatialTensor) else x

    def measure(model, batch):
        right, target = local(model(batch["image"])).argmax(1), local(batch["target"])
        overlap.update(right, target)
        pair = ((right == target).sum(), (target >= 0).sum())
        if marked == "pair":
            return {"overlap": OfPart(overlap), "accuracy": pair}
        return {"overlap": OfPart(overlap) if marked else overlap, "accuracy": OfPart(pair)}

    return measure


def measured(make, width, samples, *arguments, times=1):
    """What all evaluations of one model gave."""
    mesh = ff.init_mesh(width=width)
    torch.manual_seed(0)
    network = tiny.Plain() if make is parts else tiny.Network(dropout=0.5)  # whose output is cut elsewhere
    model = ff.parallelize(network, mesh)
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(samples, augment=True), evaluate=make(*arguments))
    try:
        return [evaluate(recipe, model, mesh) for _ in range(times)]
    except RecipeError as error:
        return str(error)


def require_close(found, wanted):
    assert found.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        assert math.isclose(found[name], value, rel_tol=1e-5), (name, found[name], value)


@pytest.mark.filterwarnings("ignore:The variance of predictions")
@pytest.mark.parametrize("samples", [5, 1])
def test_replicas_and_parts_measure_what_one_process_does(samples):
    """5 samples on 2 replicas: 3 and 2; 1 sample: 1 and none. Twice, for metrics that start anew."""
    for make in (running, fresh, collection, by_class):
        alone = measured(make, 1, samples, times=2)
        assert make is by_class or {"accuracy", "recall.3"} <= set(alone[0]) or "all.MulticlassPrecision" in alone[0]
        for width in (1, 2):
            for evaluations in rank_group(2).run(twice, make, width, samples):
                for found, wanted in zip(evaluations, alone, strict=True):
                    require_close(numbers(found), numbers(wanted))  # a list in the order of the samples


def numbers(found):
    return {name: value for name, value in found.items() if value == value}


def twice(make, width, samples):
    return measured(make, width, samples, times=2)


def test_an_evaluation_that_is_given_up_leaves_nothing_behind():
    mesh = ff.init_mesh()
    torch.manual_seed(0)
    model = ff.parallelize(tiny.Network(), mesh)
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(3), evaluate=running())
    wanted = evaluate(recipe, model, mesh)

    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        evaluate(recipe, model, mesh, progress=stop)
    assert evaluate(recipe, model, mesh) == wanted and model.training


def test_parts_are_added_up_and_must_be_marked():
    (alone,) = measured(parts, 1, 3, True)
    for (found,) in rank_group(2).run(measured, parts, 2, 3, True):
        require_close(found, alone)
    for what, marked in (("overlap", False), ("accuracy", "pair")):
        for said in rank_group(2).run(measured, parts, 2, 3, marked):
            assert f"another '{what}' on rank 1 than on rank 0 of its replica" in said and "OfPart" in said


class Counting(torchmetrics.Metric):
    """Keeps its sums in attributes that are no states."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.total, self.updates = 0.0, 0

    def update(self, value):
        self.total += float(value)
        self.updates += 1

    def compute(self):
        return torch.tensor(self.total / self.updates)


class Watched(torchmetrics.MeanMetric):
    """Its attribute says nothing about its value."""

    def update(self, value):
        super().update(value)
        self.last = float(value)


def watched():
    metric = Watched()

    def measure(model, batch):
        metric.update(batch["image"].mean())
        return {"brightness": metric}

    return measure


def test_attributes_that_the_value_does_not_depend_on_are_left_alone():
    (alone,) = measured(watched, 1, 5)
    for (found,) in rank_group(2).run(measured, watched, 1, 5):
        require_close(found, alone)


def wrong(kind):
    counting = Counting()
    state, last = {"batches": 0}, torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=3)

    def measure(model, batch):
        state["batches"] += 1
        if kind == "mean":
            return {"loss": tiny.mean_loss(model, batch)}
        if kind == "never":
            metric = torchmetrics.MeanMetric(nan_strategy="error")
            metric.mean_value = torch.zeros(2, 3)  # a state that cannot be computed
            metric.weight = torch.zeros(4, 5)
            return {"mean": metric}
        if kind == "window":
            last.update(batch["image"].mean())
            return {"last": last}
        if kind in ("counter", "counters"):
            counter = counting if kind == "counter" else Counting()
            counter.update(batch["image"].mean())
            return {"counted": counter}
        if kind == "local":
            local = torchmetrics.MeanMetric()
            local.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda states: states.prod(0))
            return {"local": local}
        if kind == "changing":
            return {"loss": (1.0, 1) if state["batches"] > 1 else torchmetrics.MeanMetric()}
        return {"half": OfPart((1.0, 1)) if state["batches"] > 1 else (1.0, 1)}

    return measure


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", "must give (sum, count) or a torchmetrics Metric for 'loss', got Tensor"),
        ("changing", "gives (sum, count) or a Metric for 'loss', by the batch"),
        ("marked", "marks 'half' as OfPart for some batches only"),
        ("never", "the metric 'mean' cannot be computed: RuntimeError"),
        ("window", "Running keeps _num_vals_seen beside its states, which cannot be reduced over replicas"),
        ("counter", "Counting keeps total beside its states, which cannot be reduced over replicas"),
        ("counters", "Counting keeps total beside its states, which cannot be reduced over replicas"),
        ("local", "the metric 'local' cannot be sent to rank 0"),
    ],
)
def test_what_cannot_be_recorded_is_refused_on_all_ranks(kind, message):
    for said in rank_group(2).run(measured, wrong, 1, 4, kind):
        assert message in said


def with_average(width):
    """What is measured of the averaged parameters, then of the last; whether all is as before, modes included."""
    mesh = ff.init_mesh(width=width)
    torch.manual_seed(0)
    network = tiny.Network()
    model = ff.parallelize(network, mesh)
    average = ParameterAverage(network, 0.5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    average.update()
    network.body.eval()  # a frozen part, which must stay so
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = {name: value.clone() for name, value in average.state_dict().items()}
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(3), evaluate=tiny.evaluate)
    calls = []
    of_average = evaluate(recipe, model, mesh, average=average, progress=lambda: calls.append(1))
    of_last = evaluate(recipe, model, mesh)
    same = all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    same = same and all(torch.equal(value, state[name]) for name, value in average.state_dict().items())
    modes = [module.training for module in (model, network, network.body, network.body[1], network.head)]
    return of_average, of_last, same, modes, len(calls)


def averaged_by_hand():
    mesh = ff.init_mesh()
    torch.manual_seed(0)
    network = tiny.Network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)  # half of 1 and half of 3
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(3), evaluate=tiny.evaluate)
    return evaluate(recipe, ff.parallelize(network, mesh), mesh)


def test_the_average_is_evaluated_and_all_is_put_back():
    wanted = averaged_by_hand()
    for of_average, of_last, same, modes, calls in [with_average(1), *rank_group(2).run(with_average, 2)]:
        require_close(of_average, wanted)
        assert of_last != of_average and same and calls == 3
        assert modes == [True, True, False, False, True]


class Caching(nn.Module):
    """Keeps a grid of coordinates from its first forward, and has an op without a rule."""

    def __init__(self):
        super().__init__()
        self.convolution, self.grid = nn.Conv2d(3, CLASSES, 1).double(), None

    def forward(self, image):
        if self.grid is None:
            self.grid = torch.linspace(0, 1, image.shape[-1], dtype=image.dtype)
        return torch.fft.fft2(self.convolution(image) * self.grid).real


def cached():
    mesh = ff.init_mesh(width=2)
    torch.manual_seed(0)
    model = ff.parallelize(Caching(), mesh, unsupported="gather")
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(2), evaluate=tiny.evaluate)
    found = evaluate(recipe, model, mesh)
    model(ff.shard(tiny.Frames(2).images, mesh)).square().mean().backward()
    return found, model.module.convolution.weight.grad.isfinite().all().item()


@pytest.mark.filterwarnings("ignore:.*gathered")
def test_a_model_trains_on_after_its_first_forward_was_an_evaluation():
    (found, finite), (other, _) = rank_group(2).run(cached)
    assert finite and found == other and math.isfinite(found["entropy"])


def sharded(samples):
    """Evaluation of sharded parameters, whose gathers every replica must take part in, then a training step."""
    mesh = ff.init_mesh()
    torch.manual_seed(0)
    model = ff.parallelize(tiny.Network(), mesh, shard_parameters=True)
    model.module.body[1].running_mean += mesh.get_local_rank("data")  # the first replica's holds
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(samples), evaluate=tiny.evaluate)
    found = evaluate(recipe, model, mesh)
    model(tiny.Frames(2).images).square().mean().backward()
    return found


def test_sharded_parameters_are_evaluated_on_unequally_many_samples():
    mesh = ff.init_mesh()
    torch.manual_seed(0)
    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(3), evaluate=tiny.evaluate)
    wanted = evaluate(recipe, ff.parallelize(tiny.Network(), mesh), mesh)
    for found in rank_group(2).run(sharded, 3):
        require_close(found, wanted)


def test_evaluation_computes_as_training_does():
    mesh = ff.init_mesh()
    seen = []

    def measure(model, batch):
        seen.append(model(batch["image"].float()).dtype)
        return {"one": (1, 1)}

    recipe = tiny.recipe(evaluation_data=lambda: tiny.Frames(1), evaluate=measure)
    model = ff.parallelize(tiny.Plain().float(), mesh)
    assert evaluate(recipe, model, mesh, precision="bf16") == {"one": 1.0} == evaluate(recipe, model, mesh)
    assert seen == [torch.bfloat16, torch.float32]
    assert evaluate(tiny.recipe(), model, mesh) == {}


def test_an_evaluation_draws_nothing_of_the_training_s_numbers():
    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()

    with kept_random_state():
        wanted = drawn()
    with evaluating(nn.Dropout()):
        drawn()
    assert drawn() == wanted


def test_what_two_ranks_have_measured_is_the_same_or_not():
    for value in (1.0, math.nan, math.inf, -math.inf):
        assert _alike([(value, abs(value))], [(value, abs(value))])
        assert not _alike([(value, abs(value))], [(2.0, 2.0)])
    assert not _alike([(1.0, 1.0)], [(1.0, 1.0)] * 2)


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return map(tiny.Frames(self.samples, augment=False).__getitem__, range(self.samples))


def measured_of(data):
    mesh = ff.init_mesh()
    torch.manual_seed(0)
    model = ff.parallelize(tiny.Network(), mesh)
    recipe = tiny.recipe(evaluation_data=data, evaluate=tiny.evaluate, workers=2)
    return evaluate(recipe, model, mesh)


def test_a_stream_is_measured_like_a_data_set_with_numbers():
    for samples in (1, 3, 4):
        wanted = measured_of(partial(tiny.Frames, samples, augment=False))
        for found in rank_group(2).run(measured_of, partial(Stream, samples)):
            assert found == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(RecipeError, match="the Stream gives no batch of 1 sample in epoch 0; does its folder"):
        measured_of(partial(Stream, 0))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: tiny.Frames(0), r"recipe.evaluation_data\(\) has no samples"),
        (lambda: DataLoader(tiny.Frames(2)), "a DataLoader was given where its dataset is asked for"),
    ],
)
def test_data_that_cannot_be_measured_is_refused_before_the_first_step(data, message, tmp_path):
    job = tiny.recipe(evaluation_data=data, evaluate=tiny.evaluate, steps=1)
    with pytest.raises(RecipeError, match=message):
        ff.fit(job, ff.Strategy(), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(RecipeError, match=message):
        evaluate(job, ff.parallelize(tiny.Plain(), ff.init_mesh()), ff.init_mesh())
