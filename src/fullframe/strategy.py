"""How to spread a training over ranks and make it fit: plain frozen data, checked once, kept as JSON.

`TECHNIQUES` has a row for every field of `Strategy` but the mesh; the command line and the planner read it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from fullframe.errors import StrategyError, require_count

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Recompute = Literal["none", "blocks", "budget"]
OptimizerName = Literal["recipe", "sgd", "adamw", "adafactor", "adamw8bit"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one batch is spread and what is done to fit it. The update is that of the whole batch for any of these, but
    for rounding (`precision`) and for batch norm, whose statistics in training are of one replica's microbatch.

    data, height, width: replicas, and the ranks that share a sample's rows and columns
    depth:               ranks that share the slices of volumes (N, C, D, H, W); 1 for images
    microbatches:        slices in which a replica goes through its batch; gradients are sent with the last one
    precision:           "fp32" (the model's own dtype), "tf32" (fp32 with TF32 matrix units), "bf16" (autocast), "fp16"
                         (autocast with loss scaling, for devices without bf16)
    recompute:           "none"; "blocks": activations inside the model's repeated blocks, or inside runs of its layers
                         where it repeats none, are computed again in backward; "budget": the fewest blocks, by seconds
                         per byte, that keep saved activations within `recompute_budget_bytes`
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
    depth: int = 1
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
        for name in self.mesh:
            require_count(StrategyError, f"strategy.{name}", getattr(self, name))
        for technique in TECHNIQUES:
            value, values = getattr(self, technique.name), technique.values
            if not technique.metavar and (
                value not in values or isinstance(value, bool) != isinstance(values[0], bool)
            ):
                choices = ", ".join(map(repr, values))
                raise StrategyError(f"strategy.{technique.name} must be one of {choices}, got {value!r}")
        object.__setattr__(self, "recompute_modules", tuple(self.recompute_modules))  # JSON has lists only
        for technique in TECHNIQUES:
            technique.check(self)
        for technique in TECHNIQUES:
            clashes = [name for name, clash in technique.excludes.items() if technique.used(self) and clash(self)]
            _require(not clashes, f"{technique.name} {technique.because.format(', '.join(clashes))}")

    @property
    def ranks(self) -> int:
        """Ranks the strategy needs: data x depth x height x width."""
        return self.data * self.parts

    @property
    def parts(self) -> int:
        """Ranks that share a sample: depth x height x width."""
        return self.depth * self.height * self.width

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes by name, as the mesh has them: without depth where that is 1."""
        depth = {} if self.depth == 1 else {"depth": self.depth}
        return {"data": self.data} | depth | {"height": self.height, "width": self.width}

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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the planner may choose from for a whole job's batch."""

    batch_size: int
    precisions: tuple[Precision, ...]
    optimizers: tuple[OptimizerName, ...] = ("recipe",)
    recompute_modules: tuple[str, ...] = ()  # where the model repeats no block
    can_offload: bool  # host memory is another memory than the device's


class Rough(NamedTuple):
    """What a technique changes, as factors; used until one strategy with it was simulated."""

    kept: float = 1.0  # of the activations, what the device holds until backward
    width: float = 1.0  # of the bytes of one activation
    work: float = 1.0  # of the step's work
    traffic: float = 1.0  # of the bytes that ranks send of gradients and parameters


