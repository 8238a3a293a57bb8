"""What a recipe measures over the whole of its evaluation data, the same number on all ranks.

Under `torch.no_grad`, not `inference_mode`: what a model keeps from a forward pass in inference mode (a grid of
coordinates, FSDP2's gathered parameters) cannot be used in training afterwards.
"""

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from fullframe.errors import RecipeError
from fullframe.model.buffers import share_buffers
from fullframe.ranks.agreement import at_first_rank, on_all_ranks, on_first_rank
from fullframe.ranks.mesh import has_stages, spatial_of, stage_axis
from fullframe.ranks.randomness import kept_random_state
from fullframe.recipe import Recipe
from fullframe.technique import Precision
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.precision import computing
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.listing import length_of
from fullframe.training.loading.loader import evaluation_batches, require_readable
from fullframe.training.metrics import computed, digest, is_metric, on_host, states
from fullframe.wording import described

NEEDS_LESS = (
    "An evaluation takes one sample at a time: give recipe.evaluation_data smaller frames, measure without whole maps "
    "(.full()), split the frame over more ranks (height, width, depth), or take another precision"
)
_TOLERANCE = 1e-3  # between ranks of a replica that measured the same; a part of the frame differs by more


@dataclass(frozen=True)
class OfPart:
    """Marks a value that `recipe.evaluate` returns as measured on this rank's part of the frame (`x.local`).

    It is then added up over the ranks of a replica too. Other values must be equal on all of them, as they are when
    they come from ops on split tensors or from whole ones; that they are is checked.
    """

    value: Any


