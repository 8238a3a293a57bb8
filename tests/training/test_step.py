"""One step on any mesh, in any number of microbatches, is the step of one process on the whole batch."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.errors import DivergenceError, GradientError, RecipeError, ShapeError, StrategyError
from fullframe.model.parallelize_for import parallelize_for
from fullframe.training.microbatches import microbatches
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Plain, loss, mean_loss

BATCH = 8


def whole_batch():
    frames = Frames(BATCH, augment=False)
    return {"image": frames.images, "target": frames.targets, "name": [f"frame {i}" for i in range(BATCH)]}


def network():
    torch.manual_seed(0)
    return Plain()


def reference(loss_of):
    """Loss, gradients and new parameters by plain PyTorch."""
    model = network()
    output = loss_of(model, whole_batch())
    value = output[0] / output[1] if isinstance(output, tuple) else output
    value.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return value.item(), gradients, [p.detach() for p in model.parameters()]


def one_step(loss_of, strategy):
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    model = ff.parallelize(network(), mesh)
    replica, share = mesh.get_local_rank("data"), BATCH // strategy.data
    mine = slice(replica * share, (replica + 1) * share)
    batch = {name: value[mine] for name, value in whole_batch().items()}
    if strategy.height * strategy.width > 1:
        batch |= {name: ff.shard(batch[name], mesh) for name in ("image", "target")}
    step = ff.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    record = step(batch)
    return record, [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def assert_same_step(loss_of, strategy, results):
    value, gradients, parameters = reference(loss_of)
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    for record, found_gradients, found_parameters in results:
        assert not record.skipped
        assert record.loss == pytest.approx(value, rel=1e-12)
        assert record.grad_norm == pytest.approx(norm, rel=1e-10)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(found_parameters, parameters, rtol=1e-10, atol=1e-13)
    numbers = {(record.loss, record.grad_norm) for record, _, _ in results}
    assert len(numbers) == 1, "every rank must report the same numbers to the last bit"


@pytest.mark.parametrize("loss_of", [loss, mean_loss])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_microbatches_of_one_process(loss_of, count):
    strategy = ff.Strategy(microbatches=count)
    assert_same_step(loss_of, strategy, [one_step(loss_of, strategy)])


@pytest.mark.parametrize("loss_of", [loss, mean_loss])
@pytest.mark.parametrize(
    "strategy",
    [
        ff.Strategy(width=2),
        ff.Strategy(height=2, microbatches=4),
        ff.Strategy(data=2),
        ff.Strategy(data=2, microbatches=2),
        ff.Strategy(data=2, width=2, microbatches=2),
        ff.Strategy(data=4, microbatches=2),
    ],
    ids=lambda s: f"{s.data}x{s.height}x{s.width}x{s.microbatches}" if isinstance(s, ff.Strategy) else s.__name__,
)
def test_ranks(loss_of, strategy):
    assert_same_step(loss_of, strategy, rank_group(strategy.ranks).run(one_step, loss_of, strategy))


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def spiked_loss(model, batch):
    return Spike.apply(mean_loss(model, batch))


def step_with_a_broken_rank(strategy, broken_rank, kind):
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    broken = torch.distributed.get_rank() == broken_rank
    model = ff.parallelize(network(), mesh)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    batch = whole_batch()
    if broken and kind == "loss":
        batch["image"] = batch["image"] * math.nan
    loss_of = spiked_loss if broken and kind == "gradient" else mean_loss
    records = [ff.TrainStep(model, loss_of, optimizer, strategy)(batch)]
    unchanged = all(map(torch.equal, before, model.parameters()))
    records.append(ff.TrainStep(model, mean_loss, optimizer, strategy)(whole_batch()))
    return records, unchanged, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_one_rank_that_is_not_finite_makes_all_skip(kind):
    results = rank_group(2).run(step_with_a_broken_rank, ff.Strategy(data=2), 1, kind)
    for (first, second), unchanged, _ in results:
        assert first.skipped and unchanged
        assert not second.skipped and math.isfinite(second.loss)
    torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0)


def step_with_an_infinite_loss():
    model = ff.parallelize(network(), ff.init_mesh())
    before = [p.detach().clone() for p in model.parameters()]
    more = math.inf if torch.distributed.get_rank() else 0.0
    optimizer, strategy = torch.optim.SGD(model.parameters(), lr=0.5), ff.Strategy(data=2, precision="fp16")
    step = ff.TrainStep(model, lambda model, batch: mean_loss(model, batch) + more, optimizer, strategy)
    return step(whole_batch()).skipped, all(map(torch.equal, before, model.parameters())), step.scale.value


def test_a_loss_that_is_infinite_on_one_rank_is_skipped_though_its_gradient_is_finite():
    (*_, scale), second = rank_group(2).run(step_with_an_infinite_loss)
    assert second == (True, True, scale), "the ranks go on with one scale"


STEPS_APART = {  # what rank 1 has: other options of its strategy, another rate from its first step on, or its second
    "strategy.microbatches is 1 on rank 0, 2 on rank 1": ({}, {"microbatches": 2}, 1, 1),
    "strategy.ema_decay is None on rank 0, 0.5 on rank 1": ({}, {"ema_decay": 0.5}, 1, 1),
    "strategy.precision is 'fp32' on rank 0, 'bf16' on rank 1": ({}, {"precision": "bf16"}, 1, 1),
    "the optimizer's lr, group 0, is 0.5 on rank 0, 1.0 on rank 1": ({}, {}, 2, 1),
    "the optimizer's lr, group 0, is 0.5 on rank 0, 1.5 on rank 1": ({"shard_parameters": True}, {}, 1, 3),
    "the optimizer's lr, group 0, is 0.5 on rank 0, 2.0 on rank 1": ({"shard_optimizer": True}, {}, 1, 4),
    "the optimizer's lr, group 0, is 0.5 on rank 0, 2.5 on rank 1": ({"update_in_backward": True}, {}, 1, 5),
}


def steps_apart(name):
    options, others, first, second = STEPS_APART[name]
    apart = torch.distributed.get_rank() == 1
    strategy = ff.Strategy(data=2, **options, **(others if apart else {}))
    model = parallelize_for(strategy, network(), ff.init_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 * (first if apart else 1))
    step = ff.TrainStep(model, mean_loss, optimizer, strategy)
    try:
        for factor in (1, second, 1):
            optimizer.param_groups[0]["lr"] *= factor if apart else 1
            step(whole_batch())
    except DivergenceError as error:
        return str(error)
    return ""


def steps_with_a_group_more():
    model = ff.parallelize(network(), ff.init_mesh())
    own = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(own if torch.distributed.get_rank() else model.parameters(), lr=0.5)
    with pytest.raises(DivergenceError, match=r"lr, group 1, is None on rank 0, 0\.5 on rank 1"):
        ff.TrainStep(model, mean_loss, optimizer, ff.Strategy(data=2))(whole_batch())


def test_a_group_of_parameters_that_the_first_rank_has_not_is_found_before_the_first_step():
    rank_group(2).run(steps_with_a_group_more)


def weighted_loss(size):
    model = network()
    model.register_parameter("log_sigma", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    strategy = ff.Strategy(data=2, shard_parameters=True)
    model = parallelize_for(strategy, model, ff.init_mesh())

    def loss_of(model, batch):
        return (torch.exp(-model.log_sigma) * mean_loss(model, batch).expand(size)).sum()

    step = ff.TrainStep(model, loss_of, torch.optim.SGD(model.parameters()), strategy)
    with pytest.raises(GradientError, match=r"or in the loss by parameter.full_tensor\(\)"):
        step(whole_batch())


@pytest.mark.parametrize("size", [(2,), ()])
def test_a_loss_that_takes_a_sharded_parameter_as_it_is_says_what_to_do(size):
    rank_group(2).run(weighted_loss, size)


@pytest.mark.parametrize("name", STEPS_APART)
def test_ranks_that_do_not_take_the_same_steps_are_told_on_all(name):
    for said in rank_group(2).run(steps_apart, name):
        said = said.replace("on rank 0, the optimizer's lr, group 0, is", "on rank 0,")  # as backward passes say it
        assert said.startswith(f"the ranks do not take the same steps: {name}. Make them alike")


@pytest.mark.parametrize(
    "strategy", [ff.Strategy(), ff.Strategy(update_in_backward=True), ff.Strategy(precision="fp16")]
)
def test_a_batch_in_which_nothing_counts_is_skipped(strategy):
    model = network()
    batch = whole_batch()
    batch["target"] = torch.full_like(batch["target"], -1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1.0)
    step = ff.TrainStep(model, loss, optimizer, strategy)
    record = step(batch)
    assert record.skipped and math.isnan(record.loss)
    assert all(map(torch.equal, before, model.parameters()))
    assert step.scale is None or step.scale.value == 2.0**16  # which is not at fault


@pytest.mark.parametrize("count", [math.nan, math.inf])
@pytest.mark.parametrize(
    "strategy", [ff.Strategy(), ff.Strategy(update_in_backward=True), ff.Strategy(precision="fp16", microbatches=2)]
)
def test_a_count_that_is_not_finite_is_skipped(count, strategy):
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1.0)
    record = ff.TrainStep(model, lambda model, batch: (loss(model, batch)[0], count), optimizer, strategy)(
        whole_batch()
    )
    assert record.skipped
    assert all(map(torch.equal, before, model.parameters()))


class Synced(nn.Module):
    """Notes which forward passes ran inside no_sync."""

    def __init__(self):
        super().__init__()
        self.module, self.inside, self.seen = network(), False, []

    def forward(self, image):
        self.seen.append(self.inside)
        return self.module(image)

    @contextmanager
    def no_sync(self):
        self.inside = True
        yield
        self.inside = False


def test_gradients_are_sent_on_the_last_microbatch_only():
    model = Synced()
    step = ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), ff.Strategy(microbatches=4))
    step(whole_batch())
    assert model.seen == [True, True, True, False]


def test_microbatches_cut_everything_that_has_a_sample_dim():
    batch = {"image": torch.arange(4), "nested": [torch.arange(8).view(4, 2)], "name": ["a", "b", "c", "d"], "scale": 2}
    first, second = microbatches(batch, 2)
    assert first["image"].tolist() == [0, 1] and second["image"].tolist() == [2, 3]
    assert second["nested"][0].tolist() == [[4, 5], [6, 7]]
    assert first["name"] == ["a", "b"] and second["scale"] == 2
    (whole,) = microbatches(batch, 1)
    assert whole is batch


def test_batches_that_cannot_be_cut():
    with pytest.raises(ShapeError, match="4 samples a replica cannot be cut into 3 equal microbatches"):
        list(microbatches({"image": torch.zeros(4, 3)}, 3))
    with pytest.raises(ShapeError, match="one common first dim, got image: 4, target: 2"):
        list(microbatches({"image": torch.zeros(4, 3), "target": torch.zeros(2)}, 2))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda model, batch: model(batch["image"]), r"got shape \(8, 4, 9, 14\)"),
        (lambda model, batch: 3.0, "got float; return one"),
        (lambda model, batch: {"mask": 1, "box": 2}, r"got dict; return one of mask, box"),
        (
            lambda model, batch: (model(batch["image"]).sum(), torch.ones(3)),
            r"count must be one number, got shape \(3,\)",
        ),
    ],
)
def test_a_loss_that_is_no_scalar(output, message):
    model = network()
    step = ff.TrainStep(model, output, torch.optim.SGD(model.parameters(), lr=0.5), ff.Strategy())
    with pytest.raises(RecipeError, match=message):
        step(whole_batch())


def wrong_steps():
    model, messages = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for strategy in (ff.Strategy(width=3), ff.Strategy(width=2)):
        try:
            ff.TrainStep(model, loss, optimizer, strategy)
        except StrategyError as error:
            messages.append(str(error))
    return messages


def test_a_step_that_does_not_fit_the_ranks():
    for messages in rank_group(2).run(wrong_steps):
        assert "3 ranks, this job has 2" in messages[0]
        assert "Plain averages no gradients over the 2 ranks; pass fullframe.parallelize(model, mesh)" in messages[1]


@pytest.mark.parametrize(
    "loss_of", [lambda model, batch: mean_loss(model, batch).detach(), lambda model, batch: batch["image"].mean()]
)
def test_a_loss_without_a_gradient_is_refused(loss_of):
    model = network()
    step = ff.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), ff.Strategy())
    with pytest.raises(RecipeError, match="the loss requires no gradient: it was detached"):
        step(whole_batch())


def test_an_optimizer_that_wants_a_closure_is_refused():
    model = network()
    with pytest.raises(RecipeError, match=r"LBFGS computes the loss again and again .* needs no closure"):
        ff.TrainStep(model, mean_loss, torch.optim.LBFGS(model.parameters()), ff.Strategy())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind):
    model = nn.ModuleDict({"table": kind(4, 2, sparse=True)})
    with pytest.raises(RecipeError, match=f"{kind.__name__} 'table' gives sparse gradients, .* with sparse=False"):
        ff.TrainStep(model, mean_loss, torch.optim.SparseAdam(model.parameters()), ff.Strategy())
    frozen = model.requires_grad_(False)
    ff.TrainStep(frozen, mean_loss, torch.optim.SGD(frozen.parameters()), ff.Strategy())


def test_an_optimizer_with_a_parameter_of_its_own_is_refused():
    model, weight = network(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.5)
    with pytest.raises(RecipeError, match=r"group 0 has a parameter of shape \(\) that is not the model's"):
        ff.TrainStep(model, loss, optimizer, ff.Strategy())


def test_a_child_called_module_is_not_taken_for_the_model():
    model = nn.Module()
    model.module, model.head = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    strategy = ff.Strategy(update_in_backward=True, ema_decay=0.5)
    step = ff.TrainStep(
        model, lambda m, x: m.head(m.module(x)).square().mean(), torch.optim.SGD(model.parameters(), 0.5), strategy
    )
    before = model.head[0].weight.detach().clone()
    step(torch.randn(3, 2))
    assert not torch.equal(model.head[0].weight, before) and "head.0.weight" in step.average.state_dict()
    before = model.head[1].running_mean.clone()
    step.forward(torch.randn(3, 2))
    step.rehearse(torch.randn(3, 2))
    assert torch.equal(model.head[1].running_mean, before)
    average = step.average.state_dict()["head.0.weight"].clone()
    assert step(torch.full((3, 2), math.inf)).skipped and torch.equal(model.head[1].running_mean, before)
    assert torch.equal(step.average.state_dict()["head.0.weight"], average)


def valid_only(model, batch):
    """Of a microbatch in which nothing counts, the model is not asked."""
    valid = int((batch["weight"] > 0).sum())
    if not valid:
        return torch.zeros((), dtype=torch.float64, requires_grad=True), 0
    return ((model(batch["image"]) - 1).square().sum((1, 2, 3)) * batch["weight"]).sum(), valid


def with_an_empty_last_microbatch(strategy):
    mesh = ff.init_mesh(width=strategy.width)
    model = ff.parallelize(network(), mesh)
    image, weight = whole_batch()["image"], torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64)
    mine = slice(mesh.get_local_rank("data"), None, strategy.data)
    image = ff.shard(image[mine], mesh) if strategy.width > 1 else image[mine]
    step = ff.TrainStep(model, valid_only, torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    step({"image": image, "weight": weight[mine]})
    return [p.grad for p in model.parameters()]


def test_gradients_are_averaged_where_the_last_microbatch_leaves_the_model_out():
    expected = with_an_empty_last_microbatch(ff.Strategy())
    for strategy in (ff.Strategy(width=2, microbatches=2), ff.Strategy(data=2, microbatches=2)):
        for found in rank_group(2).run(with_an_empty_last_microbatch, strategy):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


class Centered(Plain):
    """What it subtracts follows the images by a buffer, which a later forward pass reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros((), dtype=torch.float64))

    def forward(self, image):
        self.center.lerp_(image.detach().mean(), 0.5)
        return super().forward(image - self.center)


