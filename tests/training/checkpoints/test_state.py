"""Everything a run needs comes back to the last bit, and a checkpoint of another run is refused by name."""

import json
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import fullframe as ff
from fullframe.errors import CheckpointError
from fullframe.ranks.randomness import kept_random_state, random_state, set_random_state
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.precision import LossScale
from fullframe.training.checkpoints.manifest import MANIFEST
from fullframe.training.checkpoints.writer import Checkpoints, checkpoints_in
from tests.training.checkpoints.states import (
    assert_equal,
    names_in,
    restored,
    state_at,
    train,
    values_of,
    write,
)
from tests.training.tiny import Frames, Network, recipe


def test_other_tools_read_it(tmp_path):
    state = train(state_at(), 7)
    path = write(state, tmp_path / "new" / "checkpoints")
    assert path == tmp_path / "new" / "checkpoints" / "step-00000007"
    assert names_in(path) == [MANIFEST, "rank-0.safetensors"]
    tensors = load_file(path / "rank-0.safetensors")
    model = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    other = Network()
    other.load_state_dict(model)
    assert_equal(other.state_dict(), state.model.state_dict())
    assert torch.equal(
        tensors["optimizer/exp_avg/head.1.bias"], state.optimizer.state[state.model.head[1].bias]["exp_avg"]
    )
    assert json.loads((path / MANIFEST).read_text())["checkpoint"]["step"] == 7


def test_every_number_comes_back(tmp_path):
    scale = LossScale()
    scale.value, scale._good_steps = 512.0, 77
    model = Network()
    state = train(state_at(model=model, scale=scale, average=ParameterAverage(model, 0.9)), 3)
    state.loader.load_state_dict(state.loader.state_dict() | {"epoch": 2, "position": 1})
    write(state, tmp_path)
    model = Network()
    fresh = state_at(seed=1, model=model, scale=LossScale(), average=ParameterAverage(model, 0.9))
    assert restored(tmp_path, fresh) == []
    assert_equal(values_of(fresh), values_of(state))
    assert fresh.facts() == state.facts() and fresh.step == 3
    assert fresh.scale.value == 512.0 and fresh.scale._good_steps == 77
    assert_equal(values_of(train(fresh, 2)), values_of(train(state, 2)))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw, a tensor as rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "adamw, a tensor with a dim as rate": lambda p: torch.optim.AdamW(p, torch.tensor([0.01])),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
}


