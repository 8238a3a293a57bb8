"""`plan`: from a recipe and a name of GPUs to strategies, the best first."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from fullframe.arguments import checked
from fullframe.errors import ArgumentError, RecipeError, StrategyError, require_count
from fullframe.model.blocks import blocks_that_repeat
from fullframe.model.kept_fakes import no_fakes_kept
from fullframe.planning.candidates import Frame, Job, precisions_of
from fullframe.planning.plans import Plans
from fullframe.planning.pool import runner
from fullframe.planning.ranking import Plan, plans_of
from fullframe.planning.search import Search
from fullframe.planning.shortfall import Shortfall, shortfall
from fullframe.recipe import Recipe
from fullframe.simulation.devices.table import Cluster, parse_cluster
from fullframe.simulation.evaluation import EvaluationSample, read_evaluation
from fullframe.simulation.fake.abstract import abstract_batch, abstract_model, read_sample
from fullframe.simulation.prediction import KEPT_FREE, Prediction
from fullframe.simulation.simulate import simulate
from fullframe.strategy import OTHER_OPTIMIZERS, Strategy
from fullframe.technique import Precision
from fullframe.techniques.stages.models import parts_of
from fullframe.techniques.unrolling.models import most_iterations

LIMIT_SECONDS = 120.0  # of a search; most come to their end long before


@dataclass(frozen=True, kw_only=True)
class Planned:
    """All plans, the best first; the cluster they are for; where none fits, what is missing and what would help.

    limit_bytes: what one device offers, less what is kept free
    untried:     strategies that may fit and be fastest, and were not simulated because the time was over
    """

    cluster: Cluster
    plans: tuple[Plan, ...]
    shortfall: Shortfall | None
    limit_bytes: int
    untried: int


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned; the first eight fields are the parameters of `plan`.

    benchmark: time each distinct op on this machine in place of a roofline; on the CPU unless said otherwise
    workers:   processes that simulate; more than one only where no other thread of this process is at work
    progress:  called with the number of strategies simulated so far, and of those that fit
    """

    recipe: Recipe
    devices: str | Cluster
    batch_size: int | None = None
    precisions: Sequence[Precision] | None = None
    allow_optimizer: bool = False
    allow_compile: bool = False
    memory_limit_bytes: int | None = None
    seconds: float = LIMIT_SECONDS
    benchmark: bool | None = None
    workers: int = 1
    progress: Callable[[int, int], None] = lambda simulated, fitting: None

    @property
    def cluster(self) -> Cluster:
        """The devices, with the memory that may be used."""
        cluster = self.devices if isinstance(self.devices, Cluster) else parse_cluster(self.devices)
        if self.memory_limit_bytes is None:
            return cluster
        return replace(cluster, device=replace(cluster.device, memory_bytes=self.memory_limit_bytes))


@checked
def plan(
    recipe: Recipe,
    devices: str | Cluster,
    *,
    batch_size: int | None = None,
    precisions: Sequence[Precision] | None = None,
    allow_optimizer: bool = False,
    allow_compile: bool = False,
    memory_limit_bytes: int | None = None,
    seconds: float = LIMIT_SECONDS,
) -> Plans:
    """Strategies for `recipe`, best first: those that fit by speed, then why others do not. A notebook shows a table.

    devices:            "4xV100-16GB" for one node of 4, "2x8xA100-80GB" for 2 nodes of 8, "2xcpu" for ranks on this CPU
    batch_size:         of the whole job, in place of the recipe's
    precisions:         those to choose from; all that the device is faster in, and "fp32", unless given
    allow_optimizer:    other optimizers may take the recipe's place
    allow_compile:      the two fastest strategies that fit are tried with compiled blocks too (experimental)
    memory_limit_bytes: what one device may use, in place of its memory
    seconds:            a simulation that is not done by then is given up; the reason of what may fit and was not tried
                        says so

    Raises ArgumentError for a limit below one byte, DeviceError for an unknown device, RecipeError for a recipe without
    a frame, StrategyError for a precision that the device does not have; what the first simulation of the recipe's own
    model raises.
    """
    if memory_limit_bytes is not None:
        require_count(ArgumentError, "memory_limit_bytes", memory_limit_bytes)
    request = PlanRequest(
        recipe=recipe,
        devices=devices,
        batch_size=batch_size,
        precisions=precisions,
        allow_optimizer=allow_optimizer,
        allow_compile=allow_compile,
        memory_limit_bytes=memory_limit_bytes,
        seconds=seconds,
    )
    return Plans(plan_in_full(request).plans)


