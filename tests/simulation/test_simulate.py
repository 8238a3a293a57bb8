"""Simulated steps against what can be counted by hand, and against what torch's profiler counts of a real step."""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fullframe as ff
from fullframe.errors import RecipeError, ShapeError, StrategyError
from fullframe.simulation.devices.table import device_named
from fullframe.simulation.host import SimulatedHost
from fullframe.simulation.memory.trace import OutOfTime, Trace, Tracer
from fullframe.simulation.prediction import KEPT_FREE, Prediction, said_of_host
from fullframe.simulation.simulate import simulate
from fullframe.spatial.rules.convolution import JOINED_BYTES
from fullframe.training.host import RealHost
from tests.simulation.real_steps import held_bytes

PLAIN = ("context", "cublas_workspace", "cudnn_workspace", "prefetched_batch", "caching_allocator", "ddp_buckets")


class Network(nn.Module):
    """Three convolutions, of which two are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.gelu(block(x))
        return x


class Normalized(Network):
    """With a batch norm, whose buffers a step keeps a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Wide(nn.Conv2d):
    """Its update takes longer than the shortest kernel."""

    def __init__(self) -> None:
        super().__init__(3, 2**22, 3, padding=1)


NUMBERS = sum(p.numel() for p in Network().parameters())


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["image"]).square().mean()  # type: ignore[no-any-return]


def recipe(**changed: Any) -> ff.Recipe:
    fields: dict[str, Any] = {
        "model": Network,
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "data": lambda: None,
        "sample": lambda: {"image": torch.zeros(3, 24, 40)},
        "batch_size": 4,
    }
    return ff.Recipe(**fields | changed)


def simulated(strategy: ff.Strategy, device: str = "A100-80GB", **changed: Any) -> Prediction:
    return ff.simulate(recipe(**changed), strategy, device, without=PLAIN)


def tiny() -> dict[str, Any]:
    """So little that the peak is in the update, where gradients are still there."""
    return {"image": torch.zeros(3, 2, 2)}


def test_what_does_not_depend_on_the_batch() -> None:
    found = simulated(ff.Strategy(), sample=tiny)
    assert found.moment.phase == "update"
    assert found.parameters == NUMBERS
    assert found.bytes["parameter"] == found.bytes["gradient"] == 4 * NUMBERS
    assert found.bytes["optimizer"] == 2 * 4 * NUMBERS  # AdamW's counts of steps lie on the host


