"""One strategy on one device: the step that trains, on fake tensors, and the account of what two of it hold."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _foreach_utils as foreach
from torch.utils._pytree import tree_iter
from torch.utils.data import default_collate

from fullframe.arguments import checked
from fullframe.errors import FullframeError, RecipeError, StrategyError
from fullframe.model.kept_fakes import no_fakes_kept
from fullframe.model.parallelize import ParallelModel
from fullframe.ranks import raw_bytes
from fullframe.ranks.channel import channel_of
from fullframe.ranks.mesh import STAGE, has_stages, init_mesh, spatial_of, stage_axis
from fullframe.ranks.randomness import kept_random_state, seed_everything
from fullframe.recipe import Recipe
from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.clock.split_functions import functions_told_to
from fullframe.simulation.clock.timed_ops import MeasuredClock, Timings
from fullframe.simulation.compiled.blocks import SimulatedPrograms
from fullframe.simulation.devices.table import Cluster, Device, cpu_device, parse_cluster
from fullframe.simulation.evaluation import evaluate_fakes, read_evaluation
from fullframe.simulation.fake.abstract import abstract_batch, abstract_model, plain_tensors, read_sample
from fullframe.simulation.fake.arrays import arrays_of_fakes
from fullframe.simulation.fake.autocast import cuda_autocast
from fullframe.simulation.fake.blame import blamed, place
from fullframe.simulation.fake.cuda_kernels import cuda_kernels
from fullframe.simulation.fake.data_parallel import FakeDataParallel, WithoutBuckets
from fullframe.simulation.fake.full_masks import count_as_full
from fullframe.simulation.fake.numbers import take
from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.simulation.fake.replaced import replaced, silenced
from fullframe.simulation.fake.sharded import known_when_gathered
from fullframe.simulation.fake.world import fake_job
from fullframe.simulation.host import Kept, SimulatedHost
from fullframe.simulation.memory.account import account, category_of
from fullframe.simulation.memory.allocator import replay_within
from fullframe.simulation.memory.terms import TERMS, Terms
from fullframe.simulation.memory.trace import OutOfTime, Trace, Tracer
from fullframe.simulation.prediction import KEPT_FREE, OUTSIDE_ALLOCATOR, Prediction
from fullframe.simulation.shares import Shares
from fullframe.spatial.selection import TAKEN_AS_FEW
from fullframe.spatial.tensor import SpatialTensor
from fullframe.strategy import Strategy
from fullframe.techniques.unrolling.models import require_one_device, unrolled_in
from fullframe.training.loading.delivery import Collation, Delivery, Grid
from fullframe.training.session import prepare
from fullframe.training.step import TrainStep

_TRIED_RANKS = 3  # of a stage


class ReadsNumbers(RecipeError):
    """What a step does depends on numbers in tensors, which no simulation of it has."""


@checked
@no_fakes_kept()
def simulate(
    recipe: Recipe,
    strategy: Strategy,
    device: str | Device | Cluster = "A100-80GB",
    *,
    rank: int | None = None,
    without: Collection[str] = (),
    timings: Timings | None = None,
    until: float = math.inf,
    on_trace: Callable[[Trace], None] = lambda trace: None,
) -> Prediction:
    """What one rank of a job under `strategy` needs in memory and time, without the device, other ranks, or the data.

    `rank` is the one that needs most unless given: with a neighbour on each side where there is one, or with more of
    the tensors where they are split unevenly, and of the stage that needs most; the seconds are those of the rank among
    these that takes longest. `without` names terms of TERMS to leave out. With `timings` each distinct op is timed on
    this machine, once for all strategies that are given the same dict, in place of a roofline. Where `until`, by
    `time.monotonic()`, comes before the end, the simulation is given up. `on_trace` gets all that the two steps
    allocate and free.

    Raises StrategyError when the batch cannot be spread or a term is unknown, RecipeError when what the step does
    depends on the numbers in its tensors, or when the recipe's own code raises something else; OutOfTime at `until`.
    """
    if rank is not None and not 0 <= rank < strategy.ranks:
        raise StrategyError(f"rank {rank} is none of the {strategy.ranks} ranks of the strategy, 0 and up")
    if recipe.batch_size % (strategy.data * strategy.microbatches):
        raise StrategyError(
            f"batch_size {recipe.batch_size} cannot be cut into {strategy.data} replicas x {strategy.microbatches} "
            "microbatches; use a multiple of their product"
        )
    unknown = sorted(set(without) - set(TERMS))
    if unknown:
        raise StrategyError(f"there is no term {', '.join(map(repr, unknown))}; the terms are {', '.join(TERMS)}")
    cluster = _cluster(device, strategy)
    traces: list[Trace] = []
    predict = partial(_of_rank, recipe, strategy, cluster, without, timings, until, traces.append)
    if rank is not None:
        found = [predict(rank)[0]]
    else:
        found = [each for stage in range(strategy.stages) for each in _of_stage(stage, strategy, predict)]
    most = max(range(len(found)), key=lambda number: found[number].step_bytes)
    on_trace(traces[most])
    evaluations = [each.evaluation for each in found if each.evaluation is not None]
    evaluation = max(evaluations, key=lambda each: each.device_bytes, default=None)
    slowest = max(found, key=lambda each: each.step_seconds)
    seconds = {name: getattr(slowest, name) for name in ("step_seconds", "seconds", "limits", "host_seconds")}
    return replace(found[most], evaluation=evaluation, **seconds)


def _of_stage(
    stage: int, strategy: Strategy, predict: Callable[[int], tuple[Prediction, int | None]]
) -> list[Prediction]:
    """Of the rank that has most of evenly split tensors, and of those that turn out to have more."""
    found = dict[int, Prediction]()
    fuller: int | None = _fullest(strategy)
    while fuller is not None and fuller not in found and len(found) < _TRIED_RANKS:
        found[fuller], fuller = predict(fuller + stage * strategy.parts)
    return [*found.values()]


def _of_rank(
    recipe: Recipe,
    strategy: Strategy,
    cluster: Cluster,
    without: Collection[str],
    timings: Timings | None,
    until: float,
    on_trace: Callable[[Trace], None],
    rank: int,
) -> tuple[Prediction, int | None]:
    """What a rank needs; and which rank of its stage has more of the split tensors, where one has."""
    place = cluster, strategy.precision, tuple(size for name, size in strategy.mesh.items() if name != "stages")
    clock = (
        StepClock(*place, stages=strategy.stages)
        if timings is None
        else MeasuredClock(*place, timings, stages=strategy.stages)
    )
    terms = Terms(cluster.device, strategy.precision, without)
    # As torch does for the norms of gradients that are plain tensors, which they are in the real step.
    types = replaced(foreach, "_foreach_supported_types", [*foreach._foreach_supported_types, FakeTensor])
    known = replaced(raw_bytes, "take", take)
    with kept_random_state(), fake_job(rank, strategy.ranks), _kernels_of(cluster.device), types, known:
        seed_everything(recipe.seed)  # as training does
        simulation = _Simulation(recipe, strategy, terms, clock, until)
        return simulation.prediction(on_trace), simulation.shares.fuller()


class _Simulation:
    """The recipe's model, optimizer and batch on one rank of the fake job, under a tracer."""

    def __init__(self, recipe: Recipe, strategy: Strategy, terms: Terms, clock: StepClock, until: float):
        self._recipe, self._strategy, self._terms, self._clock = recipe, strategy, terms, clock
        self._is_cuda = clock.device.is_cuda
        self._mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
        # A fake tensor holds no number to read; groups are those that a job on such devices has.
        self._spatial = spatial_of(self._mesh, draw_seed=lambda generator: 0, own_groups=self._is_cuda)
        for group in self._spatial.groups.values():
            channel_of(group).gathers = self._is_cuda
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._sample = read_sample(recipe)  # before anything is fake: an augmentation may read its own random numbers
        self._evaluation = read_evaluation(recipe)
        self._model = abstract_model(recipe, self._fake)
        names = {module: name for name, module in self._model.named_modules()}
        self._outcomes = Outcomes(self._fake, self._is_cuda)
        self._tracer = Tracer(
            names, _axes(self._mesh), self._outcomes, terms.scratch, clock, until, workspace=terms.cublas_bytes
        )
        self._outcomes.in_loss = self._tracer.in_loss
        self._programs = SimulatedPrograms(self._clock)
        self._host = SimulatedHost(self._clock, self._tracer, strategy, self._kept)
        self.shares = Shares(self._spatial)

    def prediction(self, on_trace: Callable[[Trace], None]) -> Prediction:
        """Take the steps and account for them."""
        tracer = self._tracer
        with (
            tracer,
            functions_told_to(self._clock, count_as_full, lambda func, args, made: self.shares.add(made)),
            arrays_of_fakes(self._outcomes.numbers),
            known_when_gathered(self._model),
            _readable_errors(tracer),
            torch.compiler.set_stance("force_eager"),
        ):
            model, step = self._prepared()
            samples = self._recipe.batch_size // self._strategy.data
            batch, *ahead = [self._batch(self._sample, samples) for _ in range(1 + self._terms.has("prefetched_batch"))]
            tracer.outside = "forward"
            with self._fake:
                self._host.twice(step, batch)
            steps = tracer.begin_anew(category_of)
            found = self._accounted(steps, model, ahead)
            evaluation = self._evaluated(model, step, ahead)
        on_trace(steps)
        return replace(found, evaluation=evaluation, notes=self._notes)

    def _evaluated(self, model: ParallelModel, step: TrainStep, ahead: list[Any]) -> Prediction | None:
        """Memory of the recipe's evaluation after the steps; where it cannot be said, the notes say so."""
        read, tracer = self._evaluation, self._tracer
        if read is None:
            return None
        try:
            if isinstance(read, FullframeError):
                raise read
            one = partial(self._batch, read.first, 1)
            ahead = [*ahead, *(one() for _ in range(self._terms.has("prefetched_batch")))]
            self._outcomes.evaluating, tracer.outside = True, "evaluation"
            with self._fake, blamed("evaluate()", passing=OutOfTime):
                note = self._outcomes.notes.add
                evaluate_fakes(self._recipe, self._strategy, model, step.average, tracer, one, read.samples, note)
        except FullframeError as error:
            self._outcomes.notes.add(f"the evaluation could not be simulated, and may need more than this: {error}")
            return None
        tracer.end_step()
        return self._accounted(tracer.trace, model, ahead)

    def _prepared(self) -> tuple[ParallelModel, TrainStep]:
        """As `fullframe.fit` has them, but for DDP, which refuses fake tensors."""
        tracer, plain = self._tracer, self._model
        require_one_device(plain)
        for unrolled in unrolled_in(plain).values():
            unrolled.save_by(self._host.road())
        on_host = [] if self._is_cuda else plain_tensors(plain)  # no module moves them
        tracer.mark("parameter", list(plain.parameters()), list(plain.buffers()), on_host)
        for parameter in plain.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracer.mark("gradient", p.grad))
        ddp = FakeDataParallel if self._terms.has("ddp_buckets") else WithoutBuckets
        model, optimizer, step = prepare(
            self._recipe, self._strategy, self._mesh, plain, host=self._host, data_parallel=ddp
        )
        if model.compiled is not None:
            model.compiled.programs.simulated = self._programs
        tracer.mark("parameter", list(model.parameters()))  # where they are sharded, these are others
        tracer.mark("gradient", model.gradient_buckets)
        if self._is_cuda:
            _choose_as_on_cuda(optimizer)
        optimizer.register_step_pre_hook(lambda *_: setattr(self._outcomes, "updating", True))
        optimizer.register_step_post_hook(lambda *_: setattr(self._outcomes, "updating", False))
        if step.staged is not None:
            step.staged.watch(self._host.stage)
        if step.average is not None:
            tracer.mark("average", list(step.average.state_dict().values()))
        return model, step

    def _kept(self) -> Kept:
        found = _local([*self._model.buffers(), *plain_tensors(self._model)])
        nbytes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
        values = (value for module in self._model.modules() for value in vars(module).values())
        return Kept(sum(nbytes.values()), [value for value in values if type(value) in (int, float, bool)])

    def _batch(self, sample: Any, samples: int) -> Any:
        """A batch as the loader delivers it, fake."""
        with self._fake:
            batch = abstract_batch(self._recipe, sample, samples, self._fake, self._outcomes.notes.add)
            if self._strategy.parts > 1:
                batch = Collation(default_collate, Grid.of(self._mesh), "auto").cut(batch)
            batch = Delivery(self._mesh).place(batch)
        self._tracer.mark("batch", _local(batch), stream="copy")
        return batch

    @property
    def _notes(self) -> tuple[str, ...]:
        lacking = self._clock.device.lack_of(self._strategy.precision)
        own = [f"{lacking}; products are timed at the rate of fp32"] if lacking else []
        own += [TAKEN_AS_FEW] if TAKEN_AS_FEW in self._spatial.caches else []
        return tuple(sorted({*self._outcomes.notes, *self._programs.notes, *self._host.notes, *own}))

    def _accounted(self, trace: Trace, model: ParallelModel, ahead: list[Any]) -> Prediction:
        terms = self._terms
        held = account(trace)
        largest_scratch = max((b.bytes for b in trace.events if b.mark == "workspace" and b.died), default=0)
        groups = [*self._spatial.groups.values()]
        groups += [stage_axis(self._mesh).group] if has_stages(self._mesh) else []
        opened = {group.group_name: group.size() for group in groups}
        named = {
            "context": terms.context_bytes,
            "nccl": terms.nccl_bytes((opened | self._tracer.groups).values()),
            "cublas_workspace": self._tracer.workspaces,
            "cudnn_workspace": largest_scratch,
            "ddp_buckets": sum(t.nbytes for t in model.gradient_buckets),
            "prefetched_batch": sum(t.nbytes for t in tree_iter(_local(ahead)) if isinstance(t, Tensor)),
        }
        peak = reserved = held.peak_bytes
        if terms.has("caching_allocator"):
            beside = sum(named[name] for name in OUTSIDE_ALLOCATOR)
            usable = int(self._clock.device.memory_bytes * (1 - KEPT_FREE)) - beside
            replayed = replay_within(trace.events, usable, trace.step_ends[-2:-1])
            if replayed.returns and len(trace.step_ends) > 1:
                self._clock.hold(replayed.segments * self._clock.efficiency.segment_seconds)
                self._outcomes.notes.add(replayed.said)
            peak, reserved = replayed.allocator.most_allocated_bytes, replayed.allocator.most_reserved_bytes
            named["caching_allocator"] = reserved - held.peak_bytes
        rounding = {"rounding": peak - held.peak_bytes} if peak > held.peak_bytes else {}
        return Prediction(
            peak_bytes=peak,
            reserved_bytes=reserved,
            bytes={**held.bytes, **rounding},
            step_seconds=self._clock.step_seconds,
            seconds=dict(self._clock.seconds),
            moment=held.moment,
            largest=held.largest,
            modules=held.modules,
            terms={name: bytes for name, bytes in named.items() if bytes},
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            host_seconds=self._clock.host_seconds,
            limits=dict(self._clock.limits),
        )


