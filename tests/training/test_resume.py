"""A resumed run goes on bit for bit on the same mesh, and to rounding on any other mesh and sharding."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import WeightedRandomSampler

import fullframe as ff
from fullframe.training.checkpoints.export import whole_tensors
from fullframe.training.checkpoints.manifest import read_manifest
from fullframe.training.checkpoints.writer import load, newest_checkpoint
from tests.rank_group import rank_group
from tests.training.checkpoints.states import state_at, write
from tests.training.tiny import Frames, Network, Plain, loss, recipe

ON_ONE = {"ema_decay": 0.9, "clip_norm": 0.5}
CASES = {
    "1": ff.Strategy(**ON_ONE),
    "1, fp16": ff.Strategy(precision="fp16", microbatches=2, **ON_ONE),
    "1x2, sharded optimizer": ff.Strategy(width=2, shard_optimizer=True, **ON_ONE),
    "1x2, fp16, sharded": ff.Strategy(width=2, precision="fp16", shard_parameters=True, **ON_ONE),
    "2 replicas, sharded": ff.Strategy(data=2, shard_parameters=True, **ON_ONE),
    "2x2": ff.Strategy(height=2, width=2, **ON_ONE),
    "2x2, sharded": ff.Strategy(height=2, width=2, shard_parameters=True, microbatches=2, **ON_ONE),
    "2 replicas x 1x2, fp16": ff.Strategy(data=2, width=2, precision="fp16", shard_optimizer=True, **ON_ONE),
    "2 replicas x 1x2, updated in backward": ff.Strategy(data=2, width=2, update_in_backward=True, ema_decay=0.9),
    "2 replicas x 1x2, sharded": ff.Strategy(data=2, width=2, shard_parameters=True, **ON_ONE),
}


def single_precision():
    return Network(dropout=0.2, dtype=torch.float32)


def single_frames():
    return Frames(dtype=torch.float32)


def many_frames():
    return Frames(28)


def early_frames(data):
    """More often than late ones, and some more than once."""
    return WeightedRandomSampler(torch.linspace(1, 0.1, len(data)), len(data))


def run_at_once_and_in_parts(strategy, folder, workers):
    """Ten steps, and five and five; where a process's random states stand plays no part."""
    changes = {"workers": workers, "data": many_frames if workers else Frames}  # an epoch starts processes
    if strategy.precision == "fp16":
        changes |= {"model": single_precision, "data": single_frames}
    if strategy.update_in_backward:
        changes["sampler"] = early_frames
    options = {"checkpoint_every": 4}
    ff.fit(recipe(**changes), strategy, folder / "whole", steps=10, **options)
    ff.fit(recipe(**changes), strategy, folder / "parts", steps=5, **options)
    torch.manual_seed(12345)
    ff.fit(recipe(**changes), strategy, folder / "parts", steps=10, resume=True, **options)


def on_ranks(strategy, function, *args):
    if strategy.ranks == 1:
        return [function(*args)]
    return rank_group(strategy.ranks).run(function, *args, timeout_seconds=250)


def numbers(run_dir):
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "step_seconds"} for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_are_five_and_five_to_the_last_bit(name, tmp_path):
    strategy = CASES[name]
    workers = 2 if name in ("1", "2 replicas, sharded") else 0
    on_ranks(strategy, run_at_once_and_in_parts, strategy, tmp_path, workers)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert len({line["loss"] for line in numbers(tmp_path / "whole")}) == 10
    whole, parts = (tmp_path / part / "checkpoints" / "step-00000010" for part in ("whole", "parts"))
    # Weights, buffers, averages, optimizer state, loss scale, loader: files with equal checksums hold equal bits.
    assert read_manifest(whole) == read_manifest(parts)
    tensors = read_manifest(whole).tensors
    assert any(name.startswith("average/") for name in tensors) and "optimizer/exp_avg/head.1.weight" in tensors
    sharded = len(tensors["optimizer/exp_avg/head.1.weight"].chunks) > 1
    assert sharded == strategy.shard_parameters
    assert (read_manifest(whole).facts["scale"] is not None) == (strategy.precision == "fp16")