class Held(Network):
    """A large table that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2**11, 2**10)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table.mean()


def test_tensors_that_are_mere_attributes_lie_in_the_memory_of_the_cpu_alone() -> None:
    def bytes(model: Any, device: str) -> int:
        return simulated(ff.Strategy(), device, model=model).bytes["parameter"]

    assert bytes(Held, "cpu") - bytes(Network, "cpu") == 4 * 2**21
    assert bytes(Held, "A100-80GB") == bytes(Network, "A100-80GB")


def test_state_that_is_sharded() -> None:
    whole = simulated(ff.Strategy(data=2), sample=tiny)
    spread = simulated(ff.Strategy(data=2, shard_parameters=True), sample=tiny)
    assert 0.45 * whole.bytes["optimizer"] < spread.bytes["optimizer"] < 0.6 * whole.bytes["optimizer"]
    assert spread.bytes.get("gradient", 0) < 0.6 * whole.bytes["gradient"]
    zero = simulated(ff.Strategy(data=2, shard_optimizer=True), sample=tiny)
    assert zero.bytes["gradient"] == whole.bytes["gradient"]
    assert 0.3 * whole.bytes["optimizer"] < zero.bytes["optimizer"] < 0.7 * whole.bytes["optimizer"]


@pytest.mark.parametrize("width", [1, 2])
def test_checks_of_torch_itself_are_passed(width: int) -> None:
    """Whether a variance is negative, and whether a distribution's parameters and values are valid."""

    def likely(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        mean, deviation = model(batch["image"]).chunk(2, dim=1)
        variance, target = deviation.exp(), batch["image"][:, :1]
        drawn = torch.distributions.Normal(mean, variance).log_prob(target)
        return F.gaussian_nll_loss(mean, target.expand_as(mean), variance) - drawn.mean()

    found = simulated(ff.Strategy(width=width), loss=likely)
    assert not found.notes and found.peak_bytes > simulated(ff.Strategy(width=width)).peak_bytes


def test_a_batch_whose_tensors_no_rank_would_cut_is_refused_as_in_training() -> None:
    class Batch:
        def __init__(self, samples: list[dict[str, Tensor]]) -> None:
            self.image = torch.stack([sample["image"] for sample in samples])

    class Nested(Batch):
        def __init__(self, samples: list[dict[str, Tensor]]) -> None:
            self.parts = {"whole": Batch(samples)}

        image = property(lambda self: self.parts["whole"].image)

    objects: dict[str, Any] = {"collate": Batch, "loss": lambda model, batch: model(batch.image).mean()}
    assert simulated(ff.Strategy(), **objects).peak_bytes
    with pytest.raises(RecipeError, match="holds a Batch with tensors in it, which is neither cut nor moved"):
        simulated(ff.Strategy(width=2), **objects)
    with pytest.raises(RecipeError, match="holds a Nested with tensors in it, which is neither cut nor moved"):
        simulated(ff.Strategy(width=2), **objects | {"collate": Nested})


def test_what_has_no_memory_ends_in_a_line_and_a_remedy() -> None:
    def sparse(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.sparse.mm(torch.eye(40).to_sparse(), model(batch["image"])[0, 0].T).mean()

    said = r"asks for the memory of a tensor, .*line [0-9]+ \(return torch.sparse.*use dense tensors"
    with pytest.raises(RecipeError, match=said):
        simulated(ff.Strategy(), loss=sparse)


class Layers(Network):
    """Most of its weights lie in layers that make no block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = super().forward(image)
        numbers = out.mean().expand(2, 2048)
        for layer in self.layers:
            numbers = numbers + layer(numbers)
        return out + numbers.mean()


def test_sharded_layers_are_not_whole_at_once() -> None:
    """Two are at most, one as parameters and one as gradients, beside a quarter of all with their state."""
    found = simulated(ff.Strategy(data=4, shard_parameters=True), model=Layers, sample=tiny, batch_size=4)
    layer = 4 * 2048**2
    assert found.peak_bytes < 8 * layer * 4 / 4 + 6 * layer


def streams(strategy: ff.Strategy) -> set[tuple[str, str | None]]:
    """(stream, category) of all that was not asked for by the program's stream."""
    traces: list[Trace] = []
    simulate(recipe(), strategy, "2xA100-80GB", on_trace=traces.append)
    return {(block.stream, block.mark) for block in traces[0].events if block.stream}


def test_batches_and_what_fsdp2_sends_lie_in_memory_of_their_own_streams() -> None:
    assert streams(ff.Strategy(width=2)) == streams(ff.Strategy(data=2)) == {("copy", "batch")}
    sharded = streams(ff.Strategy(data=2, shard_parameters=True))
    assert {stream for stream, _ in sharded} == {"copy", "gather", "reduce"}


@pytest.mark.parametrize("shard_parameters", [False, True])
def test_a_rank_of_a_large_job_is_simulated_as_fast_as_of_a_small_one(
    shard_parameters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ops(data: int) -> int:
        seen = [0]

        class Counting(Tracer):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen[0] += 1
                return super().__torch_dispatch__(func, types, args, kwargs)

        monkeypatch.setattr("fullframe.simulation.simulate.Tracer", Counting)
        strategy = ff.Strategy(data=data, width=2, shard_parameters=shard_parameters)
        simulated(strategy, sample=tiny, batch_size=data)
        return seen[0]

    assert ops(2048) <= 1.05 * ops(4)


def test_a_sharded_update_takes_as_long_as_the_part_that_a_rank_has() -> None:
    def seconds(**changed: Any) -> float:
        strategy = ff.Strategy(data=4, **changed)
        return simulated(strategy, model=Wide, sample=tiny).seconds["optimizer"]

    assert seconds(shard_parameters=True) == pytest.approx(seconds() / 4, rel=0.2)


def test_a_budget_that_computes_nothing_again_takes_no_less_time() -> None:
    plain = ff.Strategy(data=2, precision="fp16")
    budget = {"recompute": "budget", "recompute_budget_bytes": 2**40, "recompute_modules": ("blocks",)}
    idle = dataclasses.replace(plain, **budget)  # type: ignore[arg-type]  # its second step is simulated, not copied
    one, other = (simulated(strategy) for strategy in (plain, idle))
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=1e-6)
    assert one.host_seconds == pytest.approx(other.host_seconds, rel=1e-6)


def test_small_frames_on_fast_devices_are_bound_by_the_host() -> None:
    small = simulated(ff.Strategy(width=4), model=Normalized)
    assert small.bound_by_host and small.as_dict()["bound_by_host"]
    assert small.host_seconds < small.step_seconds < 1.3 * small.host_seconds
    assert said_of_host(small).startswith("bound by the host: it works ")
    large = simulated(ff.Strategy(width=4), model=Normalized, sample=lambda: {"image": torch.zeros(3, 1600, 6400)})
    assert not large.bound_by_host and said_of_host(large) == ""
    assert large.host_seconds == pytest.approx(small.host_seconds, rel=0.1)  # it does the same whatever the size
    assert large.step_seconds > 2 * large.host_seconds


class Pooled(nn.Sequential):
    """Its allocator would keep more than the device has."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((3, 32, 64, 128, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1))


def test_a_step_fits_where_the_allocator_can_give_back_what_is_unused() -> None:
    v100 = device_named("V100-16GB")

    def of(memory_bytes: float) -> Prediction:
        device = dataclasses.replace(v100, memory_bytes=int(memory_bytes))
        sample = lambda: {"image": torch.zeros(3, 512, 512)}  # noqa: E731
        return simulate(recipe(model=Pooled, sample=sample, batch_size=4), ff.Strategy(precision="fp16"), device)

    roomy = of(v100.memory_bytes)
    beside = roomy.step_bytes - roomy.reserved_bytes
    usable = (roomy.reserved_bytes + roomy.peak_bytes) // 2
    tight, too_small = of((usable + beside + 1) / (1 - KEPT_FREE)), of((roomy.peak_bytes + beside) / (1 - KEPT_FREE))
    assert tight.peak_bytes == roomy.peak_bytes < tight.reserved_bytes <= usable < roomy.reserved_bytes
    assert any("goes back to the driver" in note for note in tight.notes)
    assert tight.step_seconds == pytest.approx(roomy.step_seconds + 1e-3, rel=1e-3)
    assert too_small.reserved_bytes == roomy.reserved_bytes and too_small.notes == roomy.notes


def test_activations_follow_the_part_that_a_rank_has() -> None:
    """Stem, two convolutions and two gelus keep a map of 8 channels each, and the loss its square's argument."""
    map_bytes = 4 * 8 * 24 * 40 * 4
    whole = simulated(ff.Strategy()).bytes["activation"]
    assert 5 * map_bytes <= whole <= 5.5 * map_bytes
    for strategy in (ff.Strategy(data=2), ff.Strategy(microbatches=2)):
        assert simulated(strategy).bytes["activation"] == pytest.approx(whole / 2, rel=0.02)
    split = simulated(ff.Strategy(width=2)).bytes["activation"]
    assert split == pytest.approx(whole / 2, rel=0.1)  # with the columns that it borrows


class OfImages(Network):
    """It puts a batch together from images, through views of it, as detectors of DETR's family do."""

    def forward(self, x: Tensor) -> Tensor:
        batch = torch.zeros(x.shape, device=x.device)
        for image, part in zip(x, batch, strict=True):
            part[:, :24, :].copy_(image)
        return super().forward(batch)


class OfWindows(Network):
    """It adds windows up, as inference by sliding windows does: views of views of views."""

    def forward(self, x: Tensor) -> Tensor:
        batch = torch.zeros(x.shape, device=x.device)
        for n in range(len(x)):
            for windows in ((slice(n, n + 1), slice(None), slice(20), slice(k, k + 32)) for k in (0, 8)):
                batch[windows] += x[windows]
        return super().forward(batch)


@pytest.mark.parametrize(("device", "model"), [("cpu", OfImages), ("A100-80GB", OfImages), ("cpu", OfWindows)])
def test_a_batch_that_is_put_together_through_views_is_split(device: str, model: type[Network]) -> None:
    direct, together = (simulated(ff.Strategy(width=2), device, model=each) for each in (Network, model))
    images = 4 * 3 * 24 * 20 * 4  # kept by the stem, of this rank's columns
    assert together.bytes["activation"] <= direct.bytes["activation"] + images


def test_on_gpus_the_axes_have_communicators_of_their_own() -> None:
    """NCCL holds 544 MiB for one of two ranks and 688 for a larger one; gradients travel by the job's."""
    for strategy, expected in (
        (ff.Strategy(data=2), 544),
        (ff.Strategy(width=2), 544 + 544),
        (ff.Strategy(data=2, width=2), 688 + 544),
        (ff.Strategy(height=2, width=2), 688 + 544 + 544 + 688),
    ):
        found = ff.simulate(recipe(), strategy, f"{strategy.ranks}xA100-80GB")
        assert found.terms["nccl"] == expected * 2**20
        assert ff.simulate(recipe(), strategy, f"{strategy.ranks}xcpu").terms.get("nccl", 0) == 0


def test_activations_of_volumes_follow_their_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two convolutions and two gelus keep a map each; a rank in the middle of four borrows a slice on either side."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(
            JOINED_BYTES, device, 0
        )  # as with large maps: else the peak has a joined one, and less else

    def volumes() -> nn.Module:
        return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.GELU(), nn.Conv3d(8, 8, 3, padding=1), nn.GELU())

    changed = {"model": volumes, "sample": lambda: {"image": torch.zeros(1, 24, 16, 20)}, "batch_size": 1}
    whole = simulated(ff.Strategy(), **changed).bytes["activation"]
    slice_bytes = 4 * 8 * 16 * 20
    assert 4 * 24 * slice_bytes <= whole <= 4.3 * 24 * slice_bytes
    for strategy in (ff.Strategy(depth=2), ff.Strategy(depth=4), ff.Strategy(depth=2, height=2)):
        kept = simulated(strategy, **changed).bytes["activation"]
        assert whole / strategy.parts <= kept <= whole / strategy.parts + 3 * slice_bytes


