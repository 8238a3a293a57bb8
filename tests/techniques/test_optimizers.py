"""The strategy's optimizers on whole, sharded and partly kept state."""

import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.model.parallelize_for import parallelize_for
from fullframe.model.sharding.values import whole_value
from fullframe.recipe import Parameters
from fullframe.simulation.memory.trace import storages
from fullframe.techniques.optimizers import build_optimizer, set_learning_rate
from tests.rank_group import RankFailure, rank_group
from tests.training import tiny
from tests.training.test_combinations import BATCH, STEPS, batch_of, error, exact_loss, loss, network


class Grouped(NamedTuple):
    """A recipe's optimizer: no weight decay on vectors, and another learning rate."""

    kind: Any
    options: dict[str, Any]

    def __call__(self, parameters):
        parameters = list(parameters)
        return self.kind(
            [
                {"params": [p for p in parameters if p.ndim > 1]},
                {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
            ],
            lr=1e-2,
            weight_decay=0.1,
            **self.options,
        )


def grouped(kind, **options):
    return Grouped(kind, options)


ADAMW = grouped(AdamW)


def state_bytes(optimizer):
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(storage.nbytes() for value in values for storage in storages(value))


def trained(strategy, make=ADAMW, dtype=torch.float64, schedule=None, loss_of=exact_loss, build=network):
    """Parameters after some steps, the state's bytes on this rank, the gradient norms, and the averages."""
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    model = parallelize_for(
        strategy,
        build(dtype),
        mesh,
    )
    optimizer = build_optimizer(make, model, strategy)
    step = ff.TrainStep(model, loss_of, optimizer, strategy)
    replica, share = mesh.get_local_rank("data"), BATCH // strategy.data
    norms = []
    for number in range(STEPS):
        if schedule is not None:
            set_learning_rate(optimizer, schedule(number))
        batch = {name: value[replica * share :][:share] for name, value in batch_of(number, dtype).items()}
        if strategy.height * strategy.width > 1:
            batch = {name: ff.shard(value, mesh) for name, value in batch.items()}
        record = step(batch)
        assert not record.skipped
        norms.append(record.grad_norm)
    averages = [] if step.average is None else [whole_value(a) for a in step.average.state_dict().values()]
    return [whole_value(p.detach()) for p in model.parameters()], state_bytes(optimizer), norms, averages


def changes(parameters, dtype=torch.float64):
    return [p.double() - q.detach().double() for p, q in zip(parameters, network(dtype).parameters(), strict=True)]


def warmed_up(number):
    return (number + 1) / STEPS


def plainly(make, schedule=lambda number: 1.0):
    """By plain PyTorch in one process."""
    model = network()
    optimizer = make(Parameters(model.named_parameters()))
    rates = [group["lr"] for group in optimizer.param_groups]
    for number in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(number)
        optimizer.zero_grad()
        total, count = exact_loss(model, batch_of(number))
        (total / count).backward()
        optimizer.step()
    return changes([p.detach() for p in model.parameters()])


def by_name(parameters):
    """A recipe's optimizer that decays weights and gives the last layer another learning rate."""
    names = [name for name, _ in parameters.named()]
    last = names[-1].rpartition(".")[0]
    groups = [
        {"params": [p for name, p in parameters.named() if not name.startswith(last)]},
        {"params": [p for name, p in parameters.named() if name.startswith(last)], "lr": 3e-2},
    ]
    assert names == [name for name, _ in network().named_parameters()] and len(parameters) == len(list(parameters))
    return AdamW(groups, lr=1e-2)


# The named optimizer, the recipe's, and the optimizer that must come of it.
NAMED = {
    "recipe": ("recipe", grouped(AdamW), grouped(AdamW)),
    "adamw of adam": ("adamw", grouped(Adam, betas=(0.8, 0.9)), grouped(AdamW, betas=(0.8, 0.9))),
    "adamw of sgd": ("adamw", grouped(SGD, momentum=0.5), grouped(AdamW)),
    "sgd": ("sgd", grouped(AdamW), grouped(SGD, momentum=0.9)),
    "sgd of sgd": ("sgd", grouped(SGD, momentum=0.5, nesterov=True), grouped(SGD, momentum=0.5, nesterov=True)),
    "adafactor": ("adafactor", grouped(AdamW), grouped(Adafactor)),
    "by name": ("recipe", by_name, by_name),
    "maximize": ("sgd", grouped(AdamW, maximize=True), grouped(SGD, momentum=0.9, maximize=True)),
}
SPREAD = {
    "whole": {"width": 2},
    "state sharded": {"data": 2, "width": 2, "shard_optimizer": True},
    "parameters sharded": {"data": 2, "width": 2, "shard_parameters": True},
}


@pytest.mark.parametrize(
    ("name", "spread"),
    [(n, s) for n in NAMED for s in SPREAD if (n, s) != ("adafactor", "parameters sharded")],  # which is refused
)
def test_the_named_optimizer_is_torchs_with_the_recipes_options(name, spread):
    optimizer, make, expected = NAMED[name]
    strategy = ff.Strategy(optimizer=optimizer, **SPREAD[spread])
    for parameters, *_ in rank_group(strategy.ranks).run(trained, strategy, make, torch.float64, warmed_up):
        assert error(changes(parameters), plainly(expected, warmed_up)) < 1e-12


class Columns(SGD):
    """Divides by the norms of columns, in place, as CAME and others do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for gradient in (parameter.grad for parameter in group["params"] if parameter.grad is not None):
                gradient.div_(gradient.square().sum(0, keepdim=True).sqrt_().add_(1.0))
        return super().step(closure)


def test_what_sharded_parameters_do_not_take_is_said():
    make, strategy = grouped(Columns), ff.Strategy(width=2, shard_optimizer=True)
    for parameters, *_ in rank_group(2).run(trained, strategy, make):
        assert error(changes(parameters), changes(trained(ff.Strategy(), make)[0])) < 1e-12
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(trained, ff.Strategy(width=2, shard_parameters=True), make)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["StrategyError"] * 2
    said = (
        "Columns cannot update sharded parameters, on which its step raised RuntimeError: aten.sqrt_.default: in-place"
    )
    assert said in str(caught.value) and "use shard_optimizer in the place of" in str(caught.value)


@pytest.mark.parametrize("make", [grouped(Adafactor), grouped(AdamW)])
def test_adafactor_on_sharded_parameters_is_refused(make):
    name = "recipe" if make.kind is Adafactor else "adafactor"
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(trained, ff.Strategy(width=2, shard_parameters=True, optimizer=name), make)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["StrategyError"] * 2
    assert "use optimizer 'adamw8bit', or shard_optimizer" in str(caught.value)


def wide(dtype):
    """Weights of 8192 elements: torchao keeps smaller ones in 32 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 1), nn.GELU(), nn.Conv2d(64, 128, 1), nn.Conv2d(128, 4, 1)).to(dtype)


