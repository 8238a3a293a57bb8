"""Everything a run needs to go on bit for bit: named tensors, which may be sharded in any way, and plain facts.

Random states are not among it: they follow from seed, replica and step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fullframe.errors import CheckpointError
from fullframe.model.buffers import writable_buffers
from fullframe.model.sharding.values import is_sharded
from fullframe.ranks.mesh import axes_of
from fullframe.strategy import multiplied
from fullframe.technique import Precision
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.evaluation_point import to_training_point
from fullframe.techniques.precision import LossScale
from fullframe.training.checkpoints.manifest import Manifest, StoredTensor, dtype_name
from fullframe.training.checkpoints.optimizer_state import REMEDY, OptimizerState, as_tensor, is_plain, some
from fullframe.training.loading.loader import ShardedLoader

_EXTRA = "_extra_state"  # how torch's name of a module's own state ends


@dataclass(kw_only=True)
class RunState:
    """All of a run that a checkpoint keeps.

    Buffers are stored as rank 0 has them, which is what the next step takes them for (as DDP does).
    """

    model: nn.Module  # the user's, unwrapped
    optimizer: torch.optim.Optimizer
    loader: ShardedLoader
    mesh: tuple[int, ...]  # data, height, width; or data, depth, height, width
    stages: int = 1  # of the mesh
    precision: Precision = "fp32"
    step: int = 0  # optimizer steps done
    scale: LossScale | None = None  # with fp16
    average: ParameterAverage | None = None  # with ema_decay
    _optimizer: OptimizerState = field(init=False)

    def __post_init__(self) -> None:
        self._optimizer = OptimizerState(self.model, self.optimizer)

    def tensors(self, first_rank: bool) -> dict[str, Tensor]:
        """This rank's tensors and shards by name; raises CheckpointError when one cannot be stored."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        values = self.model.state_dict()
        tensors = {
            f"model/{name}": as_tensor(value, f"model/{name}")
            for name, value in values.items()
            if isinstance(value, Tensor) and (first_rank or name in parameters or is_sharded(value))
        }
        if self.average is not None:
            averages = self.average.state_dict()
            own = {parameter: averages[name] for name, parameter in self.model.named_parameters()}
            tensors |= {f"average/{name}": own[parameter] for name, parameter in parameters.items()}  # also if tied
        return tensors | self._optimizer.tensors()

    def facts(self) -> dict[str, Any]:
        """The state that is no tensor, as plain JSON values; raises CheckpointError when something cannot be stored."""
        extra = {name: value for name, value in self.model.state_dict().items() if not isinstance(value, Tensor)}
        for name, value in extra.items():
            if not is_plain(value):
                raise CheckpointError(
                    f"the model's extra state {name} ({type(value).__name__}) cannot be stored, as nothing is pickled; "
                    "return a tensor, or plain numbers, strings, lists and dicts, from get_extra_state()"
                )
        return {
            "mesh": list(self.mesh),
            "stages": self.stages,
            "precision": self.precision,
            "extra": extra,
            "loader": self.loader.state_dict(),
            "scale": None if self.scale is None else self.scale.state_dict(),
            "optimizer": self._optimizer.facts(),
        }

    def targets(self, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors to be filled from a checkpoint, in place; raises CheckpointError when it does not fit this run.

        Optimizers make their state in their first step, so this takes one, with gradients of zero: it may change
        parameters, which are filled afterwards.
        """
        targets = weight_targets(self.model, manifest)
        others = self._optimizer.targets(manifest)
        if self.average is not None and has_averages(manifest):
            others |= {f"average/{name}": value for name, value in self.average.state_dict().items()}
        for name, target in others.items():
            _check_shape(name, target, manifest.tensors.get(name))
        return targets | others

    def require_place(self, manifest: Manifest) -> None:
        """Raises CheckpointError on all ranks when the checkpoint holds optimizer state that no rank keeps."""
        self._optimizer.require_place(manifest)

    def go_on(self, manifest: Manifest, filled: Mapping[str, Tensor]) -> list[str]:
        """Go on from a checkpoint whose tensors are `filled`, those of `targets`; returns what the user should know.

        Raises CheckpointError when the loader would read other samples.
        """
        facts = manifest.facts
        self.loader.load_state_dict(facts["loader"])
        take_weights(self.model, manifest, filled)
        said = self._optimizer.go_on(manifest, filled)
        if self.average is not None and not has_averages(manifest):
            self.average.load_state_dict({name: p.detach() for name, p in self.model.named_parameters()})
            said.append("the checkpoint has no average of the parameters; it begins with their values now")
        if self.average is None and has_averages(manifest):
            said.append("the checkpoint's average of the parameters is dropped, as ema_decay is not given")
        if self.scale is not None and facts["scale"] is not None:
            self.scale.load_state_dict(facts["scale"])
        if tuple(facts["mesh"]) != self.mesh:
            other = "dropout" if facts["mesh"][0] == self.mesh[0] else "dropout and what batch norm takes together"
            said.append(
                f"the checkpoint is of {_product(facts['mesh'])}, this run is of {_product(self.mesh)}: "
                f"the same numbers but for rounding, {other}"
            )
        if (stages := facts.get("stages", 1)) != self.stages:
            said.append(
                f"the checkpoint is of stages {stages}, this run is of stages {self.stages}: the same numbers but for "
                "rounding, and dropout with microbatches"
            )
        if (precision := facts.get("precision", self.precision)) != self.precision:
            said.append(f"the checkpoint is of {precision}, this run is of {self.precision}: other rounding from here")
        self.step = manifest.step
        to_training_point(self.optimizer)
        return said


def has_averages(manifest: Manifest) -> bool:
    """Whether the checkpoint holds moving averages of the parameters."""
    return bool(_names(manifest, "average/"))


def weights_in(manifest: Manifest, averaged: bool) -> dict[str, str]:
    """Name in the model's state dict -> name of the stored tensor; with `averaged`, of the parameters' averages.

    Raises CheckpointError when the checkpoint holds no average.
    """
    sources = {name: f"model/{name}" for name in _names(manifest, "model/")}
    if not averaged:
        return sources
    averages = _names(manifest, "average/")
    if not averages:
        raise CheckpointError(
            f"the checkpoint after step {manifest.step} holds no average of the parameters; train with --ema-decay"
        )
    return sources | {name: f"average/{name}" for name in averages}


def weight_targets(model: nn.Module, manifest: Manifest, averaged: bool = False) -> dict[str, Tensor]:
    """The model's tensors by the stored ones that fill them, in place; raises CheckpointError when they do not fit."""
    sources, own = weights_in(manifest, averaged), model.state_dict()
    stored = set(sources) | set(manifest.facts["extra"])
    new, gone = sorted(own.keys() - stored), sorted(stored - own.keys())
    parts = [f"the model's {some(new)} not in it"] if new else []
    parts += [f"its {some(gone)} not in the model"] if gone else []
    if parts:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(parts)}; {REMEDY}")
    targets = {
        sources[name]: _extra(value, manifest.tensors[sources[name]]) if name.endswith(_EXTRA) else value.detach()
        for name, value in own.items()
        if name in sources
    }
    for name, target in targets.items():
        _check_shape(name, target, manifest.tensors[name])
    return targets