def layers() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)), nn.GELU())


def unrolled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), ff.unroll(nn.Conv2d(8, 8, 3, padding=1), 8))


@pytest.mark.parametrize("model", [layers, unrolled])
def test_a_stage_keeps_its_own_layers_and_waits_for_the_others(model: Any) -> None:
    whole = simulated(ff.Strategy(microbatches=1), model=model)
    halves = [simulated(ff.Strategy(stages=2, microbatches=count), model=model) for count in (1, 2, 4)]
    for half in halves:  # all microbatches wait for backward, whatever their number
        assert 0.4 < half.bytes["activation"] / whole.bytes["activation"] < 0.75
    waits = [half.seconds["stages"] / half.step_seconds for half in halves]
    assert waits[0] > waits[1] > waits[2] > 0 and whole.seconds["stages"] == 0
    two = ff.Strategy(stages=2)
    of_ranks = [ff.simulate(recipe(model=model), two, "A100-80GB", rank=rank, without=PLAIN) for rank in (0, 1)]
    assert of_ranks[0].bytes["activation"] == pytest.approx(of_ranks[1].bytes["activation"], rel=0.3)
    assert halves[0].device_bytes == max(each.device_bytes for each in of_ranks)
    assert halves[0].step_seconds == max(each.step_seconds for each in of_ranks)


