"""The options that are fields of `Strategy`: how a step is made to fit. A test holds the two lists together."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from fullframe.strategy import OptimizerName, Precision, Recompute


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How a step is made to fit: every field of the strategy but the mesh."""

    microbatches: Annotated[int, arg(metavar="N")] = 1
    """Slices in which a step goes through its batch: less memory; batch norm sees one slice at a time."""
    precision: Precision = "fp32"
    """fp32: the model's own dtype; tf32; bf16: autocast; fp16: autocast with loss scaling, for GPUs without bf16."""
    recompute: Recompute = "none"
    """blocks: compute the insides of repeated blocks again in backward; budget: of as few blocks as will do."""
    recompute_modules: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Modules to recompute, by name or pattern, in place of the repeated blocks."""
    recompute_budget_bytes: Annotated[int | None, arg(metavar="BYTES")] = None
    """With --recompute budget: bytes of saved activations that a rank may hold."""
    offload: bool = False
    """Saved activations wait for backward in host memory."""
    optimizer: OptimizerName = "recipe"
    """Another optimizer in place of the recipe's, with its learning rate."""
    shard_optimizer: bool = False
    """Each rank keeps its part of the optimizer's state (ZeRO-1)."""
    shard_parameters: bool = False
    """Each rank keeps its part of parameters, gradients and optimizer state (FSDP2)."""
    update_in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and drop the gradient."""
    clip_norm: Annotated[float | None, arg(metavar="NORM")] = None
    """Scale gradients down to this global 2-norm."""
    ema_decay: Annotated[float | None, arg(metavar="DECAY")] = None
    """Keep a moving average of the parameters, and evaluate it."""
    sync_batchnorm: bool = False
    """Batch norm takes its statistics over the data replicas too."""

    def fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for `Strategy(**...)`."""
        changed = {}
        for field in dataclasses.fields(Techniques):
            value = getattr(self, field.name)
            if value != field.default:
                changed[field.name] = value
        return changed

    def words(self) -> list[str]:
        """The same as words of a command line."""
        words = []
        for name, value in self.fields().items():
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words
