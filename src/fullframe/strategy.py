"""How to spread a training over ranks and make it fit: plain frozen data, checked once, kept as JSON.

`TECHNIQUES` has a row for every field of `Strategy` but the mesh; the command line and the planner read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from operator import attrgetter
from typing import get_args

from fullframe.arguments import checked
from fullframe.errors import StrategyError, require_count
from fullframe.technique import Compile, OptimizerName, Precision, Recompute, Rough, Technique
from fullframe.wording import amount, plural


@checked
@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one batch is spread and what is done to fit it. The update is that of the whole batch for any of these, but
    for rounding (`precision`) and for batch norm, whose statistics in training are of one replica's microbatch.

    data, height, width: replicas, and the ranks that share a sample's rows and columns
    depth:               ranks that share the slices of volumes (N, C, D, H, W); 1 for images
    microbatches:        slices in which a replica goes through its batch; gradients are sent with the last one
    stages:              ranks with consecutive iterations of `ff.unroll`, or layers of the longest nn.Sequential
    precision:           "fp32" (the model's own dtype), "tf32" (fp32 with TF32 matrix units), "bf16" (autocast), "fp16"
                         (autocast with loss scaling, for devices without bf16)
    recompute:           "none"; "blocks": activations inside the model's repeated blocks, or inside runs of its layers
                         where it repeats none, are computed again in backward; "nested": of the iterations of each
                         `ff.unroll` few states are kept, and those between are computed again from them; "budget":
                         the fewest blocks, by seconds per byte, that keep saved activations within
                         `recompute_budget_bytes`
    recompute_modules:   names of the modules to recompute (fnmatch patterns); empty: the repeated blocks are found
    recompute_states:    states of each `ff.unroll` that "nested" may keep, with as few iterations run again as that
                         allows; None: about two square roots of them, and each iteration runs three times at most
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
    compile:             blocks (True), modules by names or patterns, or "all" as one program: compiled (experimental)

    Raises StrategyError when a field is out of range or contradicts another.
    """

    data: int = 1
    depth: int = 1
    height: int = 1
    width: int = 1
    microbatches: int = 1
    stages: int = 1
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_states: int | None = None
    recompute_budget_bytes: int | None = None
    offload: bool = False
    optimizer: OptimizerName = "recipe"
    shard_optimizer: bool = False
    shard_parameters: bool = False
    update_in_backward: bool = False
    clip_norm: float | None = None
    ema_decay: float | None = None
    sync_batchnorm: bool = False
    compile: Compile = False

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
        vars(self).update({n: tuple(v) for n, v in vars(self).items() if isinstance(v, list)})  # JSON has lists only
        for name, kind in {"recompute_modules": tuple, "clip_norm": Real, "ema_decay": Real}.items():
            _require(isinstance(vars(self)[name], (kind, type(None))), f"{name} must be a {kind.__name__}")
        for technique in TECHNIQUES:
            technique.check(self)
        for technique in TECHNIQUES:
            clashes = [name for name, clash in technique.excludes.items() if technique.used(self) and clash(self)]
            _require(not clashes, f"{technique.name} {technique.because.format(', '.join(clashes))}")

    @property
    def ranks(self) -> int:
        """Ranks the strategy needs: data x stages x depth x height x width."""
        return self.data * self.stages * self.parts

    @property
    def parts(self) -> int:
        """Ranks that share a sample: depth x height x width."""
        return self.depth * self.height * self.width

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes by name, as the mesh has them: without stages and depth where these are 1."""
        sizes = {name: getattr(self, name) for name in ("data", "stages", "depth", "height", "width")}
        return {name: size for name, size in sizes.items() if size != 1 or name not in ("stages", "depth")}

    def to_json(self) -> str:
        """One JSON object with every field."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The strategy whose `text` `to_json` wrote; raises StrategyError on broken JSON or an unknown field."""
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, TypeError) as error:
            raise StrategyError(f"the strategy is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise StrategyError(f"the strategy must be one JSON object, got {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := ", ".join(map(repr, sorted(set(fields) - set(known)))):
            raise StrategyError(f"unknown strategy field {unknown}; the fields are {', '.join(known)}")
        return cls(**fields)


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


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


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


def _check_states(strategy: Strategy) -> None:
    states, recompute = strategy.recompute_states, strategy.recompute
    if states is not None:
        _require(recompute == "nested", f"recompute_states is {states}, but recompute is {recompute!r}; use 'nested'")
        require_count(StrategyError, "strategy.recompute_states", states)


def _check_compile(strategy: Strategy) -> None:
    value = strategy.compile
    is_names = isinstance(value, tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)
    _require(
        is_names or value is False or value is True or value == "all",
        f'compile must be False, True, "all", or names of modules, got {value!r}',
    )


# Pairs of recompute of which the second holds no more than the first.
_LEANER = {("none", "blocks"), ("none", "nested"), ("none", "budget"), ("blocks", "nested")}


def _recompute_rough(strategy: Strategy) -> Rough:
    """Forward is a third of the work. "blocks" do it once more, "nested" twice at most."""
    return Rough(kept=0.2, work=5 / 3) if strategy.recompute == "nested" else Rough(kept=0.3, work=4 / 3)


def _no_more_states(states: int | None, other: int | None) -> bool:
    return states == other or (states is not None and other is not None and states < other)


def _fewer_states(iterations: int) -> list[int | None]:
    """What is worth a try: a half of the states, a quarter and an eighth, and two square roots of them."""
    return [None, *sorted({iterations // part for part in (2, 4, 8)} - {0}, reverse=True)]


def _recompute_words(strategy: Strategy) -> str:
    if strategy.recompute == "budget":
        return f"recompute to {amount(strategy.recompute_budget_bytes or 0)}"
    if strategy.recompute_states is not None:
        return f"recompute nested to {plural(strategy.recompute_states, 'state')}"
    return f"recompute {strategy.recompute}" if strategy.recompute != "none" else ""


def _budgeted(strategy: Strategy, bytes: int) -> tuple[Strategy, Strategy] | None:
    if strategy.recompute != "blocks" or strategy.offload or strategy.stages > 1:
        return None
    plain = replace(strategy, recompute="none", recompute_modules=())
    return plain, replace(strategy, recompute="budget", recompute_budget_bytes=bytes)


OTHER_OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw8bit", "adafactor", "sgd")
_ANOTHER_TRAINING = "it changes what is trained, which is the user's to say"

# One row a technique. The planner tries all values of the last one before the next value of the one before it.
TECHNIQUES: tuple[Technique[Strategy], ...] = (
    Technique(
        name="microbatches",
        help="Slices in which a step goes through its batch: less memory; batch norm sees one slice at a time.",
        metavar="N",
        check=lambda s: require_count(StrategyError, "strategy.microbatches", s.microbatches),
        words=lambda s: f"{s.microbatches} microbatches" * (s.microbatches > 1),
        place=1,
        saves=lambda s, other: (
            s.microbatches == other.microbatches or s.stages == 1 < s.microbatches / other.microbatches
        ),
        choices=lambda asked, s: divisors(asked.batch_size // s.data),
    ),
    Technique(
        name="stages",
        help="Ranks that hold consecutive parts of the model: iterations of ff.unroll, or layers of an nn.Sequential.",
        metavar="N",
        check=lambda s: require_count(StrategyError, "strategy.stages", s.stages),
        excludes={name: attrgetter(name) for name in ("shard_parameters", "update_in_backward", "sync_batchnorm")}
        | {"recompute 'budget'": lambda s: s.recompute == "budget"},
        because="does different things on different ranks, which {} cannot; leave one out",
        words=lambda s: "",  # among those of the mesh
        bears_on="activations",
        alike=lambda s: (s.stages, s.stages > 1 and s.microbatches),
        rough=lambda s: Rough(kept=s.microbatches / s.stages, work=(1 + (s.stages - 1) / s.microbatches) / s.stages),
        choices=lambda asked, s: [n for n in divisors(asked.ranks // s.ranks) if n <= max(asked.parts, 1)],
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
        "repeats none); nested: of the iterations of ff.unroll keep few states; budget: of as few blocks as will do.",
        values=get_args(Recompute),
        words=_recompute_words,
        place=2,
        saves=lambda s, other: s.recompute == other.recompute or (other.recompute, s.recompute) in _LEANER,
        bears_on="activations",
        alike=lambda s: {"budget": "blocks"}.get(s.recompute, s.recompute),
        rough=_recompute_rough,
        choices=lambda asked, s: ("none", "blocks", *["nested"] * (asked.iterations > 2)),
    ),
    Technique(
        name="recompute_states",
        help="With --recompute nested: states of each ff.unroll that are kept; about two square roots of them unless "
        "given.",
        metavar="N",
        check=_check_states,
        weight=0,
        saves=lambda s, other: (
            other.recompute != "nested" or _no_more_states(s.recompute_states, other.recompute_states)
        ),
        bears_on="activations",
        choices=lambda asked, s: _fewer_states(asked.iterations) if s.recompute == "nested" else (),
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
            s.recompute in ("blocks", "budget") or not s.recompute_modules,
            f"recompute_modules names modules, but recompute is {s.recompute!r}; use 'blocks'",
        ),
        weight=0,
        saves=lambda s, other: True,
        choices=lambda asked, s: (asked.recompute_modules if s.recompute in ("blocks", "budget") else (),),
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
            **{name: attrgetter(name) for name in ("shard_optimizer", "shard_parameters")},
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
    Technique(
        name="compile",
        help="Compile with torch's inductor the repeated blocks, with `all` the whole model as one program, or the "
        "modules of these names or patterns: experimental.",
        metavar="[all | NAME ...]",
        check=_check_compile,
        excludes={
            "stages > 1": lambda s: s.stages > 1,
            "recompute 'nested'": lambda s: s.recompute == "nested",
            "shard_parameters with 'all'": lambda s: s.compile == "all" and s.shard_parameters,
            "recompute with 'all'": lambda s: s.compile == "all" and s.recompute != "none",
        },
        because="was not made for {}; leave one out, or compile blocks (True)",
        bears_on="activations",
        last=lambda asked, s: (True,) if asked.can_compile else (),
    ),
)
