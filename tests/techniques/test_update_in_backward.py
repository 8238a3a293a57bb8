"""Parameters updated within backward, one by one, against those updated after it."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.errors import GradientError, StrategyError
from fullframe.model.parallelize_for import parallelize_for
from fullframe.techniques.optimizers import build_optimizer
from tests.rank_group import RankFailure, rank_group
from tests.techniques.test_optimizers import ADAMW, changes, grouped, trained
from tests.training.test_combinations import BATCH, batch_of, error, exact_loss, network
from tests.training.test_step import Spike

IN_BACKWARD = [
    ff.Strategy(update_in_backward=True),
    ff.Strategy(update_in_backward=True, width=2, recompute="blocks"),
    ff.Strategy(update_in_backward=True, data=2, width=2, ema_decay=0.7),
    ff.Strategy(update_in_backward=True, height=2, width=2, optimizer="sgd"),
]


@pytest.mark.parametrize("strategy", IN_BACKWARD, ids=lambda s: f"{s.data}x{s.height}x{s.width}")
def test_updates_in_backward_are_those_after_it(strategy):
    expected = trained(ff.Strategy(optimizer=strategy.optimizer, ema_decay=strategy.ema_decay))
    results = [trained(strategy)] if strategy.ranks == 1 else rank_group(strategy.ranks).run(trained, strategy)
    for parameters, _, norms, averages in results:
        assert norms == pytest.approx(expected[2], rel=1e-10)
        assert norms == results[0][2]
        assert error(changes(parameters), changes(expected[0])) < 1e-12
        for found, average in zip(averages, expected[3], strict=True):
            torch.testing.assert_close(found, average, rtol=1e-10, atol=1e-13)


class Tangled(nn.Module):
    """Registered in another order than used; a weight used twice; one not used by replica 1, one never."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Conv2d(6, 4, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.never, self.some = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
        self.twice = nn.Conv2d(6, 6, 1)
        self.use_some = True

    def forward(self, image):
        x = self.twice(torch.tanh(self.twice(self.first(image))))
        return self.last(self.some(x) if self.use_some else x)


def tangled(dtype=torch.float64):
    torch.manual_seed(0)
    return Tangled().to(dtype)


def most_gradients(strategy):
    """Parameters after two steps; the most gradients that lived at once; gradients left over."""
    mesh = ff.init_mesh(width=strategy.width)
    model = parallelize_for(strategy, tangled(), mesh, find_unused_parameters=not strategy.update_in_backward)  # hooks
    model.module.use_some = mesh.get_local_rank("data") == 0
    most = 0

    def count(parameter):
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    step = ff.TrainStep(model, exact_loss, build_optimizer(grouped(AdamW), model, strategy), strategy)
    replica, share = mesh.get_local_rank("data"), BATCH // strategy.data
    for number in range(2):
        batch = {name: value[replica * share :][:share] for name, value in batch_of(number).items()}
        if strategy.width > 1:
            batch = {name: ff.shard(value, mesh) for name, value in batch.items()}
        step(batch)
    left = [name for name, p in model.module.named_parameters() if p.grad is not None]
    return {name: p.detach() for name, p in model.module.named_parameters()}, most, left


def test_gradients_are_dropped_one_by_one_in_an_order_all_ranks_share():
    for spread in ({}, {"width": 2}, {"data": 2}, {"data": 2, "width": 2}):
        plain, together = ff.Strategy(**spread), ff.Strategy(**spread, update_in_backward=True)
        if plain.ranks == 1:
            expected, found = [most_gradients(plain)], [most_gradients(together)]
        else:
            group = rank_group(plain.ranks)
            expected, found = group.run(most_gradients, plain), group.run(most_gradients, together)
        for (exact, most_before, _), (got, most, left) in zip(expected, found, strict=True):
            assert most_before >= 6 and most <= 2 and left == []
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(got["never.weight"], tangled().never.weight.detach(), rtol=0, atol=0)


def bent_loss(model, batch):
    """The mean of one replica's samples, and a penalty on the gradient of a weight."""
    x = model(batch["image"])
    loss = (x * x.detach().sin()).mean()
    plain = getattr(model, "module", model)
    (slope,) = torch.autograd.grad(loss, plain.head.weight, create_graph=True)
    return loss + slope.square().sum()


def bent_network():
    """Hooks on a map, on a weight before it has its gradient and after; each does more than to scale it."""

    def bend_map(module, args, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))

    def bend_after(parameter):
        parameter.grad.mul_(10).tanh_()

    net = network()
    net.stem.register_forward_hook(bend_map)
    net.stem.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    net.head.bias.register_post_accumulate_grad_hook(bend_after)
    return net


