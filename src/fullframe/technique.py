"""What the command line and the planner know of a way to make a step fit: one `Technique` for each.

`strategy.TECHNIQUES` is the table of them; here is what its rows are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Recompute = Literal["none", "blocks", "nested", "budget"]
OptimizerName = Literal["recipe", "sgd", "adamw", "adafactor", "adamw8bit"]
Compile = bool | Literal["all"] | tuple[str, ...]

S = TypeVar("S")  # Strategy


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the planner may choose from for a whole job's batch."""

    batch_size: int
    precisions: tuple[Precision, ...]
    optimizers: tuple[OptimizerName, ...] = ("recipe",)
    recompute_modules: tuple[str, ...] = ()  # where the model repeats no block
    ranks: int = 1  # that there are
    parts: int = 0  # into which the model can be cut for stages
    iterations: int = 0  # of the longest ff.unroll whose states need not all be kept
    can_compile: bool = False  # blocks may be compiled, which is experimental
    can_offload: bool  # host memory is another memory than the device's


class Rough(NamedTuple):
    """What a technique changes, as factors; used until one strategy with it was simulated."""

    kept: float = 1.0  # of the activations, what the device holds until backward
    width: float = 1.0  # of the bytes of one activation
    work: float = 1.0  # of the step's work
    traffic: float = 1.0  # of the bytes that ranks send of gradients and parameters


def _nothing(asked: Asked, strategy: object) -> Sequence[object]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Technique(Generic[S]):
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
    last:     values that the planner tries at the end alone, with the fastest of what fits: each takes it long
    never:    why the planner tries none, and plans do not speak of it
    """

    name: str
    help: str
    metavar: str = ""
    values: tuple[object, ...] = (False, True)
    check: Callable[[S], None] = lambda strategy: None
    excludes: Mapping[str, Callable[[S], bool]] = field(default_factory=dict)
    because: str = ""
    words: Callable[[S], str] | None = None
    place: int = 4
    weight: int = 1
    saves: Callable[[S, S], bool] | None = None
    bears_on: Literal["", "digits", "activations", "optimizer", "sharding"] = ""
    alike: Callable[[S], object] | None = None
    rough: Callable[[S], Rough] = lambda strategy: Rough()
    shards: tuple[str, ...] = ()
    choices: Callable[[Asked, S], Sequence[object]] = lambda asked, strategy: ()
    refined: Callable[[S, int], tuple[S, S] | None] = lambda strategy, bytes: None
    advised: Callable[[Asked], Sequence[object]] = lambda asked: ()
    last: Callable[[Asked, S], Sequence[object]] = _nothing
    never: str = ""

    @property
    def is_left_to_user(self) -> bool:
        """Whether the planner tries it never, or only when told that it may."""
        return bool(self.never) or self.last is not _nothing

    def used(self, strategy: S) -> bool:
        """Whether the strategy has another value than the default."""
        return bool(getattr(strategy, self.name) != getattr(type(strategy), self.name))