def _extra(value: Any, stored: StoredTensor) -> Tensor:
    """For a module's own state, which a new module may have of another size, or as no tensor."""
    device = value.device if isinstance(value, Tensor) else None
    return torch.empty(stored.sizes, dtype=stored.dtype, device=device)


def take_weights(model: nn.Module, manifest: Manifest, filled: Mapping[str, Tensor], averaged: bool = False) -> None:
    """Give the model the checkpoint's tensors, `filled` by their stored names, and its extra state."""
    values = {name: filled[source] for name, source in weights_in(manifest, averaged).items()}
    with writable_buffers(model):
        model.load_state_dict(values | dict(manifest.facts["extra"]))


def _check_shape(name: str, target: Tensor, stored: StoredTensor | None) -> None:
    if stored is None:
        raise CheckpointError(f"the checkpoint has no {name}; {REMEDY}")
    there = f"{dtype_name(stored.dtype)} {stored.sizes}"
    here = f"{dtype_name(target.dtype)} {tuple(target.shape)}"
    if there != here:
        raise CheckpointError(f"the checkpoint's {name} is {there}, this run's is {here}; {REMEDY}")


def _names(manifest: Manifest, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in manifest.tensors if name.startswith(prefix)}


def _product(sizes: Any) -> str:
    return multiplied(dict(zip(axes_of(len(sizes)), sizes, strict=True)))