class AtOnce(nn.Module):
    """Each microbatch goes back as soon as its loss is known, or, not `at_once`, after all have gone forward."""

    def __init__(self, at_once: bool = True) -> None:
        super().__init__()
        self.stem, self.rest = unrolled().children()
        self.at_once = at_once

    def forward(self, x: Tensor) -> Any:
        x, of_state = self.stem(x), lambda state: state.square().mean()
        return self.rest.loss(of_state, (), x) if self.at_once else of_state(self.rest(x))


def test_stages_wait_alike_where_microbatches_go_back_at_once() -> None:
    for count in (1, 4):
        waits = [
            simulated(
                ff.Strategy(stages=2, microbatches=count),
                model=partial(AtOnce, at_once),
                loss=lambda model, batch: model(batch["image"]),
            ).seconds["stages"]
            for at_once in (False, True)
        ]
        assert waits[0] == pytest.approx(waits[1], rel=0.3) and waits[0] > 0


def iterated(channels: int = 8, **options: Any) -> nn.Module:
    """Sixteen iterations that keep two maps each, of which one is the next state."""
    step = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GELU())
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), ff.unroll(step, 16, **options))


def test_of_nested_iterations_few_states_are_kept() -> None:
    changed = {"model": iterated, "sample": lambda: {"image": torch.zeros(3, 32, 48)}, "batch_size": 1}

    def kept(**fields: Any) -> float:
        """In states."""
        return simulated(ff.Strategy(**fields), **changed).bytes["activation"] / (4 * 8 * 32 * 48)

    assert 31 <= kept() <= 35 and 16 <= kept(recompute="blocks") <= 20 and kept(recompute="nested") <= 11
    for states in (8, 4, 2):
        assert kept(recompute="nested", recompute_states=states) <= states + 4
    seconds = [
        simulated(ff.Strategy(recompute="nested", recompute_states=states), **changed).step_seconds
        for states in (8, 4, 2)
    ]
    assert seconds[0] < seconds[1] < seconds[2]