@dataclass(frozen=True, kw_only=True)
class Technique:
    """All that the command line and the planner know of one field of `Strategy`, which is no axis of the mesh.

    name:     of the field
    help:     for the command line
    metavar:  of its value there, where that is no choice
    values:   to choose from
    check:    raises StrategyError where the value is out of range, or lacks another field
    excludes: what it cannot be used with, by the words for it
    because:  why; {} stands for these words
    words:    how a strategy is described; without: the name where it is used, if it has a weight
    place:    of these words among the others
    weight:   1 where it makes a strategy less simple; of equals the simpler one is taken
    saves:    (strategy, other) -> whether the strategy holds no more than the other, as far as this technique goes;
              without: where both have the same value
    bears_on: the figures that cannot be scaled between strategies that differ in it; "": all can
    alike:    what strategies must have in common to be scaled; without: the value
    rough:    factors of a strategy that uses it
    shards:   kinds of the model's state of which each rank keeps its part alone
    choices:  values that the planner tries, given those of the techniques before, the simplest first
    refined:  (strategy, bytes) -> the same without the technique, and with so many bytes of activations; or None
    advised:  values that are named as a remedy where nothing fits
    never:    why the planner tries none, and plans do not speak of it
    """

    name: str
    help: str
    metavar: str = ""
    values: tuple[object, ...] = (False, True)
    check: Callable[[Strategy], None] = lambda strategy: None
    excludes: Mapping[str, Callable[[Strategy], bool]] = field(default_factory=dict)
    because: str = ""
    words: Callable[[Strategy], str] | None = None
    place: int = 4
    weight: int = 1
    saves: Callable[[Strategy, Strategy], bool] | None = None
    bears_on: Literal["", "digits", "activations", "optimizer", "sharding"] = ""
    alike: Callable[[Strategy], object] | None = None
    rough: Callable[[Strategy], Rough] = lambda strategy: Rough()
    shards: tuple[str, ...] = ()
    choices: Callable[[Asked, Strategy], Sequence[object]] = lambda asked, strategy: ()
    refined: Callable[[Strategy, int], tuple[Strategy, Strategy] | None] = lambda strategy, bytes: None
    advised: Callable[[Asked], Sequence[object]] = lambda asked: ()
    never: str = ""

    def used(self, strategy: Strategy) -> bool:
        """Whether the strategy has another value than the default."""
        return bool(getattr(strategy, self.name) != getattr(type(strategy), self.name))


def describe(strategy: Strategy) -> str:
    """A strategy in a few words: what differs from one rank in fp32."""
    mesh = [f"{name} {size}" for name, size in strategy.mesh.items() if size > 1]
    words = [" x ".join(mesh) or "one rank"]
    for technique in sorted(TECHNIQUES, key=lambda technique: technique.place):
        if technique.words is not None:
            words.append(technique.words(strategy))
        elif technique.weight and not technique.never and technique.used(strategy):
            words.append(technique.name.replace("_", " "))
    return ", ".join(filter(None, words))