def bent(strategy):
    """Parameters after two steps; without a strategy by plain PyTorch."""
    net = bent_network()
    if strategy is None:
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        for number in range(2):
            optimizer.zero_grad()
            bent_loss(net, batch_of(number)).backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    model = parallelize_for(strategy, net, mesh)
    make = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    step = ff.TrainStep(model, bent_loss, build_optimizer(make, model, strategy), strategy)
    for number in range(2):
        batch = batch_of(number)
        step({name: ff.shard(value, mesh) for name, value in batch.items()} if strategy.ranks > 1 else batch)
    return [p.detach() for p in model.parameters()]


def test_hooks_see_one_process_s_gradients():
    expected = bent(None)
    for strategy in (replace(s, ema_decay=None, optimizer="recipe", data=1) for s in IN_BACKWARD):
        for found in [bent(strategy)] if strategy.ranks == 1 else rank_group(strategy.ranks).run(bent, strategy):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def told_of_hooks(strategy):
    """How often the ranks are told that a hook sees one replica's gradient."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        bent(strategy)
    return sum("gets the gradient of one replica's loss" in str(warning.message) for warning in said)


def test_a_hook_that_sees_one_replica_s_gradient_is_told_once():
    for data in (1, 2):
        strategy = ff.Strategy(data=data, width=2 // data, update_in_backward=True)
        assert rank_group(2).run(told_of_hooks, strategy) == [data - 1] * 2


def unfrozen(strategy):
    """Parameters after three steps, of which the first trains no stem, and the last no head."""
    model = parallelize_for(strategy, network(), ff.init_mesh())
    model.module.stem.requires_grad_(False)
    step = ff.TrainStep(model, exact_loss, build_optimizer(grouped(AdamW), model, strategy), strategy)
    replica, share = 0 if strategy.data == 1 else torch.distributed.get_rank(), BATCH // strategy.data
    for number in range(3):
        model.module.stem.requires_grad_(number > 0)
        model.module.head.requires_grad_(number < 2)
        step({name: value[replica * share :][:share] for name, value in batch_of(number).items()})
    return [p.detach() for p in model.parameters()]


def test_what_is_trained_may_change():
    expected = unfrozen(ff.Strategy())
    found = [unfrozen(ff.Strategy(update_in_backward=True))]
    found += rank_group(2).run(unfrozen, ff.Strategy(data=2, update_in_backward=True))
    for parameters in found:
        assert error(changes(parameters), changes(expected)) < 1e-12


def with_another_head(strategy):
    """Parameters after three steps; each rank has drawn a head of its own before the second."""
    model = parallelize_for(strategy, network(), ff.init_mesh())
    optimizer = build_optimizer(grouped(AdamW), model, strategy)
    step = ff.TrainStep(model, exact_loss, optimizer, strategy)
    replica, share = 0 if strategy.data == 1 else torch.distributed.get_rank(), BATCH // strategy.data
    for number in range(3):
        if number == 1:
            torch.manual_seed(replica)
            model.module.head = torch.nn.Conv2d(6, 4, 1).double()
            optimizer.add_param_group({"params": model.module.head.parameters()})
        step({name: value[replica * share :][:share] for name, value in batch_of(number).items()})
    return [p.detach() for p in model.parameters()]


def test_a_new_head_is_trained():
    expected = with_another_head(ff.Strategy())
    found = [with_another_head(ff.Strategy(update_in_backward=True))]
    found += rank_group(2).run(with_another_head, ff.Strategy(data=2, update_in_backward=True))
    for parameters in found:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def broken(kind, ranks):
    strategy = ff.Strategy(data=ranks, update_in_backward=True)
    model = ff.parallelize(network(), ff.init_mesh(), average_gradients=False)
    step = ff.TrainStep(model, spiked if kind == "gradient" else exact_loss, SGD(model.parameters(), lr=0.1), strategy)
    batch = batch_of(0)
    if kind == "loss" and (ranks == 1 or torch.distributed.get_rank() == 1):
        batch["image"] = batch["image"] * math.nan
    if kind == "nothing counts":
        batch["target"] = torch.full_like(batch["target"], -1)
    if kind == "rehearsal":
        step.rehearse(batch)
        return True, error_free(model)
    record = step(batch)
    return record.skipped, error_free(model)


def error_free(model):
    return all(map(torch.equal, model.parameters(), network().parameters()))


def spiked(model, batch):
    total, count = exact_loss(model, batch)
    return Spike.apply(total), count


@pytest.mark.parametrize("kind", ["loss", "nothing counts", "rehearsal"])
def test_nothing_is_updated_in_backward_when_a_rank_cannot(kind):
    for skipped, unchanged in [broken(kind, 1), *rank_group(2).run(broken, kind, 2)]:
        assert skipped and unchanged


def test_a_gradient_that_is_not_finite_ends_an_update_in_backward():
    with pytest.raises(GradientError, match=r"the gradient's norm is (inf|nan), and update_in_backward has applied it"):
        broken("gradient", 1)


def channels_last(dtype):
    return network(dtype).to(memory_format=torch.channels_last)


class Reentrant(nn.Module):
    """Its inner parameters are in no graph that the loss shows."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, image):
        return checkpoint(self.inner, self.first(image), use_reentrant=True)


