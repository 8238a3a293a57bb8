"""A model on stages trains as one process does with the same microbatches."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.stages.models import balanced, kept_bytes, parts_of
from fullframe.training.evaluation import OfPart
from tests.rank_group import RankFailure, rank_group

STEPS = 5
SAMPLES = 4


def convolutional() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for stride in (2, 1, 1):
        layers += [nn.Conv2d(8, 8, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1))


class Headed(nn.Module):
    """Layers in a row between others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 3, 1), convolutional(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).tanh())


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, state: Tensor) -> Tensor:
        return state + torch.tanh(self.conv(state))


class Twice(Step):
    """With its layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.conv

    def forward(self, state: Tensor) -> Tensor:
        return self.same(super().forward(state))


class Iterating(nn.Module):
    def __init__(self, step: type[Step] = Step) -> None:
        super().__init__()
        self.stem, self.run = nn.Conv2d(3, 4, 1), ff.unroll(step(), 6, recompute="nested")

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.stem(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": convolutional,
    "with a head": Headed,
    "unrolled": Iterating,
    "layers of two names": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Twice(), nn.Tanh(), Twice(), nn.Conv2d(4, 4, 1)),
    "unrolled, of two names": lambda: Iterating(Twice),
}


def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    wanted = batch["wanted"]
    return F.cross_entropy(model(batch["x"]), wanted, ignore_index=3, reduction="sum"), (wanted != 3).sum()


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(7)
    return [
        {"x": torch.randn(SAMPLES, 3, 6, 8, dtype=torch.float64), "wanted": torch.randint(4, (SAMPLES, 6, 8))}
        for _ in range(STEPS)
    ]


def trained(model: nn.Module, strategy: ff.Strategy, place: Callable[[Any], Any]) -> list[tuple[float, float]]:
    plain = getattr(model, "module", model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    step = ff.TrainStep(model, loss, optimizer, strategy)
    return [(record.loss, record.grad_norm) for record in (step(place(batch)) for batch in batches())]


def compared(name: str, axes: dict[str, int], options: dict[str, Any]) -> float:
    """Largest difference of losses, gradient norms, parameters and buffers after five clipped steps."""
    torch.manual_seed(1)
    plain = MODELS[name]().double()
    other = copy.deepcopy(plain)
    strategy = ff.Strategy(**axes, **options, clip_norm=0.5)
    mesh = ff.init_mesh(strategy.height, strategy.width, stages=strategy.stages)

    def one_process() -> list[tuple[float, float]]:
        """Without ranks: slices of each batch, one after another, in a plain loop."""
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
        found = []
        for batch in batches():
            optimizer.zero_grad()
            count = (batch["wanted"] != 3).sum()
            total = 0.0
            for n in range(strategy.microbatches):
                part = {key: value.chunk(strategy.microbatches)[n] for key, value in batch.items()}
                summed = loss(plain, part)[0]
                (summed / count).backward()
                total += float(summed.detach())
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            found.append((total / float(count), float(norm)))
        return found

    def place(batch: Any) -> Any:
        mine = {key: value.chunk(strategy.data)[mesh.get_local_rank("data")] for key, value in batch.items()}
        return {key: ff.shard(value, mesh) for key, value in mine.items()} if strategy.parts > 1 else mine

    wanted = one_process()
    found = trained(ff.parallelize(other, mesh), strategy, place)
    records = max(abs(a - b) for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True))
    tensors = zip((*other.parameters(), *other.buffers()), (*plain.parameters(), *plain.buffers()), strict=True)
    return max(records, *(float((a - b).detach().abs().max()) for a, b in tensors))


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("layers", {"stages": 2}, {"microbatches": 2}),
        ("layers", {"stages": 2}, {"microbatches": 4, "recompute": "blocks"}),
        ("layers", {"stages": 2, "width": 2}, {"microbatches": 2, "shard_optimizer": True}),
        ("with a head", {"stages": 2}, {"microbatches": 4, "offload": True}),
        ("unrolled", {"stages": 3}, {"microbatches": 2}),
        ("unrolled", {"stages": 2}, {"microbatches": 1, "recompute": "blocks"}),
        ("unrolled", {"stages": 2, "data": 2}, {"microbatches": 2, "ema_decay": 0.5}),
        ("layers of two names", {"stages": 2}, {"microbatches": 2}),
        ("unrolled, of two names", {"stages": 2}, {}),
    ],
)
def test_five_steps_as_in_one_process(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = ff.Strategy(**axes).ranks
    assert max(rank_group(ranks).run(compared, name, axes, options)) < 1e-10


def refusal(way: str) -> None:
    model: nn.Module = Step().double()
    strategy = ff.Strategy(stages=2)
    mesh = ff.init_mesh(stages=2)
    if way == "another mesh":
        mesh = ff.init_mesh()
    if way == "placed already":
        model = ff.unroll(Step(), 2, placement="stages", mesh=mesh)
        mesh, strategy = ff.init_mesh(), ff.Strategy(data=2)
    model = ff.parallelize(model, mesh)
    ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1), strategy)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("no chain", "Step has neither ff.unroll nor an nn.Sequential of 2 modules inside"),
        ("another mesh", "parallelized over a mesh with 1 stages, strategy.stages is 2"),
        ("placed already", "ranks along the stages would get different samples"),
    ],
)
def test_what_is_refused(way: str, words: str) -> None:
    with pytest.raises(RankFailure) as raised:
        rank_group(2).run(refusal, way)
    assert [message for _, kind, message, _ in raised.value.errors if kind == "StrategyError" and words in message]


@pytest.mark.parametrize("option", [{"shard_parameters": True}, {"update_in_backward": True}, {"sync_batchnorm": True}])
def test_what_does_not_go_together(option: dict[str, bool]) -> None:
    with pytest.raises(StrategyError, match="stages does different things on different ranks"):
        ff.Strategy(stages=2, **option)


def test_cuts_are_even() -> None:
    assert balanced([1, 1, 1, 3], 2) == (0, 3, 4)
    assert balanced([5, 1, 1, 1, 1, 1], 3) == (0, 1, 3, 6)
    assert balanced([0, 0, 0], 3) == (0, 1, 2, 3)


def test_what_layers_keep() -> None:
    """In fp32: the convolution its input; the norm its input and statistics; the ReLU its result."""
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(0)]
    image = 2 * 3 * 5 * 7 * 4
    found = kept_bytes(layers, torch.randn(2, 3, 5, 7))
    assert found[0] == image and found[1] >= image * 8 / 3 and found[2] == image * 8 / 3 and found[4] == 0
    assert layers[1].num_batches_tracked == 0
    assert kept_bytes([nn.Linear(3, 3), nn.Linear(4, 4)], torch.randn(2, 3)) == [1.0, 1.0]


def test_what_layers_keep_under_autocast() -> None:
    """The first layer's input may be in 16 bits already, which weights in fp32 take under autocast alone."""
    layers, image = [nn.Conv2d(3, 8, 1), nn.ReLU()], torch.randn(2, 3, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        found = kept_bytes(layers, image.bfloat16())
    assert image.nbytes / 2 <= found[0] <= image.nbytes and found[1] == 8 / 3 * image.nbytes / 2


def test_layers_behind_others_are_simulated_under_autocast() -> None:
    recipe = ff.Recipe(
        model=Headed,
        loss=lambda model, batch: model(batch["image"]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda: [{"image": torch.zeros(3, 16, 24)}],  # type: ignore[arg-type, return-value]
        batch_size=2,
    )
    strategy = ff.Strategy(stages=2, precision="fp16", microbatches=2)
    assert ff.simulate(recipe, strategy, "2xV100-16GB").bytes["activation"] > 0


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(3, 6, 8, generator=generator, dtype=torch.float64)
        return {"x": x, "wanted": torch.randint(4, (6, 8), generator=generator)}


def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
    summed, count = loss(model, batch)
    return {"held_out": (summed, count), "samples": OfPart((torch.ones(()) * len(batch["x"]), 1))}


def fitted(folder: str, stages: int, resume: bool, steps: int) -> tuple[list[float], list[Tensor]]:
    recipe = ff.Recipe(
        model=lambda: Iterating().double(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=Samples,
        batch_size=4,
        evaluate=evaluate,
        evaluation_data=Samples,
        evaluate_every=steps,
    )
    strategy, records = ff.Strategy(stages=stages, microbatches=2), list[Any]()
    model = ff.fit(recipe, strategy, folder, steps=steps, resume=resume, on_record=records.append)
    return [records[-1]["loss"], records[-1]["held_out"], records[-1]["samples"]], [*model.parameters()]


def test_a_run_goes_on_on_other_stages(tmp_path: Path) -> None:
    """Four steps of one process; two on two stages and two more on three; each writes and evaluates the whole model."""
    wanted = rank_group(1).run(fitted, str(tmp_path / "one"), 1, False, 4)[0]
    rank_group(2).run(fitted, str(tmp_path / "several"), 2, False, 2)
    found = rank_group(3).run(fitted, str(tmp_path / "several"), 3, True, 4)
    for numbers, parameters in found:
        assert numbers == pytest.approx(wanted[0], abs=1e-10)
        for mine, theirs in zip(parameters, wanted[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_how_many_stages_there_can_be() -> None:
    assert (parts_of(convolutional()), parts_of(Headed()), parts_of(Iterating()), parts_of(Step())) == (14, 14, 6, 0)


class Noting(nn.Module):
    """Knows how often it ran, and keeps what it made of its first input."""

    calls, grid = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.grid = torch.ones_like(x) if self.grid is None else self.grid
        return x + self.grid


def test_a_trial_leaves_no_trace() -> None:
    layers, given = [nn.Conv2d(3, 3, 1), Noting()], []
    hook = layers[0].register_forward_hook(lambda _, __, result: given.append(result))
    assert kept_bytes(layers, torch.zeros(1, 3, 4, 4)) == [192.0, 0.0]
    assert layers[1].calls == 0 and layers[1].grid is None
    assert given == [] and hook.id in layers[0]._forward_hooks
