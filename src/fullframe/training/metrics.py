"""Metrics of torchmetrics: what those of all ranks hold, put together as one process's would have it."""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from fullframe.errors import RecipeError
from fullframe.spatial.tensor import whole


def is_metric(value: Any) -> bool:
    """Whether it is of torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")  # where it was not imported, nothing can be one
    return torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _parts(metric: Any) -> Iterator[Any]:
    """The metric itself and the metrics in it, if it is a collection or a wrapper: those that have states."""
    return (part for part in metric.modules() if hasattr(part, "_reductions"))


def on_host(metric: Any) -> Any:
    """A copy of the metric in host memory; split states become whole."""
    metric = copy.deepcopy(metric)
    for part in _parts(metric):
        for name, state in part.metric_state.items():
            setattr(part, name, [whole(item) for item in state] if isinstance(state, list) else whole(state))
    return metric.cpu()


def states(metric: Any) -> Iterator[Tensor]:
    """The tensors of its states."""
    for part in _parts(metric):
        for state in part.metric_state.values():
            yield from (item for item in (state if isinstance(state, list) else [state]) if isinstance(item, Tensor))


def digest(state: Tensor) -> tuple[float, float]:
    """The sum of its numbers, and of their absolute values."""
    values = state.double()
    return float(values.sum()), float(values.abs().sum())


def computed(name: str, of_ranks: Iterable[list[Any]]) -> dict[str, float]:
    """The value of the metrics of all ranks, each a list in order, or several values under names of their own."""
    try:
        metrics = _in_turn(of_ranks)
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
    numbers = {name: digest(value) for name, value in found.items() if isinstance(value, Tensor)}
    numbers |= {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}
    numbers |= {name: len(value) for name, value in found.items() if isinstance(value, (list, dict, set))}
    return {name: repr(value) for name, value in numbers.items()}


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