def reentrant(dtype):
    torch.manual_seed(0)
    return Reentrant().to(dtype)


def test_updates_in_backward_of_channels_last():
    """Fused kernels go through memory in order: parameter and gradient must lie alike."""
    exact, *_ = trained(ff.Strategy(optimizer="adamw"), build=channels_last)
    for spread in ({}, {"data": 2}):
        strategy = ff.Strategy(optimizer="adamw", update_in_backward=True, **spread)
        arguments = (strategy, ADAMW, torch.float64, None, exact_loss, channels_last)
        results = [trained(*arguments)] if strategy.ranks == 1 else rank_group(2).run(trained, *arguments)
        for parameters, *_ in results:
            assert error(changes(parameters), changes(exact)) < 1e-12


def test_a_gradient_that_no_graph_shows_is_refused():
    with pytest.raises(GradientError, match=r"inner\.(weight|bias) got a gradient that the loss's graph does not show"):
        trained(ff.Strategy(update_in_backward=True), build=reentrant)


def clamped(strategy):
    """Parameters after three steps; before the second a hook that clamps gradients came."""
    model = network()
    options = build_optimizer(grouped(AdamW), model, strategy), strategy
    step = ff.TrainStep(model, lambda model, batch: model(batch["image"]).square().mean(), *options)
    for number in range(3):
        step(batch_of(number))
        if number == 0:
            model.head.weight.register_post_accumulate_grad_hook(clamp)
    return [p.detach() for p in model.parameters()]


def clamp(parameter):
    parameter.grad.clamp_(-1e-4, 1e-4)


def test_hooks_that_come_later_see_gradients_before_they_are_used():
    assert error(changes(clamped(ff.Strategy(update_in_backward=True))), changes(clamped(ff.Strategy()))) < 1e-12


class Fourier(nn.Module):
    """As in a Fourier neural operator."""

    def __init__(self):
        super().__init__()
        self.weight, self.lift = nn.Parameter(torch.randn(3, 6, 4, dtype=torch.complex128)), nn.Conv2d(3, 3, 1).double()

    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(self.lift(x)) * self.weight, s=x.shape[-2:])


def fourier(strategy):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    mesh = ff.init_mesh()
    model = parallelize_for(strategy, Fourier(), mesh)
    step = ff.TrainStep(model, lambda m, x: m(x).square().mean(), AdamW(model.parameters(), lr=0.1), strategy)
    norms = [step(x[mesh.get_local_rank("data") :: strategy.data]).grad_norm for _ in range(2)]
    return [*(p.detach() for p in model.parameters()), torch.tensor(norms)]


def test_complex_parameters():
    expected = fourier(ff.Strategy())
    found = [fourier(ff.Strategy(update_in_backward=True))]
    for each in found + rank_group(2).run(fourier, ff.Strategy(data=2, update_in_backward=True)):
        torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-12)


class Counting(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class CountingInAttribute(SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


class CountingForAll(SGD):
    def step(self, closure=None):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [Counting, CountingInAttribute, CountingForAll])
def test_an_optimizer_that_counts_its_steps_is_refused(kind):
    with pytest.raises(StrategyError, match=f"{kind.__name__} counts steps by itself"):
        trained(ff.Strategy(update_in_backward=True), grouped(kind))


def test_an_optimizer_with_step_hooks_is_refused():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(StrategyError, match="SGD has step hooks"):
        ff.TrainStep(model, lambda model, x: model(x).sum(), optimizer, ff.Strategy(update_in_backward=True))


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Stopped(nn.Module):
    """The gradient of `side` is stopped by a Function, which torch tells only when backward comes there."""

    def __init__(self):
        super().__init__()
        self.first, self.side, self.last = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x):
        return self.last(self.first(x).tanh() + Stop.apply(self.side(x)))


def stopped(strategy):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    mesh = ff.init_mesh()
    model = parallelize_for(strategy, Stopped().double(), mesh, find_unused_parameters=True)
    step = ff.TrainStep(model, lambda m, x: m(x).square().mean(), AdamW(model.parameters(), weight_decay=0.5), strategy)
    for _ in range(2):
        step(x[mesh.get_local_rank("data") :: strategy.data])
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def test_a_gradient_that_a_function_stops_is_none():
    expected = stopped(ff.Strategy())
    torch.testing.assert_close(stopped(ff.Strategy(update_in_backward=True)), expected, rtol=1e-12, atol=1e-15)
    for found in rank_group(2).run(stopped, ff.Strategy(data=2, shard_parameters=True)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(RankFailure, match=r"side.(weight|bias) gets no gradient, though the loss depends on it"):
        rank_group(2).run(stopped, ff.Strategy(data=2, update_in_backward=True))
