"""Runs of layers of an `nn.Sequential`, for a model that repeats no block, a plain VGG say: a run stands for a block.

`features[5:10]` is children 5 to 9 of `features`. The Sequential's own forward calls its runs, so names, hooks and the
state dict stay as they are.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import prod
from types import MethodType
from typing import Any

from torch import nn

from fullframe.model.forward_patch import PatchedForward
from fullframe.wording import inside

_FEWEST = 4  # layers with weights that are worth to be cut


def runs_of_layers(model: nn.Module) -> list[str]:
    """Names of the runs into which the outermost Sequentials of at least four layers with weights are cut.

    About as many runs as the square root of the number of these layers, which keep about as much for backward each. A
    run begins at a layer with weights, and what comes before the first one is in none.
    """
    return [run for name, module in _outermost(model, "") for run in _runs(module, name)]


def _outermost(module: nn.Module, name: str) -> list[tuple[str, Any]]:
    if _is_plain(module) and len(_with_weights(module)) >= _FEWEST:  # type: ignore[arg-type]
        return [(name, module)]
    children = [(inside(name, child), submodule) for child, submodule in module.named_children()]
    return [found for child, submodule in children for found in _outermost(submodule, child)]


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a Sequential with the forward of its class, or one that we have put around it."""
    if not isinstance(module, nn.Sequential):
        return False
    forward = module.forward
    while isinstance(forward, PatchedForward):
        forward = forward.original
    return forward == MethodType(nn.Sequential.forward, module)


def outermost_sequentials(model: nn.Module) -> list[nn.Sequential]:
    """The Sequentials that are in no other and run their children one after another."""
    if _is_plain(model):
        return [model]  # type: ignore[list-item]
    return [found for child in model.children() for found in outermost_sequentials(child)]


def layers_in_runs(module: nn.Sequential) -> list[nn.Module]:
    """What the Sequential calls one after another: its children, or the runs of them that `part` has made."""
    patch = _patch_of(module)
    return list(module) if patch is None else list(patch.calls())


def _with_weights(module: Iterable[nn.Module]) -> list[int]:
    """Numbers of the children that have weights; norms and biases have one dim."""
    return [number for number, child in enumerate(module) if any(p.dim() > 1 for p in child.parameters())]


def _runs(module: nn.Sequential, name: str) -> list[str]:
    layers = _with_weights(module)
    number = round(len(layers) ** 0.5)
    before = [0.0, *accumulate(_kept(module))]
    share = (before[-1] - before[layers[0]]) / number
    ends = (before[layers[0]] + share * run for run in range(number))
    starts = sorted({min(layers, key=lambda layer: abs(before[layer] - end)) for end in ends})
    return [f"{name}[{start}:{stop}]" for start, stop in zip(starts, [*starts[1:], len(module)], strict=True)]


def _kept(module: nn.Sequential) -> Iterator[float]:
    """Guessed, by child, what it keeps for backward: channels x pixels of its layers' outputs, in any unit."""
    channels, pixels = 1.0, 1.0
    for child in module:
        numbers = 0.0
        for layer in child.modules():
            channels = getattr(layer, "out_channels", getattr(layer, "out_features", channels))
            strides = getattr(layer, "stride", None) or 1
            factor = prod(strides) if isinstance(strides, tuple) else strides**2
            pixels *= factor if getattr(layer, "transposed", False) else 1 / factor
            if isinstance(layer, nn.Upsample) and isinstance(layer.scale_factor, float):
                pixels *= layer.scale_factor**2
            numbers += channels * pixels if not any(True for _ in layer.children()) else 0
        yield numbers


def part(model: nn.Module, name: str) -> nn.Module:
    """The module of this name, or a run, from now on one of those that its Sequential calls."""
    parent, bracket, rows = name.partition("[")
    module: Any = model.get_submodule(parent)
    if not bracket:
        return model.get_submodule(name)
    patch = _patch_of(module)
    if patch is None:
        patch = module.forward = _InRuns(module)
    start, stop = map(int, rows.rstrip("]").split(":"))
    return patch.run(start, stop)


def _patch_of(module: nn.Module) -> "_InRuns | None":
    """The one by which a Sequential runs in runs, under others perhaps."""
    patch = module.__dict__.get("forward")
    while patch is not None and not isinstance(patch, _InRuns):
        patch = getattr(patch, "original", None)
    return patch


class _InRuns(PatchedForward):
    """The forward of a Sequential some of whose layers are called run by run."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self._module: Any = module
        self._runs: dict[int, nn.Sequential] = {}  # by the number of the first layer

    def run(self, start: int, stop: int) -> nn.Sequential:
        if start not in self._runs:
            self._runs[start] = nn.Sequential(*list(self._module)[start:stop])
        return self._runs[start]

    def calls(self) -> Iterator[nn.Module]:
        """What is called one after another."""
        layers, number = list(self._module), 0
        while number < len(layers):
            run = self._runs.get(number)
            if run is None:
                yield layers[number]
                number += 1
            else:
                run._modules.update(zip(run._modules, layers[number:], strict=False))  # one may have been replaced
                yield run
                number += len(run)

    def __call__(self, input: Any) -> Any:
        for module in self.calls():
            input = module.forward(input) if module in self._runs.values() else module(input)
        return input
