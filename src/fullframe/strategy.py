"""How to spread a training over ranks and make it fit: plain frozen data, checked once, kept as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal, get_args

from fullframe.errors import StrategyError, require_count

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Recompute = Literal["none", "blocks", "budget"]
OptimizerName = Literal["recipe", "sgd", "adamw", "adafactor", "adamw8bit"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one batch is spread and what is done to fit it. The update is that of the whole batch for any of these, but
    for rounding (`precision`) and for batch norm, whose statistics in training are of one replica's microbatch.

    data, height, width: replicas, and the ranks that share a sample's rows and columns
    microbatches:        slices in which a replica goes through its batch; gradients are sent with the last one
    precision:           "fp32" (the model's own dtype), "tf32" (fp32 with TF32 matrix units), "bf16" (autocast), "fp16"
                         (autocast with loss scaling, for devices without bf16)
    recompute:           "none"; "blocks": activations inside the model's repeated blocks are computed again in
                         backward; "budget": the fewest blocks, by seconds per byte, that keep saved activations
                         within `recompute_budget_bytes`
    recompute_modules:   names of the modules to recompute (fnmatch patterns); empty: the repeated blocks are found
    recompute_budget_bytes: saved activations a rank may hold when a microbatch's forward ends; with "budget" only
    offload:             saved activations wait for backward in host memory
    optimizer:           "recipe", or another in its place with the recipe's learning rate: "sgd", "adamw",
                         "adafactor", "adamw8bit"
    shard_optimizer:     each rank keeps and updates its part of the optimizer's state (ZeRO-1)
    shard_parameters:    each rank keeps its part of parameters, gradients and optimizer state (FSDP2)
    update_in_backward:  a parameter is updated as soon as its gradient is there, which is then dropped
    clip_norm:           gradients are scaled down to this global 2-norm
    ema_decay:           an exponential moving average of the parameters is kept, and evaluated
    sync_batchnorm:      batch norm takes its statistics over the data replicas too

    Raises StrategyError when a field is out of range or contradicts another.
    """

    data: int = 1
    height: int = 1
    width: int = 1
    microbatches: int = 1
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_budget_bytes: int | None = None
    offload: bool = False
    optimizer: OptimizerName = "recipe"
    shard_optimizer: bool = False
    shard_parameters: bool = False
    update_in_backward: bool = False
    clip_norm: float | None = None
    ema_decay: float | None = None
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "height", "width", "microbatches"):
            require_count(StrategyError, f"strategy.{name}", getattr(self, name))
        for name, choices in (("precision", Precision), ("recompute", Recompute), ("optimizer", OptimizerName)):
            _require_choice(f"strategy.{name}", getattr(self, name), get_args(choices))
        for name in ("offload", "shard_optimizer", "shard_parameters", "update_in_backward", "sync_batchnorm"):
            _require_choice(f"strategy.{name}", getattr(self, name), (False, True))
        object.__setattr__(self, "recompute_modules", tuple(self.recompute_modules))  # JSON has lists only
        self._require_agreement()

    def _require_agreement(self) -> None:
        """Fields that contradict each other."""
        if (self.recompute == "budget") != (self.recompute_budget_bytes is not None):
            raise StrategyError(
                f"strategy.recompute is {self.recompute!r} and recompute_budget_bytes {self.recompute_budget_bytes}; "
                "give the bytes with recompute='budget', and only then"
            )
        if self.recompute_budget_bytes is not None:
            require_count(StrategyError, "strategy.recompute_budget_bytes", self.recompute_budget_bytes, least=0)
        if self.recompute_modules and self.recompute == "none":
            raise StrategyError("strategy.recompute_modules names modules, but recompute is 'none'; use 'blocks'")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise StrategyError(f"strategy.clip_norm must be greater than 0, got {self.clip_norm!r}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise StrategyError(f"strategy.ema_decay must be from 0 to below 1, got {self.ema_decay!r}")
        if self.shard_optimizer and self.shard_parameters:
            raise StrategyError("strategy.shard_parameters shards the optimizer too; leave out shard_optimizer")
        if self.update_in_backward:
            clashes = {
                "microbatches > 1": self.microbatches > 1,
                "clip_norm": self.clip_norm is not None,
                "precision 'fp16'": self.precision == "fp16",
                "shard_optimizer": self.shard_optimizer,
                "shard_parameters": self.shard_parameters,
            }
            if any(clashes.values()):
                names = ", ".join(name for name, clash in clashes.items() if clash)
                raise StrategyError(
                    f"strategy.update_in_backward drops each gradient before the others are known, {names} "
                    "needs all of them; leave one out"
                )

    @property
    def ranks(self) -> int:
        """Ranks the strategy needs: data x height x width."""
        return self.data * self.height * self.width

    def to_json(self) -> str:
        """One JSON object with every field."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The strategy `to_json` wrote; raises StrategyError on broken JSON or an unknown field."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise StrategyError(f"the strategy is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise StrategyError(f"the strategy must be one JSON object, got {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            names = ", ".join(repr(name) for name in unknown)
            raise StrategyError(f"unknown strategy field {names}; the fields are {', '.join(known)}")
        return cls(**fields)


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        raise StrategyError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