def evaluate(
    recipe: Recipe,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: Precision = "fp32",
    average: ParameterAverage | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """What `recipe.evaluate` measures over the whole of its data, the same on all ranks; {} without one.

    `model` is what `parallelize` returned; with `average`, its averaged parameters are evaluated. `progress` is
    called after each sample, on all ranks equally often, and what it raises ends the evaluation. Raises RecipeError
    on all ranks when a value is neither (sum, count) nor a torchmetrics Metric, or differs between the ranks of a
    replica.
    """
    if recipe.evaluate is None:
        return {}
    if mesh.size(0) > 1:
        share_buffers(model)  # running statistics as the next step takes them
    tally, data = _Tally(), evaluation_data(recipe)
    batches = evaluation_batches(data, mesh, recipe.seed, workers=recipe.workers, collate=recipe.collate)
    counted = tally
    try:
        with measuring(model, mesh_device(mesh).type, precision, average):
            for batch, counts in batches:
                if not counts:  # the last one; a Metric may be the same object in every batch
                    counted = copy.deepcopy(tally)
                tally.add(recipe.evaluate(model, batch))
                progress()
            counts_here = not has_stages(mesh) or stage_axis(mesh).coordinate == 0  # all stages measured the same
            found = counted.found(spatial_of(mesh).coordinate == 0, counts_here)
    finally:
        tally.reset()  # for the next evaluation, also when this one ends early
    return _over_ranks(found, mesh)


def evaluation_data(recipe: Recipe) -> Dataset[Any]:
    """The data set; raises RecipeError where it has no samples, or is none that could be read."""
    assert recipe.evaluation_data is not None
    data = recipe.evaluation_data()
    require_readable(data)
    if length_of(data) == 0:
        raise RecipeError("recipe.evaluation_data() has no samples; does its folder or file list exist?")
    return data


@contextmanager
def measuring(
    model: nn.Module, device_type: str, precision: Precision, average: ParameterAverage | None
) -> Iterator[None]:
    """Inside, `recipe.evaluate` is called: `evaluating`, in the training's precision, with the averages in place."""
    with (
        evaluating(model),
        average.applied() if average is not None else nullcontext(),
        computing(precision, device_type),
    ):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards modes and random states are as before."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), kept_random_state():
            yield
    finally:
        model.train(training[model])  # also what a parallelized model keeps beside its modules
        for module, mode in training.items():
            module.training = mode


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RecipeError(f"evaluate() gives {described(value)} in (sum, count) of {name!r}; give numbers") from None


class _Found(NamedTuple):
    """What one rank measured under one name."""

    of_part: bool
    content: Any  # (sum, count), a list of metrics, or None where the replica's first rank has the same
    digest: list[tuple[float, float]]  # of each number or state: its sum, and the sum of its absolute values


class _Tally:
    """What this rank measured so far."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._metrics: dict[str, dict[int, Any]] = {}  # by identity: one that is updated, or a new one for each batch
        self._of_part: dict[str, bool] = {}

    def add(self, measured: Mapping[str, Any]) -> None:
        """Take in what `recipe.evaluate` returned for one batch."""
        if not isinstance(measured, Mapping):
            raise RecipeError(f"evaluate() must return a dict {{name: (sum, count)}}, got {type(measured).__name__}")
        for name, value in measured.items():
            part = isinstance(value, OfPart)
            value = value.value if isinstance(value, OfPart) else value
            if self._of_part.setdefault(name, part) != part:
                raise RecipeError(f"evaluate() marks {name!r} as OfPart for some batches only; mark all or none")
            if is_metric(value):
                self._metrics.setdefault(name, {})[id(value)] = value
            elif isinstance(value, tuple) and len(value) == 2:
                total, count = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + _number(name, value[0]), count + _number(name, value[1]))
            else:
                raise RecipeError(
                    f"evaluate() must give (sum, count) or a torchmetrics Metric for {name!r}, "
                    f"got {type(value).__name__}"
                )
            if name in self._sums and name in self._metrics:
                raise RecipeError(
                    f"evaluate() gives (sum, count) or a Metric for {name!r}, by the batch; give one kind"
                )

    def reset(self) -> None:
        """Reset all metrics."""
        for metrics in self._metrics.values():
            for metric in metrics.values():
                metric.reset()

    def found(self, first: bool, counts: bool) -> dict[str, _Found]:
        """What is sent to rank 0 from the first rank of a replica, or of parts from each rank that `counts`."""
        result = {}
        for name, part in self._of_part.items():
            if name in self._sums:
                content: Any = self._sums[name]
                digests = [(value, abs(value)) for value in content]
            else:
                content = [on_host(metric) for metric in self._metrics[name].values()]
                digests = [digest(state) for metric in content for state in states(metric)]
            result[name] = _Found(part, content if counts and (first or part) else None, [] if part else digests)
        return result


def _over_ranks(found: dict[str, _Found], mesh: DeviceMesh) -> dict[str, float]:
    packed = at_first_rank(on_all_ranks(lambda: _packed(found)))
    replicas = mesh.mesh.flatten(1).tolist()

    def total() -> dict[str, float]:
        assert packed is not None
        ranks = [{name: pickle.loads(one) for name, one in of_rank.items()} for of_rank in packed]
        names = {name: None for rank in ranks for name in rank}  # in order
        result: dict[str, float] = {}
        for name in names:
            for replica in replicas:
                _require_same(name, {rank: ranks[rank].get(name) for rank in replica})
            contents = [rank[name].content for rank in ranks if name in rank and rank[name].content is not None]
            result |= _computed(name, contents)
        return result

    return on_first_rank(total)


def _packed(found: Mapping[str, _Found]) -> dict[str, bytes]:
    packed = {}
    for name, one in found.items():
        try:
            packed[name] = pickle.dumps(one)
        except Exception as error:
            raise RecipeError(
                f"the metric {name!r} cannot be sent to rank 0: {error}; define its class and what reduces its states "
                "at the top level of a file, not within a function"
            ) from error
    return packed


def _require_same(name: str, found: Mapping[int, _Found | None]) -> None:
    """Ranks of a replica that do not measure parts must have measured the same, or all of them nothing."""
    (first_rank, first), *others = found.items()
    for rank, other in others:
        same = first and other and first.of_part == other.of_part and _alike(first.digest, other.digest)
        if not same and other is not first:
            raise RecipeError(
                f"evaluate() measured another {name!r} on rank {rank} than on rank {first_rank} of its replica; "
                "measure on split or whole tensors, or mark what was measured on x.local as OfPart(...)"
            )


def _alike(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= _TOLERANCE * max(size, size_b) < math.inf or (math.isnan(a) and math.isnan(b)) or a == b
        for (a, size), (b, size_b) in zip(one, other, strict=True)
    )


def _computed(name: str, contents: list[Any]) -> dict[str, float]:
    """The value of a measure over all ranks, or several values under names of their own."""
    if isinstance(contents[0], tuple):
        count = sum(count for _, count in contents)
        return {name: sum(value for value, _ in contents) / count if count else math.nan}
    return computed(name, contents)