class Counting(torch.optim.Optimizer):
    """Keeps a whole number, a float, a flag, nothing, lists and dicts of tensors, and an option that it changes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "seen": 0, "seen_of": (0, 9), "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["seen"] += 1
            group["seen_of"] = (group["seen_of"][0] + 1, 9)
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) * group["betas"][0]
                state["odd"] = not state.get("odd", False)
                state["nothing"] = None
                factors = state.setdefault("factors", [torch.zeros_like(parameter), torch.zeros(3).double()])
                by_dim = state.setdefault("by_dim", {"none": [None], "rows": [torch.zeros(2).double()]})
                for factor in (*factors, *by_dim["rows"]):
                    factor.add_(parameter.grad.mean())
                scale = state["decay"] / (state["count"] + state["odd"] + group["seen"])
                parameter.sub_(parameter.grad * scale + factors[1].sum() * by_dim["rows"][0].sum())


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), Counting], ids=[*OPTIMIZERS, "counting"])
def test_every_optimizer_goes_on_to_the_last_bit(make, tmp_path):
    whole = train(state_at(optimizer=make), 4)
    write(train(state_at(optimizer=make), 2), tmp_path)
    parts = state_at(seed=1, optimizer=make)
    assert restored(tmp_path, parts) == []
    assert_equal(values_of(train(parts, 2)), values_of(whole))
    for group, expected in zip(parts.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0}


def test_eight_bit_state_goes_on_to_the_last_bit(tmp_path):
    from torchao.optim import AdamW8bit

    def make():
        torch.manual_seed(0)
        return state_at(model=nn.Linear(80, 64), optimizer=AdamW8bit)  # a weight that is quantized, a bias that is not

    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore"):
        whole = train(make(), 4)
        write(train(make(), 2), tmp_path)
        parts = make()
        restored(tmp_path, parts)
        train(parts, 2)
    first, second = (s.optimizer.state[s.model.weight] for s in (whole, parts))
    assert type(first["exp_avg"]).__name__ == "OptimState8bit"
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(first[key].codes, second[key].codes) and torch.equal(first[key].scale, second[key].scale)
    assert torch.equal(whole.model.weight, parts.model.weight)


def test_before_the_first_step(tmp_path):
    write(state_at(0), tmp_path)
    fresh = state_at(seed=1)
    restored(tmp_path, fresh)
    assert fresh.step == 0 and not fresh.optimizer.state
    assert_equal(values_of(train(fresh, 3)), values_of(train(state_at(0), 3)))


def frozen_body():
    model = Network()
    model.body.requires_grad_(False)
    return model


def test_frozen_parameters_and_parameters_without_a_gradient(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        state = state_at(seed=seed, model=frozen_body())
        state.model.head[1].bias.requires_grad_(False)  # in the optimizer, and without a gradient so far
        return state

    state = train(make(0), 2)
    assert len(state.optimizer.state) == 1
    write(state, tmp_path)
    fresh = make(1)
    restored(tmp_path, fresh)
    assert_equal(values_of(fresh), values_of(state))
    assert len(fresh.optimizer.state) == 1
    for one in (state, fresh):
        one.model.head[1].bias.requires_grad_(True)
    assert_equal(values_of(train(fresh, 2)), values_of(train(state, 2)))


def test_expanded_buffers(tmp_path):
    def make(first):
        model = nn.Linear(2, 2)
        model.register_buffer("grid", torch.meshgrid(first + torch.arange(3.0), torch.arange(2.0), indexing="ij")[0])
        return state_at(model=model)

    state, fresh = make(0.0), make(7.0)
    write(state, tmp_path)
    restored(tmp_path, fresh)
    assert torch.equal(fresh.model.grid, state.model.grid) and fresh.model.grid.stride() == (1, 0)


EXTRA = (  # and of a new module
    ({"images": [1, 2.5, None], "name": "x"}, {}),
    (torch.arange(5), torch.arange(0)),
    (torch.ones(2, 3), None),
    ([1], torch.zeros(2)),
)


def test_extra_state_of_a_module(tmp_path):
    class Counter(nn.Linear):
        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    model = Counter(2, 2)
    other = Counter(2, 2)
    for number, (seen, at_first) in enumerate(EXTRA):
        model.seen, other.seen = seen, at_first
        write(state_at(model=model), tmp_path / str(number))
        restored(tmp_path / str(number), state_at(model=other))
        assert type(other.seen) is type(seen) and repr(other.seen) == repr(seen)
    model.seen = object()
    with pytest.raises(CheckpointError, match=r"the model's extra state _extra_state \(object\) cannot be stored, as"):
        write(state_at(model=model), tmp_path)


def test_random_states_come_back():
    def draw():
        return random.random(), float(np.random.normal()), torch.rand(()).item()

    np.random.seed(0)
    np.random.normal()  # leaves a second number in numpy's cache
    state = random_state()
    first = draw()
    set_random_state(state)
    assert draw() == first
    set_random_state(state)
    with kept_random_state():
        draw()
    assert draw() == first


class Grown(Network):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(2, 2)


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}])


def with_an_empty_group(parameters):
    return torch.optim.AdamW([{"params": list(parameters)}, {"params": []}])


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path):
    write(train(state_at(), 2), tmp_path)
    cases = [
        ({"model": Grown()}, "is of another model: the model's extra.bias, extra.weight are not in it; resume with"),
        ({"model": Network().head}, "another model: .*body.0.bias, body.0.weight, body.1.bias, ... .9. are not in the"),
        ({"model": Network(dtype=torch.float32)}, "model/body.0.weight is float64 .6, 3, 3, 3., this run's is float32"),
        ({"optimizer": torch.optim.SGD}, "the checkpoint's optimizer is AdamW, this run's is SGD; resume with the"),
        ({"optimizer": with_an_empty_group}, "the optimizer has 2 groups of parameters, the checkpoint's 1; resume"),
        ({"optimizer": two_groups}, "the optimizer has 2 groups of parameters, the checkpoint's 1, and body.0.bias"),
        (
            {"optimizer": lambda p: torch.optim.AdamW(p, amsgrad=True)},
            "the checkpoint has no optimizer/max_exp_avg_sq/body.0.weight; resume with the recipe",
        ),
    ]
    for changes, message in cases:
        with pytest.raises(CheckpointError, match=message):
            restored(tmp_path, state_at(**changes))
    write(train(state_at(optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True)), 3), tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint's optimizer/max_exp_avg_sq/body.0.bias, .* are not of this"):
        restored(tmp_path, state_at())
    other = state_at()
    other.loader = ff.ShardedLoader(DataLoader(Frames(8), 4, shuffle=True), ff.init_mesh())
    shutil.rmtree(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match="loader had samples 12, this one has 8"):
        restored(tmp_path, other)


def test_a_state_that_cannot_be_stored_is_refused_by_name(tmp_path):
    foreign = nn.Parameter(torch.zeros(1))
    state = state_at(optimizer=lambda parameters: torch.optim.SGD([*parameters, foreign], 0.1))
    with pytest.raises(CheckpointError, match="updates a parameter that is not the model's"):
        write(state, tmp_path)
    state = train(state_at(), 1)
    state.optimizer.state[state.model.head[1].bias]["history"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"optimizer/history/head.1.bias is of type list, which a checkpoint"):
        write(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"model/weight is torch.complex128, torch.strided, which a checkpoint"):
        write(state_at(model=nn.Linear(2, 2, dtype=torch.complex128)), tmp_path)
    assert checkpoints_in(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"model/weight is torch.complex128"):
        ff.fit(recipe(model=lambda: nn.Linear(2, 2, dtype=torch.complex128)), ff.Strategy(), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(CheckpointError, match="0 checkpoints cannot be kept; keep at least 1"):
        Checkpoints(tmp_path, keep=0)


class Projecting(torch.optim.SGD):
    """Keeps an object for each parameter from its first step on, as GaLore keeps its projector."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = object()
        return super().step(closure)