def _local(batch: Any) -> Any:
    """The plain tensors of nested values."""
    return [t.local if isinstance(t, SpatialTensor) else t for t in tree_iter(batch) if isinstance(t, Tensor)]


def _choose_as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Where the recipe leaves it open, torch updates many CUDA parameters in one kernel, CPU ones each by itself."""
    for group in optimizer.param_groups:
        open_ = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if open_ and not group.get("differentiable"):
            group["foreach"] = True


def _cluster(device: str | Device | Cluster, strategy: Strategy) -> Cluster:
    """One node with all ranks where only a device is named."""
    if isinstance(device, str):
        cluster = parse_cluster(device)
        device = cluster if cluster.ranks > 1 else cluster.device
    if isinstance(device, Device):
        device = device if device.is_cuda else cpu_device(strategy.ranks)
        return Cluster(nodes=1, devices_per_node=strategy.ranks, device=device)
    if device.ranks < strategy.ranks:
        raise StrategyError(f"the strategy needs {strategy.ranks} ranks, {device.name} has {device.ranks}")
    return device


def _fullest(strategy: Strategy) -> int:
    """A rank of the first replica with two neighbours along an axis, or the first of two."""
    number = 0
    for ranks in (strategy.depth, strategy.height, strategy.width):
        number = number * ranks + int(ranks > 2)
    return number


def _axes(mesh: DeviceMesh) -> dict[str, str]:
    """The mesh axis of each process group, by the group's name, as `StepClock` calls it."""
    spatial = spatial_of(mesh)
    groups = {
        "data": mesh.get_group("data"),
        **spatial.groups,
        **({STAGE: stage_axis(mesh).group} if has_stages(mesh) else {}),
        "job": dist.group.WORLD,
    }
    return {group.group_name: axis for axis, group in groups.items()}  # type: ignore[union-attr]


