"""Plans of a small network by real simulations; what is said where nothing fits."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe import strategy as strategies
from fullframe.errors import DeviceError, FullframeError, RecipeError, StrategyError
from fullframe.planning import shortfall as advice
from fullframe.planning.plan import Planned, PlanRequest, plan, plan_in_full
from fullframe.planning.ranking import winner
from fullframe.planning.shortfall import separable
from fullframe.simulation.devices.table import parse_cluster
from fullframe.simulation.prediction import KEPT_FREE
from fullframe.simulation.simulate import simulate
from fullframe.strategy import Strategy, describe

MIB = 2**20


class Block(nn.Module):
    """Residual; kept activations are three maps."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Network(nn.Module):
    def __init__(self, deep: int = 512) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(3)))
        self.deep = nn.Conv2d(16, deep, 3, stride=8, padding=1)
        self.head = nn.Conv2d(deep, deep, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.blocks(self.stem(x))))


def recipe(**changed: object) -> ff.Recipe:
    fields: dict[str, object] = {
        "model": Network,
        "loss": lambda model, batch: model(batch["image"]).square().mean(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "data": lambda: None,
        "sample": lambda: {"image": torch.zeros(3, 128, 256)},
        "batch_size": 2,
    }
    return ff.Recipe(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_stored_rates(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_winner_of_a_v100_is_fp16_and_never_bf16() -> None:
    plans = plan(recipe(sample=lambda: {"image": torch.zeros(3, 384, 768)}), "2xV100-16GB")
    first = plans[0]
    assert first.fits and first.prediction is not None and first.devices == "2xV100-16GB"
    assert first.strategy.data == 2 and first.strategy.precision == "fp16"  # replicas exchange nothing
    assert not any(p.strategy.precision == "bf16" for p in plans)
    simulated = [p for p in plans if p.prediction is not None]
    assert len(simulated) >= 2
    times = [p.prediction.step_seconds for p in simulated if p.fits and p.prediction is not None]
    assert times[0] <= min(times) * 1.03
    for p in simulated:
        assert p.prediction is not None and p.reason.endswith(", bound by the host") == p.prediction.bound_by_host
    assert first.samples_per_second == pytest.approx(2 / first.prediction.step_seconds)


def test_of_small_frames_one_rank_is_found_to_be_faster_than_replicas() -> None:
    small = recipe(sample=lambda: {"image": torch.zeros(3, 96, 192)})
    plans = {p.strategy: p.prediction for p in plan(small, "2xV100-16GB") if p.prediction is not None}
    one, replicas = (plans[Strategy(data=data, precision="fp16")] for data in (1, 2))
    assert one is next(iter(plans.values())) and one.step_seconds < 0.95 * replicas.step_seconds


@pytest.fixture(scope="module")
def crowded() -> Iterator[tuple[int, Planned]]:
    """A T4 with so little memory that a batch only fits with recompute, or one sample at a time."""
    cluster = parse_cluster("1xT4")
    free = plan_in_full(PlanRequest(recipe=recipe(), devices=cluster, precisions=["fp16"]))
    best = winner(free.plans)
    assert best is not None and best.prediction is not None
    limit = int(best.prediction.device_bytes * 0.94 / (1 - KEPT_FREE))
    yield (
        limit,
        plan_in_full(PlanRequest(recipe=recipe(), devices=cluster, precisions=["fp16"], memory_limit_bytes=limit)),
    )


def test_what_saves_memory_is_taken_where_it_must(crowded: tuple[int, Planned]) -> None:
    limit, planned = crowded
    best = winner(planned.plans)
    assert best is not None and best.prediction is not None and planned.shortfall is None
    assert best.prediction.device_bytes <= limit * (1 - KEPT_FREE) == pytest.approx(best.memory_bytes, abs=1)
    assert best.strategy.microbatches > 1 or best.strategy.recompute != "none" or best.strategy.offload
    plain = next(p for p in planned.plans if describe(p.strategy) == "one rank, fp16")
    assert not plain.fits and "more than there is" in plain.reason


def test_where_nothing_fits_it_is_said_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "OTHER_OPTIMIZERS", ("sgd",))  # each takes a second
    monkeypatch.setattr(advice, "_TRIED_CONVOLUTIONS", 1)
    cluster = parse_cluster("1xT4")
    context = cluster.device.context_bytes
    planned = plan_in_full(
        PlanRequest(
            recipe=recipe(model=lambda: Network(1024)),  # whose weights fill several of the allocator's segments
            devices=cluster,
            precisions=["fp16"],
            memory_limit_bytes=context + 8 * MIB,
            seconds=200,
        )
    )
    missing = planned.shortfall
    assert winner(planned.plans) is None and missing is not None and missing.missing_bytes > 0
    closest = next(p for p in planned.plans if p.strategy == missing.closest)
    assert closest.prediction is not None and closest.headroom_bytes == -missing.missing_bytes
    saved = [each.saved_bytes for each in missing.advice]
    assert saved == sorted(saved, reverse=True) and all(size > 0 for size in saved)
    for each in missing.advice:
        assert each.fits is (closest.prediction.device_bytes - each.saved_bytes <= closest.memory_bytes)
    changes = " | ".join(each.change for each in missing.advice)
    assert "optimizer sgd" in changes  # AdamW keeps two numbers a weight, SGD none
    assert "depthwise-separable in place of head" in changes  # the convolution with most weights
    assert missing.modules and missing.modules[0][1] > 0


def test_another_optimizer_only_where_it_is_allowed() -> None:
    asked = recipe(sample=lambda: {"image": torch.zeros(3, 32, 32)})
    given = plan(asked, "1xT4", precisions=["fp16"])
    allowed = plan(asked, "1xT4", precisions=["fp16"], allow_optimizer=True)
    assert {p.strategy.optimizer for p in given} == {"recipe"}
    assert {p.strategy.optimizer for p in allowed} == {"recipe", "adamw", "adamw8bit", "adafactor", "sgd"}


def test_the_batch_can_be_another() -> None:
    plans = plan(recipe(), "1xT4", batch_size=3, precisions=["fp16"])
    assert {p.batch_size for p in plans} == {3} and {p.strategy.microbatches for p in plans} == {1, 3}


def test_a_model_without_blocks_recomputes_its_parts() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.gelu(self.first(x)))

    plans = plan(recipe(model=Plain), "1xT4", precisions=["fp16"])
    recomputed = [p.strategy for p in plans if p.strategy.recompute == "blocks"]
    assert recomputed and {s.recompute_modules for s in recomputed} == {("first", "second")}


def test_on_the_cpu_ops_are_timed() -> None:
    plans = plan(recipe(sample=lambda: {"image": torch.zeros(3, 32, 64)}), "2xcpu")
    first = plans[0]
    assert first.fits and first.prediction is not None and first.prediction.seconds["convolution"] > 0
    assert first.prediction.terms["context"] > 50 * MIB  # the process itself


@pytest.mark.parametrize(
    ("devices", "options", "error", "said"),
    [
        ("3xA1", {}, DeviceError, "no device 'A1'"),
        ("1xV100-16GB", {"precisions": ["bf16"]}, StrategyError, "V100-16GB has no bf16; use fp16"),
        ("1xT4", {"batch_size": 0}, RecipeError, "batch_size"),
    ],
)
def test_what_cannot_be_planned(
    devices: str, options: dict[str, object], error: type[FullframeError], said: str
) -> None:
    with pytest.raises(error, match=said):
        plan(recipe(), devices, **options)  # type: ignore[arg-type]


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Reads its own random number; counts how often it is read."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        Augmented.reads += 1
        image = torch.zeros(3, 128, 256)
        return {"image": image.flip(-1) if torch.rand(()) < 0.5 else image}

    def __len__(self) -> int:
        return 5


def test_an_augmentation_may_read_its_random_numbers() -> None:
    Augmented.reads = 0
    before = torch.get_rng_state()
    augmented = plan(recipe(data=Augmented, sample=None), "1xT4", precisions=["fp16"])
    assert Augmented.reads == 1 and torch.equal(before, torch.get_rng_state())
    given = plan(recipe(), "1xT4", precisions=["fp16"])
    assert augmented[0].prediction == given[0].prediction is not None


def test_the_data_of_an_evaluation_is_read_once_for_all_simulations() -> None:
    def evaluate(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"mean": model(batch["image"]).mean()}

    Augmented.reads = 0
    planned = plan(recipe(evaluate=evaluate, evaluation_data=Augmented), "4xT4", precisions=["fp16"])
    assert Augmented.reads == 1
    assert planned[0].prediction is not None and planned[0].prediction.evaluation is not None


def test_a_plan_ends_when_its_time_is_over() -> None:
    planned = plan_in_full(PlanRequest(recipe=recipe(), devices="8xA100-80GB", batch_size=8, seconds=1e-6, workers=2))
    assert planned.untried and planned.shortfall is None and winner(planned.plans) is None
    assert {p.reason for p in planned.plans} == {"not tried: the time was over"}
    assert {p.reason for p in plan(recipe(), "1xT4", seconds=1e-6)} == {"not tried: the time was over"}


def test_of_a_small_network_parameters_are_not_sharded() -> None:
    small = recipe(model=lambda: nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(8))), batch_size=8)
    alone, sharded = (
        simulate(small, Strategy(data=8, precision="bf16", shard_parameters=shards), "8xH100").step_seconds
        for shards in (False, True)
    )
    assert sharded > 1.5 * alone  # gathers and reductions of FSDP2 are Python, which takes the host longer than the ops
    first = plan(small, "8xH100", precisions=["bf16"])[0]
    assert not first.strategy.shard_parameters


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Conv3d(1 if n == 0 else 4, 4, 3, padding=1) for n in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize(
    ("shape", "depths"),
    [
        ((1, 64, 32, 32), {1, 2}),  # (N, C, D, H, W)
        ((1, 31, 32, 32), {1}),  # too few slices
        ((64, 32, 32), {1}),  # an image of 64 channels
    ],
)
def test_volumes_alone_are_cut_along_their_slices(shape: tuple[int, ...], depths: set[int]) -> None:
    def sample() -> dict[str, Tensor]:
        return {"label": torch.zeros(shape[-3:]), "image": torch.zeros(shape)}  # as many voxels, no channel

    model = Volumes if len(shape) == 4 else lambda: nn.Conv2d(64, 4, 3)
    plans = plan(recipe(model=model, sample=sample, batch_size=1), "2xV100-16GB", precisions=["fp32"])
    assert {p.strategy.depth for p in plans} == depths
    if depths == {1, 2}:
        tried = [p for p in plans if p.prediction is not None]
        assert plans[0].fits and any(p.strategy.depth == 2 for p in tried), [p.strategy for p in tried]


