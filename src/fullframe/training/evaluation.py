"""What a recipe measures over the whole of its evaluation data, the same number on all ranks.

Under `torch.no_grad`, not `inference_mode`: what a model keeps from a forward pass in inference mode (a grid of
coordinates, FSDP2's gathered parameters) cannot be used in training afterwards.
"""

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from fullframe.errors import RecipeError
from fullframe.model.buffers import share_buffers
from fullframe.ranks.agreement import at_first_rank, on_all_ranks, on_first_rank
from fullframe.ranks.mesh import has_stages, spatial_of, stage_axis
from fullframe.ranks.randomness import kept_random_state
from fullframe.recipe import Recipe
from fullframe.spatial.tensor import whole
from fullframe.technique import Precision
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.precision import computing
from fullframe.training.loading.delivery import mesh_device
from fullframe.training.loading.loader import evaluation_batches, require_indexed
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
    """The data set; raises RecipeError where it has no samples, or gives none by its number."""
    assert recipe.evaluation_data is not None
    data = recipe.evaluation_data()
    require_indexed(data)
    if not len(data):  # type: ignore[arg-type]
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
                digest = [(value, abs(value)) for value in content]
            else:
                content = [_on_host(metric) for metric in self._metrics[name].values()]
                digest = [_digest(state) for metric in content for state in _states(metric)]
            result[name] = _Found(part, content if counts and (first or part) else None, [] if part else digest)
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
    try:
        metrics = _in_turn(contents)
        merged = _merged(metrics)
        other, kept = _with_what_others_keep(merged, metrics[1:])
        for metric in metrics[1:]:
            _require_states_only(metric)
        found = _named(name, merged.compute())
        if kept and repr(_named(name, other.compute())) != repr(found):
            raise _refusal(merged, kept)
        return found
    except Exception as error:  # the other ranks wait for an answer
        raise RecipeError(f"the metric {name!r} cannot be computed: {type(error).__name__}: {error}") from error


def _merged(metrics: list[Any]) -> Any:
    """The first metric, with the states of all of them reduced as torchmetrics reduces those of ranks.

    `Metric.merge_state` refuses metrics of `full_state_update` True or None, the default, and averages means wrongly.
    """
    for same in zip(*map(list, map(_parts, metrics)), strict=True):  # first, for a metric's hash is its states'
        target = same[0]
        target.distributed_available_fn = lambda: False  # or computing would wait for the other ranks
        used = [metric for metric in same if metric._update_count] or [target]
        if len(used) > 2 and type(target).__name__ == "NormalizedRootMeanSquaredError":  # adds up two alone
            raise RecipeError("torchmetrics puts at most two of them together; give (sum, count), or use two replicas")
        for name, reduction in target._reductions.items():
            if name not in vars(target):  # a wrapper shows the states of the metric in it as its own
                continue
            counts = [metric._update_count for metric in used]
            setattr(target, name, _reduced([getattr(metric, name) for metric in used], reduction, counts))
        target._update_count = sum(metric._update_count for metric in same)
        target._computed = None
    return metrics[0]


def _reduced(values: list[Any], reduction: Any, counts: list[int]) -> Any:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    if len(values) == 1:
        return copy.copy(values[0])  # to reset the metric that a list is of empties it
    if any(isinstance(value, list) for value in values):
        parts = _by_update([value if isinstance(value, list) else [value] for value in values], counts)
        items = [*chain.from_iterable(parts)]
        return items if reduction in (None, dim_zero_cat) else reduction(items)
    if reduction is dim_zero_mean:  # of unequally many updates
        return sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    if reduction is dim_zero_cat:  # of tensors that grow with each update
        return torch.cat(_by_update([torch.atleast_1d(value) for value in values], counts))
    return torch.stack(values) if reduction is None else reduction(torch.stack(values))


