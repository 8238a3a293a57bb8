"""A model on several stages, as a strategy wants it: its unrolled iterations, or the layers of its `nn.Sequential`.

Layers are cut where what is kept for backward is most even; what else the model has runs on all stages.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from fullframe.errors import StrategyError
from fullframe.geometry.extents import Extents
from fullframe.model.attributes import kept_attributes
from fullframe.model.forward_patch import PatchedForward
from fullframe.model.kept_fakes import no_fakes_kept
from fullframe.model.lent import lent
from fullframe.model.runs import layers_in_runs, outermost_sequentials
from fullframe.ranks.mesh import init_mesh
from fullframe.ranks.randomness import kept_random_state
from fullframe.spatial.tensor import SpatialTensor, wrap
from fullframe.strategy import Strategy
from fullframe.techniques.stages.chain import Stages
from fullframe.techniques.stages.through import through_stages
from fullframe.techniques.unrolling.models import unrolled_in
from fullframe.techniques.unrolling.unroll import Unrolled


class StagedModel:
    """What of a model is on stages; `microbatches` are those in which a batch goes through them."""

    def __init__(self, model: nn.Module, stages: int, mesh: DeviceMesh, microbatches: int):
        """Raises StrategyError where the model has neither unrolled iterations nor enough layers in a row."""
        self._chains: dict[nn.Module, Stages] = {}
        unrolled = unrolled_in(model)
        for module in unrolled.values():
            module.spread(mesh, microbatches)
            assert module.stages is not None
            self._chains[module] = module.stages
        if not unrolled:
            layers: Any = _longest(model, stages)
            parts = len(layers_in_runs(layers))
            if parts < stages:
                raise StrategyError(
                    f"strategy.recompute makes {parts} parts of {len(layers)} layers, which cannot be spread over "
                    f"{stages} stages; name what to recompute with recompute_modules, or use {parts} stages"
                )
            self._chains[layers] = Stages(mesh, microbatches)
            layers.forward = StagedLayers(layers, self._chains[layers])

    def shares(self) -> dict[nn.Module, range]:
        """Of each module that is on stages the parts that are this one's; even ones before a first call has cut it."""
        return {
            module: stages.share(
                module.iterations if isinstance(module, Unrolled) else len(layers_in_runs(cast(nn.Sequential, module)))
            )
            for module, stages in self._chains.items()
        }

    def watch(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on that is around what a stage does with each microbatch, forward or back."""
        for stages in self._chains.values():
            stages.around = around

    def slice(self, microbatches: int) -> None:
        """Go through batches in so many from now on."""
        for stages in self._chains.values():
            stages.microbatches = microbatches


def staged(model: nn.Module, strategy: Strategy) -> StagedModel | None:
    """The model on the strategy's stages; all ranks call it.

    Raises StrategyError where it cannot be cut, and where it is on stages of which the strategy knows nothing.
    """
    if strategy.stages > 1:
        mesh = init_mesh(strategy.height, strategy.width, depth=strategy.depth, stages=strategy.stages)
        return StagedModel(model, strategy.stages, mesh, strategy.microbatches)
    if any(module.stages is not None for module in unrolled_in(model).values()):
        raise StrategyError(
            'the model has ff.unroll(placement="stages") inside, but strategy.stages is 1, so that the ranks along the '
            "stages would get different samples; use Strategy(stages=...) with as many as the mesh has"
        )
    return None


def parts_of(model: nn.Module) -> int:
    """On how many stages it can be at most; 0 where it has nothing that can be cut."""
    unrolled = [module.iterations for module in unrolled_in(model).values()]
    return min(unrolled) if unrolled else max(map(len, outermost_sequentials(model)), default=0)


def _longest(model: nn.Module, stages: int) -> nn.Sequential:
    """The outermost Sequential with most layers."""
    found = [module for module in outermost_sequentials(model) if len(module) >= stages]
    if not found:
        raise StrategyError(
            f"strategy.stages is {stages}, but {type(model).__name__} has neither ff.unroll nor an nn.Sequential of "
            f"{stages} modules inside, so there is nothing to cut into stages; write the part that is to be cut as one "
            "nn.Sequential, or split the image over height and width instead"
        )
    return max(found, key=len)


class StagedLayers(PatchedForward):
    """The forward of a Sequential whose layers are on several stages."""

    def __init__(self, module: nn.Sequential, stages: Stages):
        super().__init__(module)
        self._module, self._stages = module, stages

    def __call__(self, input: Any) -> Any:
        chain = _Layers(self._module)
        if not self._stages.bounds:
            kept = kept_bytes(chain.parts, input)
            self._stages.bounds = balanced(kept, self._stages.axis.size)
        return through_stages(chain, self._stages, input, ())[0]


class _Layers:
    """The layers of a Sequential as a chain; those that are computed again together are one part."""

    def __init__(self, module: nn.Sequential):
        self.whole, self.parts = module, layers_in_runs(module)

    def run(self, part: range, state: Any, inputs: Any, before: Callable[[int], None]) -> list[Any]:
        """The last layer's result alone."""
        for number in part:
            before(number)
            state = self.parts[number](state)
        return [state]

    def likeness(self, count: int, state: Any) -> Any:
        """By a run without numbers; split where it begins to be, at even boundaries."""
        found = trials(self.parts[:count], state)
        if not found and count:
            raise StrategyError(
                "what goes from stage to stage is not known in a simulation: the layers of the model's longest "
                "nn.Sequential ask for numbers, or one of them takes or gives something else than one tensor; leave "
                "out stages"
            )
        shape, dtype = found[-1][1:] if count else (tuple(state.shape), state.dtype)
        if not isinstance(state, SpatialTensor):
            return state.new_empty(shape, dtype=dtype)
        spec = state.spec
        cuts = tuple(p.recut(Extents.even(shape[p.dim], p.extents.parts)) for p in spec.placements)
        spec = spec.with_(shape, cuts)
        return wrap(state.local.new_empty(spec.local_shape, dtype=dtype), spec)


def balanced(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where to cut so that the dearest of so many runs is as cheap as can be, and then all are alike; none is empty.

    The bounds of each run, from 0 to the number of costs: costs 1 1 1 3 in two runs: (0, 3, 4).
    """
    sums = [0.0, *accumulate(costs)]
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0.0, 0.0, (0,))}
    for count in range(1, parts + 1):
        for stop in range(count, len(costs) - (parts - count) + 1):
            before = ((start, best[count - 1, start]) for start in range(count - 1, stop) if (count - 1, start) in best)
            best[count, stop] = min(
                (max(dearest, own := sums[stop] - sums[start]), squares + own**2, (*bounds, stop))
                for start, (dearest, squares, bounds) in before
            )
    return best[parts, len(costs)][2]


class Trial(NamedTuple):
    """What a layer keeps for backward, in bytes, and what it gives."""

    kept: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def kept_bytes(layers: Sequence[nn.Module], input: Any) -> list[float]:
    """What each layer keeps for backward of a whole input like this; one for each where that is not known."""
    found = trials(layers, input)
    return [float(each.kept) for each in found] if found else [1.0] * len(layers)


def trials(layers: Sequence[nn.Module], input: Any) -> list[Trial]:
    """One for each layer, from a run without numbers on a whole input like this; the same on all ranks.

    Empty where a layer asks for numbers, or takes or gives something else than one tensor. Under autocast, which looks
    at the device, fake tensors of that device take the place of meta tensors. Forward hooks, which may keep what they
    are given, are not called.
    """
    found: list[Trial] = []
    device = input.device.type if torch.is_autocast_enabled(input.device.type) else "meta"
    without_numbers = None if device == "meta" else FakeTensorMode()
    with (
        _disable_current_modes(),
        kept_random_state(),
        kept_attributes(*layers),
        no_fakes_kept(without_numbers, *layers),
        without_numbers or nullcontext(),
    ):
        state: Any = torch.empty(input.shape, dtype=input.dtype, device=device)
        for module in (module for layer in layers for module in layer.modules()):
            module._forward_hooks.clear()  # until the attributes are put back
        try:
            for layer in layers:
                saved: dict[int, int] = {}
                weights = {
                    name: torch.empty(value.shape, dtype=value.dtype, device=device, requires_grad=value.requires_grad)
                    for name, value in (*layer.named_parameters(), *layer.named_buffers())
                }
                note = partial(_note, saved, {id(weight) for weight in weights.values()})
                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    begun = state.detach().requires_grad_(state.is_floating_point())
                    with lent(layer, weights):
                        state = layer(begun)
                found.append(Trial(sum(saved.values()), tuple(state.shape), state.dtype))
        except Exception:  # whatever a layer does without numbers
            return []
    return found


def _note(saved: dict[int, int], weights: set[int], tensor: Tensor) -> Tensor:
    if id(tensor) not in weights:
        storage: Any = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
    return tensor