def losses_of_centered(sharded):
    """Of two steps in two microbatches each; and those of each replica by itself, with its own buffers."""
    strategy = ff.Strategy(data=2, microbatches=2, shard_parameters=sharded)
    torch.manual_seed(0)
    model = Centered()
    expected, center = [], torch.zeros((), dtype=torch.float64)
    batch = whole_batch()
    for _ in range(2):
        total = 0.0
        for replica in (1, 0):  # whose buffers the next step begins with
            model.center.copy_(center)
            for first in (replica * 4, replica * 4 + 2):
                piece = {name: batch[name][first : first + 2] for name in ("image", "target")}
                total += mean_loss(model, piece).item() / 4
        center = model.center.clone()
        expected.append(total)
    model.center.zero_()
    model = parallelize_for(strategy, model, mesh := ff.init_mesh())
    mine = slice(mesh.get_local_rank("data") * 4, mesh.get_local_rank("data") * 4 + 4)
    step = ff.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=0.0), strategy)
    return [step({name: batch[name][mine] for name in ("image", "target")}).loss for _ in range(2)], expected


@pytest.mark.parametrize("sharded", [False, True])
def test_each_replica_goes_on_with_its_own_buffers_until_the_step_ends(sharded):
    for losses, expected in rank_group(2).run(losses_of_centered, sharded):
        assert losses == pytest.approx(expected, rel=1e-12)