def test_what_the_recipe_has_wait_on_the_host_waits_there_in_a_simulation() -> None:
    sample: Any = {"sample": lambda: {"image": torch.zeros(3, 128, 128)}, "batch_size": 1}

    def here() -> nn.Module:  # of so many sums that the copies keep up
        return iterated(256, recompute=True)

    def away() -> nn.Module:
        return iterated(256, recompute=True, placement="host")

    kept = simulated(ff.Strategy(), model=here, **sample).peak_bytes
    for model, strategy in ((away, ff.Strategy()), (here, ff.Strategy(offload=True))):
        found = simulated(strategy, model=model, **sample)
        assert found.peak_bytes < 0.7 * kept, found.bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_cpu = simulated(ff.Strategy(), "cpu", model=away, **sample)  # whose memory is the host's
    assert of_cpu.bytes == simulated(ff.Strategy(), "cpu", model=here, **sample).bytes


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_several_devices_of_one_process_are_not_simulated(own: bool) -> None:
    def model() -> nn.Module:
        blocks = [nn.Conv2d(3, 3, 1) for _ in range(4)]
        return nn.Sequential(ff.unroll(blocks if own else blocks[0], 4, placement=["cuda:0", "cuda:1"]))

    with pytest.raises(StrategyError, match=r"iterations of 0 are on cuda:0, cuda:1 of one process"):
        simulated(ff.Strategy(), model=model)


def test_stages_of_split_images() -> None:
    both = simulated(ff.Strategy(stages=2, width=2), model=layers)
    assert both.bytes["activation"] < 0.65 * simulated(ff.Strategy(width=2), model=layers).bytes["activation"]


def test_recompute_drops_what_lies_within_the_blocks() -> None:
    kept = simulated(ff.Strategy())
    saved = simulated(ff.Strategy(recompute="blocks", recompute_modules=("blocks.*",)))
    assert saved.peak_bytes <= kept.peak_bytes


def test_the_tensors_that_are_named_are_live_at_the_peak() -> None:
    found = simulated(ff.Strategy())
    assert sum(found.bytes.values()) == found.peak_bytes == found.reserved_bytes == found.device_bytes
    assert [tensor.bytes for tensor in found.largest] == sorted((t.bytes for t in found.largest), reverse=True)
    assert set(found.modules) >= {"stem", "blocks.0", "blocks.1"}
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds)


def test_terms_can_be_left_out_one_by_one() -> None:
    every = ff.simulate(recipe(), ff.Strategy(width=2), "2xA100-80GB")
    assert {"context", "nccl", "ddp_buckets"} <= set(every.terms)
    assert "cublas_workspace" not in every.terms  # nobody multiplies matrices
    without = ff.simulate(recipe(), ff.Strategy(width=2), "2xA100-80GB", without=("nccl",))
    assert every.device_bytes - without.device_bytes == every.terms["nccl"]


def take_both(host: SimulatedHost, step: ff.TrainStep, batch: Any) -> None:
    for _ in range(2):
        host._clock.reset()
        step(batch)
        host._tracer.end_step()