def test_8_bit_state():
    """Near to AdamW's numbers at about a third of its state's bytes, for some weights are small; whole and sharded."""
    exact, exact_bytes, *_ = trained(ff.Strategy(), ADAMW, torch.float32, warmed_up, loss, wide)
    moved = [p - q.detach() for p, q in zip(exact, wide(torch.float32).parameters(), strict=True)]
    for option, most_bytes in ({}, 0.37), ({"shard_optimizer": True}, 0.27), ({"shard_parameters": True}, 0.2):
        strategy = ff.Strategy(optimizer="adamw8bit", width=2, **option)
        for parameters, held, *_ in rank_group(2).run(
            trained, strategy, grouped(Adam), torch.float32, warmed_up, loss, wide
        ):
            found = [p - q.detach() for p, q in zip(parameters, wide(torch.float32).parameters(), strict=True)]
            assert 1e-4 < error(found, moved) < 0.05
            assert held < most_bytes * exact_bytes


def test_hooks_of_an_8_bit_step_run_once():
    """Also where torchao's own class was used before, of which torch has wrapped the step since."""
    pytest.importorskip("torchao.optim").AdamW8bit([nn.Parameter(torch.zeros(3))])
    optimizer, calls = build_optimizer(grouped(Adam), network(), ff.Strategy(optimizer="adamw8bit")), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]


def test_8_bit_state_without_torchao_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(StrategyError, match=r"needs torchao .*pip install 'fullframe\[adamw8bit\]'"):
        build_optimizer(grouped(Adam), network(), ff.Strategy(optimizer="adamw8bit"))


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "adamw8bit"])
def test_complex_parameters_are_updated_as_such_or_refused(name):
    model = nn.ParameterList([torch.full((3,), 1 + 1j), torch.ones(3)])
    if name in ("adafactor", "adamw8bit"):  # torch's refuses them, torchao's would drop the imaginary part
        with pytest.raises(StrategyError, match=f"'{name}' cannot update complex parameters"):
            build_optimizer(lambda parameters: Adam(parameters), model, ff.Strategy(optimizer=name))
        return
    optimizer = build_optimizer(lambda parameters: Adam(parameters, lr=0.1), model, ff.Strategy(optimizer=name))
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 1j if parameter.is_complex() else 1.0)
    optimizer.step()
    assert bool((model[0].imag < 0.95).all()) and bool((model[0].real > 0.95).all())


def test_state_is_shared_out():
    """Each rank keeps a half; Adagrad, which makes its state before the first step, too."""
    for make in (grouped(AdamW), grouped(Adagrad)):
        _, whole, *_ = trained(ff.Strategy(), make)
        for option in ("shard_optimizer", "shard_parameters"):
            results = rank_group(2).run(trained, ff.Strategy(width=2, **{option: True}), make)
            held = [held for _, held, *_ in results]
            assert max(held) < 0.6 * whole
            # Every parameter's step counter is on each rank that has a part of it.
            assert 0 <= sum(held) - whole <= 8 * len(changes(results[0][0]))