def test_another_precision_is_said(tmp_path):
    said = []
    for steps, precision in enumerate(("fp32", "fp32", "bf16", "bf16"), start=1):
        job, strategy = recipe(model=single_precision, data=single_frames), ff.Strategy(precision=precision)
        ff.fit(job, strategy, tmp_path, steps=steps, resume="auto", on_message=said.append)
    said = [message for message in said if message.startswith("the checkpoint is of")]
    assert said == ["the checkpoint is of fp32, this run is of bf16: other rounding from here"]


# On another mesh, world size and sharding


def some_steps(strategy, run_dir, steps, model):
    messages = []
    job = recipe(model=model)
    ff.fit(job, strategy, run_dir, steps=steps, resume=Path(run_dir).exists(), on_message=messages.append)
    return messages


def contents(run_dir):
    """Every tensor of the newest checkpoint, whole."""
    newest, _ = newest_checkpoint(Path(run_dir) / "checkpoints")
    with whole_tensors(newest) as read:
        return {name: read(name) for name in newest.manifest.tensors}


def what_evaluation_sees(model, batch):
    weight = model.get_parameter("head.1.weight")
    narrow = F.conv2d(batch["image"], batch["image"].new_ones(1, 3, 1, 1)).dtype is torch.bfloat16
    return {"weight": (weight.double().sum(), 1), "narrow": (float(narrow), 1)}


@pytest.mark.parametrize("changes", [{"ema_decay": 0.9}, {"precision": "bf16"}], ids=str)
def test_an_evaluation_within_a_run_is_of_its_average_and_precision(changes, tmp_path):
    measured = {"evaluate": what_evaluation_sees, "evaluation_data": single_frames, "evaluate_every": 3}
    job = recipe(model=single_precision, data=single_frames, **measured)
    ff.fit(job, ff.Strategy(**changes), tmp_path, steps=3)
    found, kept = numbers(tmp_path)[-1], contents(tmp_path)
    kind = "average" if "ema_decay" in changes else "model"
    assert found["weight"] == pytest.approx(float(kept[f"{kind}/head.1.weight"].double().sum()), rel=1e-9)
    assert found["narrow"] == ("precision" in changes)


class Scaled(Plain):
    """A number without dims, which no rank has a part of."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, image):
        return super().forward(image) * self.scale


SHARDED, ZERO = {"shard_parameters": True}, {"shard_optimizer": True}
CHAINS = {
    "2x2, 1x2, 1": (Network, [ff.Strategy(height=2, width=2), ff.Strategy(width=2), ff.Strategy()]),
    "sharded, replicated, sharded": (
        Network,
        [
            ff.Strategy(width=2, **SHARDED),
            ff.Strategy(height=2, width=2),
            ff.Strategy(height=2, width=2, **SHARDED),
            ff.Strategy(height=2, **ZERO),
            ff.Strategy(),
        ],
    ),
    "1, zero, replicas": (
        Plain,
        [
            ff.Strategy(),
            ff.Strategy(data=2, width=2, **ZERO),
            ff.Strategy(data=2, **SHARDED),
            ff.Strategy(data=2, height=2),
        ],
    ),
    "whole, 1, whole": (Scaled, [ff.Strategy(width=2, **SHARDED), ff.Strategy(), ff.Strategy(data=2, **SHARDED)]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_moves_to_another_mesh_and_sharding(name, tmp_path):
    model, strategies = CHAINS[name]
    for number, strategy in enumerate(strategies, start=1):
        on_ranks(strategy, some_steps, strategy, tmp_path / "moved", 2 * number, model)
    some_steps(ff.Strategy(), tmp_path / "alone", 2 * len(strategies), model)
    for line, expected in zip(numbers(tmp_path / "moved"), numbers(tmp_path / "alone"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    found, expected = contents(tmp_path / "moved"), contents(tmp_path / "alone")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def one_convolution():
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)


def test_more_ranks_than_parameters(tmp_path):
    """Two of four ranks keep no optimizer state."""
    strategy = ff.Strategy(height=2, width=2, **ZERO)
    on_ranks(strategy, some_steps, strategy, tmp_path / "parts", 2, one_convolution)
    on_ranks(strategy, some_steps, strategy, tmp_path / "parts", 4, one_convolution)
    on_ranks(strategy, some_steps, strategy, tmp_path / "whole", 4, one_convolution)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    some_steps(ff.Strategy(), tmp_path / "parts", 6, one_convolution)
    some_steps(ff.Strategy(), tmp_path / "alone", 6, one_convolution)
    for line, expected in zip(numbers(tmp_path / "parts"), numbers(tmp_path / "alone"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)


def eight_bit_state(folder, steps, sharded):
    """Codes and numbers of this rank's first moment after some steps, going on from what is in `folder`."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    model = nn.Linear(128, 128, bias=False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = state_at(model=model, optimizer=AdamW8bit)
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore"):
        newest, _ = newest_checkpoint(folder)
        if newest is not None:
            load(newest, state)
        for _ in range(steps):
            torch.manual_seed(state.step)
            state.step += 1
            gradient = torch.randn(model.weight.shape)
            model.weight.grad = distribute_tensor(gradient, model.weight.device_mesh) if sharded else gradient
            if sharded:
                model.weight.grad = model.weight.grad.redistribute(placements=model.weight.placements)
            state.optimizer.step()
        if steps:
            write(state, folder)
    moment = state.optimizer.state[model.weight]["exp_avg"]
    local = moment.to_local() if sharded else moment
    numbers = moment.full_tensor() if sharded else moment
    return local.codes, local.scale, torch.empty(numbers.shape).copy_(numbers)