@pytest.mark.parametrize(
    "strategy",
    [
        ff.Strategy(microbatches=2, ema_decay=0.9),
        ff.Strategy(width=2, recompute="blocks", recompute_modules=("blocks.*",), clip_norm=1.0),
        ff.Strategy(data=2, precision="fp16"),
        ff.Strategy(data=2, shard_parameters=True),
        ff.Strategy(data=2, shard_optimizer=True),
        ff.Strategy(optimizer="adafactor"),
        ff.Strategy(update_in_backward=True),
        ff.Strategy(recompute="budget", recompute_modules=("blocks.*",), recompute_budget_bytes=2**20),
    ],
    ids=str,
)
def test_the_second_step_may_be_copied_from_the_first(strategy: ff.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = ff.simulate(recipe(model=Normalized), strategy)
    monkeypatch.setattr(SimulatedHost, "twice", take_both)
    taken = ff.simulate(recipe(model=Normalized), strategy)
    rounding = {one.bytes.pop("rounding", 0) for one in (copied, taken)}  # FSDP's blocks are cut a little otherwise
    assert max(rounding) - min(rounding) <= 2**13
    assert (copied.bytes, copied.moment, copied.largest) == (taken.bytes, taken.moment, taken.largest)
    assert copied.reserved_bytes == taken.reserved_bytes
    assert copied.step_seconds == pytest.approx(taken.step_seconds, abs=6e-5)  # a few launches of the first step


@pytest.mark.parametrize("device", ["A100-80GB", "2xT4", "cpu"])
def test_microbatches_may_be_copied_from_the_second(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ff.Strategy(
        data=2 if "x" in device else 1, microbatches=6, recompute="blocks", recompute_modules=("b*",)
    )
    options: dict[str, Any] = {"timings": {}} if device == "cpu" else {}
    copied = ff.simulate(recipe(model=Normalized, batch_size=12), strategy, device, **options)
    monkeypatch.setattr(SimulatedHost, "numbered", RealHost.numbered)
    taken = ff.simulate(recipe(model=Normalized, batch_size=12), strategy, device, **options)
    assert taken.peak_bytes - 6 * 512 <= copied.peak_bytes <= taken.peak_bytes  # the sums of losses are not copied
    assert copied.reserved_bytes == taken.reserved_bytes or device == "cpu"
    if device != "cpu":  # there stacking 3 sums and stacking 6 are timed apart
        assert copied.step_seconds == pytest.approx(taken.step_seconds, rel=1e-9)


def measured_bytes() -> int:
    """The largest running sum of torch's own memory events over two real steps."""
    torch.manual_seed(0)
    batch = {"image": torch.zeros(4, 3, 24, 40)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        image = {name: value.clone() for name, value in batch.items()}
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, image).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return max(held_bytes(profiled))


def test_a_real_step_on_the_cpu_holds_as_much() -> None:
    found = ff.simulate(recipe(), ff.Strategy(), "cpu", without=("context",))
    assert found.peak_bytes == pytest.approx(measured_bytes(), rel=0.03)


def padded(samples: list[Any]) -> dict[str, Tensor]:
    """A batch as wide as its widest sample, which its numbers say."""
    width = max(int(sample["width"]) for sample in samples)
    return {"image": torch.stack([F.pad(sample["image"], (0, width - 40)) for sample in samples])}


def test_a_collate_that_reads_numbers_gets_them() -> None:
    wide = {"image": torch.zeros(3, 24, 40), "width": torch.tensor(48)}
    found = simulated(ff.Strategy(), sample=lambda: wide, collate=padded)
    same = simulated(ff.Strategy(), sample=lambda: {"image": torch.zeros(3, 24, 48)})
    assert (found.peak_bytes, found.step_seconds) == (same.peak_bytes, same.step_seconds)


def reading(model: nn.Module, batch: Any) -> Tensor:
    """As nnU-Net's and MONAI's losses are written: they ask whether anything is there, and count off their axes."""
    out = model(batch["image"])
    held = (out > 0).sum()
    value = out.square().mean(torch.arange(1, out.dim()).tolist()).mean() if held > 0 else out.sum()
    print(float(value.detach()))
    return value


def test_a_loss_may_read_numbers() -> None:
    found = simulated(ff.Strategy(width=2), "2xA100-80GB", loss=reading)
    assert any(note.startswith("the loss reads numbers") for note in found.notes)


class Detector(Network):
    """As YOLOX and YOLOv8 are written: the model computes its loss, whose assignment makes as many as a mask counts."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        found, wanted = self.assigned(out)
        return (found - wanted).abs().sum() / max(len(found), 1)

    def assigned(self, out: Tensor) -> tuple[Tensor, Tensor]:
        positive = out[0, 0] > 0
        targets = out.new_zeros((int(positive.sum().item()), 1))
        if positive.sum() > 0:
            targets[:, 0] = out[0, 1][positive]
        return out[0, 0][positive], targets[:, 0]


@pytest.mark.parametrize("width", [1, 3])
def test_a_loss_within_a_model_may_read_numbers(width: int) -> None:
    options: dict[str, Any] = {"model": Detector, "loss": lambda model, batch: model(batch["image"])}
    found = simulated(ff.Strategy(width=width), "3xA100-80GB", **options)
    assert any(note.startswith("the loss reads numbers") for note in found.notes) and len(found.notes) == 2


def weighing(model: nn.Module, batch: Any) -> Tensor:
    """With a map of weights that it makes whole and splits itself."""
    out = model(batch["image"])
    weights = torch.linspace(0, 1, out.shape[-1]).expand(out.shape[-2:])
    if isinstance(out, ff.SpatialTensor):
        weights = ff.shard(weights, out.device_mesh)
    return (weights * out.square()).mean()


def test_a_loss_that_splits_a_map_itself_reads_no_numbers() -> None:
    assert not simulated(ff.Strategy(width=2), "2xA100-80GB", loss=weighing).notes


class Codebook(Network):
    """A VQ-VAE that has its averages as parameters, and makes them anew in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.codes = nn.Parameter(self.codes * 0.9)
        return super().forward(x) + self.codes.sum().detach()  # type: ignore[no-any-return]


def test_a_parameter_may_be_replaced_in_every_microbatch() -> None:
    found = ff.simulate(recipe(model=Codebook), ff.Strategy(width=2, microbatches=2), "A100-80GB")
    assert found.peak_bytes > 0


def test_a_precision_that_the_device_has_not_is_noted() -> None:
    (note,) = simulated(ff.Strategy(precision="bf16"), "T4").notes
    assert note == "T4 has no bf16; use fp16, which scales the loss; products are timed at the rate of fp32"
    assert not simulated(ff.Strategy(precision="fp16"), "T4").notes


class Choosy(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if x.sum() > 0 else -x


def with_script() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(torch.jit.script(nn.Conv2d(3, 4, 1)))


class Watchful(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        assert torch.isfinite(x).all() and not (x.isnan() | x.isinf()).any()
        return x * torch.tensor([x.mean(), x.std()]).sum()


@pytest.mark.parametrize("strategy", [ff.Strategy(), ff.Strategy(width=2)])
def test_a_model_may_ask_whether_its_numbers_are_finite(strategy: ff.Strategy) -> None:
    assert not simulated(strategy, "2xA100-80GB", model=Watchful).notes


@pytest.mark.parametrize(
    ("strategy", "changed", "options", "error", "said"),
    [
        (ff.Strategy(data=3), {}, {}, StrategyError, "batch_size 4 cannot be cut into 3 replicas"),
        (ff.Strategy(), {}, {"without": ("weather",)}, StrategyError, "there is no term 'weather'"),
        (ff.Strategy(width=2), {}, {"rank": 2}, StrategyError, "rank 2 is none of the 2 ranks"),
        (ff.Strategy(width=4), {"device": "2xA100-80GB"}, {}, StrategyError, "2xA100-80GB has 2"),
        (
            ff.Strategy(),
            {"sample": lambda: 1 / 0},
            {},
            RecipeError,
            r"gives no sample: Zero.*test_simulate.py, line \d+",
        ),
        (
            ff.Strategy(),
            {"sample": None, "data": list},
            {},
            RecipeError,
            "no sample: IndexError.*; where the data is not",
        ),
        (ff.Strategy(), {"collate": lambda s: 1 / 0}, {}, RecipeError, "collate gives no batch of 4 samples: ZeroDiv"),
        (ff.Strategy(), {"model": lambda: 1 / 0}, {}, RecipeError, "gives no model: ZeroDivisionError"),
        (ff.Strategy(), {"loss": lambda m, b: b["x"]}, {}, RecipeError, r"simulated: KeyError: 'x', at .*simulate.py"),
        (ff.Strategy(), {}, {"until": 0.0}, OutOfTime, "before"),
        (ff.Strategy(), {"model": Choosy}, {}, RecipeError, "depends on the numbers in its tensors"),
        (ff.Strategy(), {"model": lambda: nn.LazyConv2d(4, 1)}, {}, ShapeError, "weight, bias are lazy"),
        (ff.Strategy(), {"model": with_script}, {}, RecipeError, "module '0' is a ScriptModule"),
        (ff.Strategy(), {"model": Choosy}, {}, RecipeError, r"have none, at .*_simulate.py, line \d+ \(return x if x"),
    ],
)
def test_what_cannot_be_simulated(
    strategy: ff.Strategy, changed: dict[str, Any], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    device = changed.pop("device", "A100-80GB")
    with pytest.raises(error, match=said), warnings.catch_warnings(action="ignore"):
        ff.simulate(recipe(**changed), strategy, device, **options)