@contextmanager
def _kernels_of(device: Device) -> Iterator[None]:
    with ExitStack() as kernels:
        if device.is_cuda:
            kernels.enter_context(cuda_autocast())
            kernels.enter_context(cuda_kernels(has_flash_attention=device.has_bf16))  # both came with Ampere
        yield


@contextmanager
def _readable_errors(tracer: Tracer) -> Iterator[None]:
    fake_tensor = "torch._subclasses.fake_tensor"  # which prints each exception that passes through it
    try:
        with silenced(fake_tensor), blamed("the step cannot be simulated", passing=OutOfTime):
            yield
    except RecipeError as said:
        error, where = said.__cause__, f" in module '{tracer.module}'" if tracer.module else ""
        if str(error).startswith("Cannot access"):  # storage or data pointer, of sparse tensors and of copies too
            raise RecipeError(
                f"the step cannot be simulated: something asks for the memory of a tensor{where}, and fake ones have "
                f"none{place(error) if error else ''}; let a torch.library.custom_op with a fake do it, use dense "
                "tensors, or plan with a recipe without it"
            ) from error
        if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            raise
        raise ReadsNumbers(
            f"the step cannot be simulated: what {error.func}{where} gives depends on the numbers in its tensors, and "
            f"fake tensors have none{place(error)}; take sizes from shapes and choose by torch.where, let a "
            "torch.library.custom_op with a fake read them, read them in a function with 'loss' in its name, where "
            "they are taken to be 1, or plan with a recipe without it"
        ) from error