def test_a_sample_without_a_frame_is_refused() -> None:
    with pytest.raises(RecipeError, match="no tensor with rows and columns"):
        plan(recipe(sample=lambda: {"number": torch.zeros(3)}), "1xT4")


def test_ops_are_timed_only_on_a_device_that_is_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(StrategyError, match="there is no T4"):
        plan_in_full(PlanRequest(recipe=recipe(), devices="1xT4", benchmark=True))


@pytest.mark.parametrize("dims", [2, 3])
def test_a_separable_convolution_has_the_window_of_the_plain_one(dims: int) -> None:
    kind = (nn.Conv2d, nn.Conv3d)[dims - 2]
    model = nn.Sequential(nn.Identity(), nn.Sequential(kind(8, 12, 3, stride=2, padding=2, dilation=2)))
    x = torch.randn(2, 8, *[9] * dims)
    before, weights = model(x).shape, sum(p.numel() for p in model.parameters())
    changed = separable(model, ["1.0"])
    assert changed(x).shape == before
    assert sum(p.numel() for p in changed.parameters()) == 8 * 3**dims + 8 * 12 + 12 < weights


def test_plans_are_plain_data() -> None:
    import json

    plans = plan(recipe(), "1xT4", precisions=["fp16"])
    found = json.loads(json.dumps([p.as_dict() for p in plans]))
    assert ff.Strategy.from_json(json.dumps(found[0]["strategy"])) == plans[0].strategy
    assert found[0]["prediction"]["device_bytes"] + found[0]["headroom_bytes"] == found[0]["memory_bytes"]
    assert dataclasses.asdict(plans[0].strategy)["precision"] == "fp16"