@pytest.mark.parametrize("spread", SPREAD)
def test_clipping_and_averages_of_sharded_parameters(spread):
    options = {"clip_norm": 0.02, "ema_decay": 0.7}
    expected = trained(ff.Strategy(**options))
    strategy = ff.Strategy(**SPREAD[spread], **options)
    for parameters, _, norms, averages in rank_group(strategy.ranks).run(trained, strategy):
        assert norms == pytest.approx(expected[2], rel=1e-10)
        assert min(norms) > 0.02  # clipped in every step
        assert error(changes(parameters), changes(expected[0])) < 1e-12
        assert len(averages) == len(parameters)
        assert error(changes(averages), changes(expected[3])) < 1e-12
    assert error(changes(expected[0]), changes(trained(ff.Strategy())[0])) > 1e-6


def averages_applied():
    """An evaluation under averaged parameters, then a step: neither sees the other's parameters."""
    mesh = ff.init_mesh(width=2)
    strategy = ff.Strategy(width=2, shard_parameters=True, ema_decay=0.5)
    model = ff.parallelize(network(), mesh, shard_parameters=True)
    step = ff.TrainStep(model, exact_loss, build_optimizer(grouped(AdamW), model, strategy), strategy)
    losses = []
    for number in range(STEPS):
        batch = {name: ff.shard(value, mesh) for name, value in batch_of(number).items()}
        step(batch)
        with torch.no_grad(), step.average.applied():
            total, count = exact_loss(model, batch)
            losses.append((total / count).item())
    return [whole_value(p.detach()) for p in model.parameters()], losses


def test_evaluation_with_averages_of_sharded_parameters():
    model, average = network(), network()
    optimizer = grouped(AdamW)(model.parameters())
    expected = []
    for number in range(STEPS):
        optimizer.zero_grad()
        total, count = exact_loss(model, batch_of(number))
        (total / count).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
            total, count = exact_loss(average, batch_of(number))
        expected.append((total / count).item())
    for parameters, losses in rank_group(2).run(averages_applied):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert error(changes(parameters), plainly(grouped(AdamW))) < 1e-12


def mismatched():
    messages = []
    for options, strategy in [
        ({}, ff.Strategy(width=2, update_in_backward=True)),
        ({}, ff.Strategy(width=2, shard_parameters=True)),
        ({"average_gradients": False}, ff.Strategy(width=2)),
        ({"shard_parameters": True}, ff.Strategy(width=2)),
    ]:
        model = ff.parallelize(network(), ff.init_mesh(width=2), **options)
        with pytest.raises(StrategyError) as caught:
            ff.TrainStep(model, exact_loss, SGD(model.parameters(), lr=0.1), strategy)
        messages.append(str(caught.value).rpartition("mesh, ")[2])
    return messages


def test_a_model_that_was_parallelized_for_another_strategy():
    wanted = [
        "average_gradients=False)",
        "shard_parameters=True)",
        "average_gradients=True)",
        "shard_parameters=False)",
    ]
    for messages in rank_group(2).run(mismatched):
        assert messages == wanted


def finished(model, run_dir):
    """A whole model on one rank alone."""
    with torch.no_grad():
        torch.save(model(tiny.Frames(1).images), run_dir / "finished.pt")


def fitted(strategy, run_dir):
    recipe = tiny.recipe(
        model=tiny.Plain,
        steps=3,
        evaluate=tiny.evaluate,
        evaluation_data=evaluation_frames,
        evaluate_every=2,
        finish=finished,
    )
    records = []
    model = ff.fit(recipe, strategy, run_dir, on_record=records.append)
    return records, [p.detach() for p in model.parameters()]


def evaluation_frames():
    return tiny.Frames(5)  # more for one replica than for the other


@pytest.mark.parametrize("option", ["shard_optimizer", "shard_parameters", "update_in_backward"])
def test_a_whole_run(option, tmp_path):
    group = rank_group(4)
    expected, parameters = group.run(fitted, ff.Strategy(data=2, width=2), tmp_path / "plain")[0]
    for records, found in group.run(fitted, ff.Strategy(data=2, width=2, **{option: True}), tmp_path / option):
        torch.testing.assert_close(found, parameters, rtol=1e-10, atol=1e-13)
        for record, wanted in zip(records, expected, strict=True):
            assert record.keys() == wanted.keys()
            for name in record.keys() - {"step_seconds"}:
                assert record[name] == pytest.approx(wanted[name], rel=1e-9), name
    images = [torch.load(tmp_path / run / "finished.pt") for run in ("plain", option)]
    torch.testing.assert_close(*images, rtol=1e-10, atol=1e-13)


def test_groups_that_share_a_tensor_as_rate_begin_with_the_same():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], rate)
    for factor in (0.25, 1.0):
        set_learning_rate(optimizer, factor)
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5 * factor] * 2