def _by_update(lists: list[Any], counts: list[int]) -> list[Any]:
    """Lists, or tensors' rows, in parts as one process would have added them, where each update has added as many."""
    updates = [(items, count, len(items) // count) for items, count in zip(lists, counts, strict=True)]
    if any(count * size != len(items) for items, count, size in updates):
        return lists  # in the order of the ranks
    return _in_turn([items[n * size : (n + 1) * size] for n in range(count)] for items, count, size in updates)


def _in_turn(lists: Iterable[list[Any]]) -> list[Any]:
    """The first of each list, then the second of each: as replicas have taken the samples."""
    nothing = object()
    return [item for turn in zip_longest(*lists, fillvalue=nothing) for item in turn if item is not nothing]


def _with_what_others_keep(merged: Any, others: list[Any]) -> tuple[Any, list[str]]:
    """A copy with what updated metrics hold otherwise that is no state, a counter, say; and the names of it."""
    copied, names = copy.deepcopy(merged), []
    for part, *of_others in zip(_parts(copied), *map(_parts, others), strict=True):
        for other in of_others:
            changed = _changed(_beside_states(part), _beside_states(other)) if other._update_count else []
            vars(part).update({name: vars(other)[name] for name in changed})
            names += changed
    return copied, names


def _require_states_only(metric: Any) -> None:
    """Raises RecipeError where a metric kept more than states, which nobody reduces: `Running` does. It is reset."""
    parts = list(_parts(metric))
    before = [_beside_states(part) for part in parts]
    for part in parts:
        part.reset()
    for part, kept in zip(parts, before, strict=True):
        if changed := _changed(kept, _beside_states(part)):
            raise _refusal(part, changed)


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name, value in after.items() if before.get(name) != value]


def _refusal(metric: Any, kept: list[str]) -> RecipeError:
    return RecipeError(
        f"{type(metric).__name__} keeps {', '.join(dict.fromkeys(kept))} beside its states, which cannot be reduced "
        "over replicas or batches; keep it by add_state, or evaluate on one replica by one metric"
    )


def _beside_states(part: Any) -> dict[str, str]:
    from torchmetrics import SumMetric

    own = vars(part).keys() - vars(SumMetric()).keys() - part._defaults.keys()
    found = {name: vars(part)[name] for name in sorted(own)}
    numbers = {name: _digest(value) for name, value in found.items() if isinstance(value, Tensor)}
    numbers |= {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}
    numbers |= {name: len(value) for name, value in found.items() if isinstance(value, (list, dict, set))}
    return {name: repr(value) for name, value in numbers.items()}


def is_metric(value: Any) -> bool:
    """Whether it is of torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")  # where it was not imported, nothing can be one
    return torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _parts(metric: Any) -> Iterator[Any]:
    """The metric itself and the metrics in it, if it is a collection or a wrapper: those that have states."""
    return (part for part in metric.modules() if hasattr(part, "_reductions"))


def _on_host(metric: Any) -> Any:
    """A copy of the metric in host memory; split states become whole."""
    metric = copy.deepcopy(metric)
    for part in _parts(metric):
        for name, state in part.metric_state.items():
            setattr(part, name, [whole(item) for item in state] if isinstance(state, list) else whole(state))
    return metric.cpu()


def _states(metric: Any) -> Iterator[Tensor]:
    for part in _parts(metric):
        for state in part.metric_state.values():
            yield from (item for item in (state if isinstance(state, list) else [state]) if isinstance(item, Tensor))


def _digest(state: Tensor) -> tuple[float, float]:
    values = state.double()
    return float(values.sum()), float(values.abs().sum())


def _named(name: str, value: Any) -> dict[str, float]:
    """`value` as numbers: one, or of several (of classes, of a collection) one each, named `name.key`."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.numel() != 1):
        items = enumerate(value)
    else:
        return {name: float(value)}
    return {key: number for part, item in items for key, number in _named(f"{name}.{part}", item).items()}