def iterations() -> nn.Module:
    """Sixteen iterations that all share their weights."""
    step = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())
    return nn.Sequential(nn.Conv2d(3, 8, 1), ff.unroll(step, 16))


@pytest.mark.parametrize("tightest", ["blocks", "nested", "nested to 2 states"])
def test_iterations_are_nested_where_they_must_be(tightest: str) -> None:
    unrolled = recipe(model=iterations, batch_size=1)
    ways: dict[str, dict[str, Any]] = {
        "blocks": {"recompute": "blocks"},
        "nested": {"recompute": "nested"},
        "nested to 2 states": {"recompute": "nested", "recompute_states": 2},
    }
    needed = simulate(unrolled, Strategy(**ways[tightest]), "1xT4").device_bytes
    limit = int(needed * 1.005 / (1 - KEPT_FREE)) + 1
    plans = plan(unrolled, "1xT4", precisions=["fp32"], memory_limit_bytes=limit)
    tried = {p.strategy.recompute_states for p in plans if p.strategy.recompute == "nested"}
    assert tried == {None, 8, 4, 2}
    fitting = {p.strategy: p for p in plans if p.fits}
    assert Strategy(**ways[tightest]) in fitting, [(describe(p.strategy), p.reason) for p in plans]
    assert Strategy() not in fitting
    if tightest != "blocks":
        assert Strategy(recompute="blocks") not in fitting