def multiplied(mesh: Mapping[str, int]) -> str:
    """As printed: data 1 x height 2 x width 2."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def amount(bytes: float) -> str:
    """As printed: 12.3 GiB, 53 MiB."""
    return f"{bytes / 2**30:.1f} GiB" if bytes >= 2**30 else f"{bytes / 2**20:.0f} MiB"


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StrategyError(f"strategy.{message}")


def _check_budget(strategy: Strategy) -> None:
    budget = strategy.recompute_budget_bytes
    _require(
        (strategy.recompute == "budget") == (budget is not None),
        f"recompute is {strategy.recompute!r} and recompute_budget_bytes {budget}; "
        "give the bytes with recompute='budget', and only then",
    )
    if budget is not None:
        require_count(StrategyError, "strategy.recompute_budget_bytes", budget, least=0)


def _recompute_words(strategy: Strategy) -> str:
    if strategy.recompute == "budget":
        return f"recompute to {amount(strategy.recompute_budget_bytes or 0)}"
    return f"recompute {strategy.recompute}" if strategy.recompute != "none" else ""


def _budgeted(strategy: Strategy, bytes: int) -> tuple[Strategy, Strategy] | None:
    if strategy.recompute != "blocks" or strategy.offload:
        return None
    return (
        replace(strategy, recompute="none", recompute_modules=()),
        replace(strategy, recompute="budget", recompute_budget_bytes=bytes),
    )


OTHER_OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw8bit", "adafactor", "sgd")
_ANOTHER_TRAINING = "it changes what is trained, which is the user's to say"

# One row a technique. The planner tries all values of the last one before the next value of the one before it.
TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="microbatches",
        help="Slices in which a step goes through its batch: less memory; batch norm sees one slice at a time.",
        metavar="N",
        check=lambda s: require_count(StrategyError, "strategy.microbatches", s.microbatches),
        words=lambda s: f"{s.microbatches} microbatches" * (s.microbatches > 1),
        place=1,
        saves=lambda s, other: s.microbatches >= other.microbatches,
        choices=lambda asked, s: divisors(asked.batch_size // s.data),
    ),
    Technique(
        name="precision",
        help="fp32: the model's own dtype; tf32; bf16: autocast; fp16: autocast with loss scaling, for GPUs without "
        "bf16.",
        values=get_args(Precision),
        words=lambda s: s.precision,
        place=0,
        weight=0,
        bears_on="digits",
        rough=lambda s: Rough(width=0.6 if s.precision in ("bf16", "fp16") else 1.0),  # autocast leaves some in fp32
        choices=lambda asked, s: asked.precisions,
    ),
    Technique(
        name="optimizer",
        help="Another optimizer in place of the recipe's, with its learning rate.",
        values=get_args(OptimizerName),
        words=lambda s: s.optimizer if s.optimizer != "recipe" else "",
        place=3,
        bears_on="optimizer",
        choices=lambda asked, s: asked.optimizers,
        advised=lambda asked: [name for name in OTHER_OPTIMIZERS if name not in asked.optimizers],
    ),
    Technique(
        name="offload",
        help="Saved activations wait for backward in host memory.",
        saves=lambda s, other: s.offload >= other.offload,
        bears_on="activations",
        rough=lambda s: Rough(kept=0.5),
        choices=lambda asked, s: (False, True) if asked.can_offload else (),
    ),
    Technique(
        name="recompute",
        help="blocks: compute the insides of repeated blocks again in backward (or of runs of layers, where a model "
        "repeats none); budget: of as few blocks as will do.",
        values=get_args(Recompute),
        words=_recompute_words,
        place=2,
        saves=lambda s, other: s.recompute == other.recompute or other.recompute == "none",
        bears_on="activations",
        alike=lambda s: s.recompute != "none",
        rough=lambda s: Rough(kept=0.3, work=4 / 3),  # forward is a third of the work, and is done once more
        choices=lambda asked, s: ("none", "blocks"),
    ),
    Technique(
        name="recompute_budget_bytes",
        help="With --recompute budget: bytes of saved activations that a rank may hold.",
        metavar="BYTES",
        check=_check_budget,
        weight=0,
        saves=lambda s, other: True,
        refined=_budgeted,
    ),
    Technique(
        name="recompute_modules",
        help="Modules to recompute, by name or pattern, in place of the repeated blocks.",
        metavar="NAME ...",
        check=lambda s: _require(
            s.recompute != "none" or not s.recompute_modules,
            "recompute_modules names modules, but recompute is 'none'; use 'blocks'",
        ),
        weight=0,
        saves=lambda s, other: True,
        choices=lambda asked, s: (asked.recompute_modules if s.recompute != "none" else (),),
    ),
    Technique(
        name="shard_parameters",
        help="Each rank keeps its part of parameters, gradients and optimizer state (FSDP2).",
        excludes={"shard_optimizer": lambda s: s.shard_optimizer},
        because="shards the optimizer too; leave out {}",
        saves=lambda s, other: s.shard_parameters >= other.shard_parameters,
        bears_on="sharding",
        rough=lambda s: Rough(traffic=1 + 0.5 * s.microbatches),
        shards=("parameter", "gradient", "optimizer"),
        choices=lambda asked, s: (False, True) if s.ranks > 1 else (),
    ),
    Technique(
        name="shard_optimizer",
        help="Each rank keeps its part of the optimizer's state (ZeRO-1).",
        saves=lambda s, other: s.shard_optimizer + s.shard_parameters >= other.shard_optimizer,
        bears_on="sharding",
        shards=("optimizer",),
        choices=lambda asked, s: (False, True) if s.ranks > 1 else (),
    ),
    Technique(
        name="update_in_backward",
        help="Update each parameter as soon as its gradient is there, and drop the gradient.",
        excludes={
            "microbatches > 1": lambda s: s.microbatches > 1,
            "clip_norm": lambda s: s.clip_norm is not None,
            "precision 'fp16'": lambda s: s.precision == "fp16",
            "shard_optimizer": lambda s: s.shard_optimizer,
            "shard_parameters": lambda s: s.shard_parameters,
        },
        because="drops each gradient before the others are known, {} needs all of them; leave one out",
        advised=lambda asked: (True,),
    ),
    Technique(
        name="clip_norm",
        help="Scale gradients down to this global 2-norm.",
        metavar="NORM",
        check=lambda s: _require(
            s.clip_norm is None or s.clip_norm > 0, f"clip_norm must be greater than 0, got {s.clip_norm!r}"
        ),
        never=_ANOTHER_TRAINING,
    ),
    Technique(
        name="ema_decay",
        help="Keep a moving average of the parameters, and evaluate it.",
        metavar="DECAY",
        check=lambda s: _require(
            s.ema_decay is None or 0 <= s.ema_decay < 1, f"ema_decay must be from 0 to below 1, got {s.ema_decay!r}"
        ),
        never=_ANOTHER_TRAINING,
    ),
    Technique(
        name="sync_batchnorm",
        help="Batch norm takes its statistics over the data replicas too.",
        never=_ANOTHER_TRAINING,
    ),
)