@no_fakes_kept()
def plan_in_full(request: PlanRequest) -> Planned:
    """All plans, and what would help where nothing fits.

    `seconds` are for all of it, but what the recipe's own functions take: simulations are given up at their end.
    """
    end = time.monotonic() + request.seconds
    recipe, cluster = request.recipe, request.cluster
    if request.batch_size is not None:
        recipe = replace(recipe, batch_size=request.batch_size)
    benchmark = not cluster.device.is_cuda if request.benchmark is None else request.benchmark
    if benchmark and cluster.device.is_cuda and not torch.cuda.is_available():
        raise StrategyError(f"ops can only be timed on a device that is here, and there is no {cluster.device.name}")
    recipe = _read_once(recipe)
    job = _job(recipe, cluster, request)
    search = Search(job=job, limit_bytes=int(cluster.device.memory_bytes * (1 - KEPT_FREE)))
    predict = partial(simulate, timings={} if benchmark else None, until=end)
    workers = 1 if benchmark else request.workers  # two at once would time each other

    def of_recipe(strategy: Strategy) -> Prediction:
        return predict(recipe, strategy, cluster)

    def progress() -> None:
        request.progress(len(search.known), len(search.fitting))

    with runner(of_recipe, workers) as run:
        search.run(run, workers, end - time.monotonic(), progress)
    return Planned(
        cluster=cluster,
        plans=tuple(plans_of(search)),
        shortfall=shortfall(recipe, search, predict, workers, end),
        limit_bytes=search.limit_bytes,
        untried=len(search.untried),
    )


def _read_once(recipe: Recipe) -> Recipe:
    """The recipe with its first samples at hand, of training and of evaluation: each simulation asks for them."""
    sample, evaluation = read_sample(recipe), read_evaluation(recipe)
    recipe = replace(recipe, sample=lambda: sample)
    if isinstance(evaluation, EvaluationSample):
        recipe = replace(recipe, evaluation_data=lambda: evaluation)
    return recipe


def _job(recipe: Recipe, cluster: Cluster, request: PlanRequest) -> Job:
    slices, rows, columns = _frame(recipe)
    device, precisions = cluster.device, request.precisions
    if unknown := [name for name in precisions or () if name not in get_args(Precision)]:
        raise StrategyError(f"there is no precision {unknown[0]!r}; there are {', '.join(get_args(Precision))}")
    if lacking := next(filter(None, map(device.lack_of, precisions or ())), ""):
        raise StrategyError(lacking)
    model = abstract_model(recipe, FakeTensorMode())
    return Job(
        cluster=cluster,
        batch_size=recipe.batch_size,
        rows=rows,
        columns=columns,
        slices=slices,
        precisions=tuple(precisions or precisions_of(device)),
        optimizers=("recipe", *OTHER_OPTIMIZERS) if request.allow_optimizer else ("recipe",),
        recompute_modules=_without_blocks(model),
        ranks=cluster.ranks,
        parts=parts_of(model),
        iterations=most_iterations(model),
        can_compile=request.allow_compile,
        can_offload=device.is_cuda,
    )


def _frame(recipe: Recipe) -> Frame:
    """What the loader will split: the largest tensor of a sample that has rows and columns, and slices if 5-d."""
    fake = FakeTensorMode()
    tensors = [
        t
        for t in tree_iter(abstract_batch(recipe, read_sample(recipe), 1, fake))
        if isinstance(t, Tensor) and t.dim() >= 3
    ]
    frame = max(tensors, key=lambda t: (t.numel(), t.dim()), default=None)
    if frame is None:
        raise RecipeError("a sample has no tensor with rows and columns, so there is no frame to split")
    return frame.shape[-3] if frame.dim() == 5 else 1, frame.shape[-2], frame.shape[-1]


def _without_blocks(model: nn.Module) -> tuple[str, ...]:
    """What to recompute in a model without blocks or runs of layers: its outermost modules; () where it has them."""
    if blocks_that_repeat(model):
        return ()
    return tuple(name for name, child in model.named_children() if any(True for _ in child.parameters()))