def test_eight_bit_state_that_is_sharded(tmp_path):
    """The same sharding goes on with the same bits, another one with the same numbers, as far as 8 bits hold them."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    rank_group(2).run(eight_bit_state, parts, 2, True)
    found = rank_group(2).run(eight_bit_state, parts, 1, True)
    for mine, expected in zip(found, rank_group(2).run(eight_bit_state, whole, 3, True), strict=True):
        assert all(map(torch.equal, mine, expected))
    numbers = found[0][2]
    _, scale, alone = eight_bit_state(parts, 0, False)
    assert scale.numel() == 64 and (alone - numbers).abs().max() <= 0.01 * numbers.abs().max()
    eight_bit_state(tmp_path / "alone", 2, False)
    for _, _, spread in rank_group(2).run(eight_bit_state, tmp_path / "alone", 0, True):
        assert (spread - eight_bit_state(tmp_path / "alone", 0, False)[2]).abs().max() <= 0.01 * spread.abs().max()


class Remembering(Network):
    """Keeps what it has seen where no checkpoint looks: an attribute, and a buffer that is not stored."""

    def __init__(self):
        super().__init__()
        self.seen = 0
        self.register_buffer("last", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.seen += 1
        self.note = float(self.seen)
        with torch.no_grad():
            self.last += 1.0
        return super().forward(x)


def seen_when_resumed(folder):
    made = []

    def remembering():
        made.append(Remembering())
        return made[-1]

    ff.fit(recipe(model=remembering), ff.Strategy(width=3), folder, steps=2, checkpoint_every=2)
    made.clear()
    ff.fit(recipe(model=remembering), ff.Strategy(width=3), folder, steps=3, resume=True)
    return [(model.seen, float(model.last)) for model in made]


def test_a_resumed_run_of_many_ranks_has_seen_its_own_steps_alone(tmp_path):
    """Before they go on, more than two ranks take a step that comes to nothing."""
    for found in rank_group(3).run(seen_when_resumed, tmp_path):
        assert max(found) == (1, 1.0)


def losses_when_resumed(folder):
    """How often the loss is computed in a step that goes on."""
    calls = []

    def counted(model, batch):
        calls.append(batch["index"])
        return loss(model, batch)

    strategy = ff.Strategy(width=3, update_in_backward=True)
    ff.fit(recipe(loss=counted), strategy, folder, steps=2)
    calls.clear()
    ff.fit(recipe(loss=counted), strategy, folder, steps=3, resume=True)
    return len(calls)


def test_a_resumed_run_that_updates_in_backward_takes_no_other_step_which_would_hold_all_gradients(tmp_path):
    assert rank_group(3).run(losses_when_resumed, tmp_path) == [1, 1, 1]