def test_an_optimizer_whose_state_cannot_be_stored_is_refused_after_its_first_step(tmp_path):
    """Not at the first checkpoint, with which all that was trained until then would be lost."""
    job, steps = recipe(optimizer=lambda parameters: Projecting(parameters, 0.1)), []
    with pytest.raises(CheckpointError, match=r"optimizer/projector/.* is of type object, which a checkpoint cannot"):
        ff.fit(job, ff.Strategy(), tmp_path, steps=3, checkpoint_every=0, on_record=steps.append)
    assert steps == []


class Holding(torch.optim.Optimizer):
    """Passes everything on to another one, as timm's Lookahead does."""

    def __init__(self, parameters):
        self.base = torch.optim.Adam(parameters)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self):
        self.base.step()

    def state_dict(self):
        return self.base.state_dict()


class Noting(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "calls": 3}


class Shared(torch.optim.SGD):
    def step(self, closure=None):
        self.state["all"]["steps"] = 1
        return super().step(closure)


class Vector(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.param_groups[0]["scales"] = torch.ones(3)


class Vectors(Vector):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups[0]["scales"] = [torch.ones(3)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Holding, "state of Holding that is no parameter's"),
        (Noting, "the state_dict of Noting has beside state and groups .calls."),
        (Shared, "state of Shared that is no parameter's"),
        (Vector, "the option scales of Vector, which is an array"),
        (Vectors, "the option scales of Vectors, which is an array or holds some"),
    ],
)
def test_what_a_checkpoint_lacks_is_said_and_it_is_not_resumed(make, said, tmp_path):
    with pytest.warns(UserWarning, match=f"a checkpoint cannot be resumed, for it lacks .*{said}"):
        write(train(state_at(optimizer=make), 2), tmp_path)
    with pytest.raises(CheckpointError, match=f"the checkpoint lacks .*{said}"):
        restored(tmp_path, state_at(optimizer=make))


class Late(torch.optim.SGD):
    """Begins with slow weights in its second step, where no step with gradients of zero would make them again."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] > 1:
                state.setdefault("slow", parameter.detach().clone())
        return super().step(closure)


def test_state_that_is_begun_after_the_first_step_is_said_to_be_lost(tmp_path):
    job = recipe(optimizer=lambda parameters: Late(parameters, 0.1))
    ff.fit(job, ff.Strategy(), tmp_path, steps=1)
    ff.fit(job, ff.Strategy(), tmp_path, steps=1, resume=True)
    with pytest.warns(UserWarning, match=r"cannot be resumed, for it lacks what makes optimizer/slow/body.0.weight"):
        ff.fit(job, ff.Strategy(), tmp_path, steps=3, resume=True)
    with pytest.raises(CheckpointError, match=r"lacks what makes optimizer/slow/body.0.weight, which Late has begun"):
        ff.fit(job, ff.Strategy(), tmp_path, steps=4, resume=True)


def test_what_the_recipe_changed_since_is_said(tmp_path):
    write(train(state_at(optimizer=lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5)), 1), tmp_path)
    model = frozen_body()
    fresh = state_at(
        model=model,
        optimizer=lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], 0.2),
        average=ParameterAverage(model, 0.5),
    )
    assert restored(tmp_path, fresh) == [
        "the recipe's lr is now 0.2; the optimizer goes on with 0.1",
        "the recipe's weight_decay is now 0.01; the optimizer goes on with 0.5",
        "body.0.bias, body.0.weight, body.1.bias, ... (4) are no longer trained",
        "the checkpoint has no average of the parameters; it begins with their values now",
    ]
    write(fresh, tmp_path)
    model = frozen_body()
    again = state_at(model=model, optimizer=lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], 0.1))
    assert restored(tmp_path, again)[0] == "the recipe's weight_decay is now 0.01; the optimizer goes on with 0.5"
    assert restored(tmp_path, state_at(model=frozen_body()))[-1] == (
        "the checkpoint's average of the parameters is dropped, as ema_decay is not given"
    )
