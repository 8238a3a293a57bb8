"""What would help where nothing fits: more GPUs, another optimizer, other layers; each simulated, most bytes first."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fullframe.planning.candidates import candidates, with_value
from fullframe.planning.pool import in_time, runner
from fullframe.planning.search import Search
from fullframe.recipe import Recipe
from fullframe.simulation.devices.table import Cluster
from fullframe.simulation.fake.abstract import abstract_model
from fullframe.simulation.prediction import Prediction
from fullframe.strategy import TECHNIQUES, Strategy, describe
from fullframe.wording import amount

SimulateOn = Callable[[Recipe, Strategy, Cluster], Prediction]

_LARGEST_NODE = 8
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
_MODULES = 5  # whose activations are named
_TRIED_CONVOLUTIONS = 3
_LEAST_BYTES = 2**20  # that advice must save


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change; `saved_bytes` against the closest strategy, by simulation."""

    change: str
    saved_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Nothing fits: the strategy that comes closest, by how much it does not, what holds the bytes, what would help.

    is_final: False where time was over before all was tried that may fit
    """

    closest: Strategy
    missing_bytes: int
    is_final: bool
    modules: tuple[tuple[str, int], ...]  # whose activations are largest
    advice: tuple[Advice, ...]


def shortfall(
    recipe: Recipe, search: Search, simulate: SimulateOn, workers: int = 1, end: float = math.inf
) -> Shortfall | None:
    """What to do where nothing of what was simulated fits; None where something does, or nothing could be simulated.

    No further change is tried after `end`, by `time.monotonic()`; what cannot be done is no advice. Where the search
    ran out of time nothing is tried: something that was not simulated may fit.
    """
    if search.fitting or not search.known:
        return None
    closest, prediction = min(search.known.items(), key=lambda item: item[1].device_bytes)
    changes = [] if search.untried or time.monotonic() > end else list(_changes(recipe, closest, search))

    def changed_prediction(number: int) -> Prediction:
        return simulate(*changes[number][1:])

    with runner(changed_prediction, workers) as run:
        outcomes = in_time(run, range(len(changes)), workers, end)
    found = [
        Advice(
            change=change,
            saved_bytes=prediction.device_bytes - changed.device_bytes,
            fits=changed.device_bytes <= search.limit_bytes,
        )
        for (change, *_), changed in zip(changes, outcomes, strict=False)
        if isinstance(changed, Prediction) and prediction.device_bytes - changed.device_bytes >= _LEAST_BYTES
    ]
    return Shortfall(
        closest=closest,
        missing_bytes=prediction.device_bytes - search.limit_bytes,
        is_final=not search.untried,
        modules=tuple(list(prediction.modules.items())[:_MODULES]),
        advice=tuple(sorted(found, key=lambda advice: -advice.saved_bytes)),
    )


Change = tuple[str, Recipe, Strategy, Cluster]


def _changes(recipe: Recipe, closest: Strategy, search: Search) -> Iterator[Change]:
    cluster = search.job.cluster
    for technique in TECHNIQUES:
        for value in technique.advised(search.job):
            changed = with_value(closest, technique, value)
            if changed is not None:
                words = technique.name.replace("_", " ") + ("" if value is True else f" {value}")
                yield words, recipe, changed, cluster
    if recipe.batch_size > closest.data:
        smaller = replace(recipe, batch_size=closest.data)
        change = f"a batch of {closest.data} in place of {recipe.batch_size}, which is another training"
        yield change, smaller, replace(closest, microbatches=1), cluster
    yield from _more_gpus(recipe, search)
    for names, variant in _leaner_models(recipe):
        change = f"depthwise-separable in place of {', '.join(names)}, which is another model"
        yield change, variant, closest, cluster


def _more_gpus(recipe: Recipe, search: Search) -> Iterator[Change]:
    """Twice, four and eight times as many: of each the strategy that is estimated to need least."""
    for times in (2, 4, 8):
        cluster = _larger(search.job.cluster, times)
        estimates = search.estimates(candidates(replace(search.job, cluster=cluster, ranks=cluster.ranks)))
        least = min(estimates, key=lambda strategy: estimates[strategy].bytes, default=None)
        if least is not None and least.ranks > search.job.cluster.ranks:
            yield f"{cluster.name}: {describe(least)}", recipe, least, cluster


def _larger(cluster: Cluster, times: int) -> Cluster:
    each = cluster.devices_per_node
    while times > 1 and each * 2 <= _LARGEST_NODE:
        each, times = each * 2, times // 2
    return replace(cluster, devices_per_node=each, nodes=cluster.nodes * times)


def _leaner_models(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], Recipe]]:
    """The recipe with its largest plain convolutions replaced, one at a time and together.

    A depthwise-separable one saves weights and, with them, gradients and optimizer state, but keeps one feature map
    more: which is more is for the simulation to say.
    """
    names = _largest_convolutions(abstract_model(recipe, FakeTensorMode()))[:_TRIED_CONVOLUTIONS]
    sets = [(name,) for name in names] + [tuple(names)] * (len(names) > 1)
    for chosen in sets:
        yield chosen, replace(recipe, model=partial(_separable_model, recipe, chosen))


def _separable_model(recipe: Recipe, names: Iterable[str]) -> nn.Module:
    return separable(recipe.model(), names)


def _largest_convolutions(model: nn.Module) -> list[str]:
    """Names of the plain convolutions of more than one pixel, most weights first."""
    plain = {
        name: module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, _CONVOLUTIONS) and module.groups == 1 and prod(module.kernel_size) > 1
        if module.in_channels >= 8 and module.padding_mode == "zeros"
    }
    return sorted(plain, key=lambda name: -plain[name])


def separable(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """`model` with these convolutions as a depthwise one of the same window and a pointwise one."""
    for name in names:
        parent, _, last = name.rpartition(".")
        plain = model.get_submodule(name)
        assert isinstance(plain, _CONVOLUTIONS)
        kind: Any = type(plain)
        dtype = plain.weight.dtype
        depthwise = kind(
            plain.in_channels, plain.in_channels, plain.kernel_size, plain.stride, plain.padding, plain.dilation,
            groups=plain.in_channels, bias=False, dtype=dtype,
        )  # fmt: skip
        pointwise = kind(plain.in_channels, plain.out_channels, 1, bias=plain.bias is not None, dtype=dtype)
        setattr(model.get_submodule(parent), last, nn.Sequential(depthwise, pointwise))
    return model


def sentences(found: Shortfall) -> list[str]:
    """For a person, one line each."""
    what = "nothing fits" if found.is_final else "nothing that was simulated fits"
    lines = [f"{what}: {amount(found.missing_bytes)} missing with {describe(found.closest)}"]
    for advice in found.advice:
        enough = "fits" if advice.fits else "does not fit yet"
        lines.append(f"  saves {amount(advice.saved_bytes)}, {enough}: {advice.change}")
    if found.modules:
        modules = ", ".join(f"{name or 'the loss'} {amount(size)}" for name, size in found.modules)
        lines.append(f"  most activations: {modules}")
    return lines
