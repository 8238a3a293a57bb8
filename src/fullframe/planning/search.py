"""The order in which strategies are simulated: a few far apart, then always what may yet be fastest."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

from fullframe.errors import StrategyError, UnsupportedOp
from fullframe.planning.candidates import Job, Mesh, border, candidates, mesh_of, saves_more, with_value
from fullframe.planning.estimate import Estimate, Estimator
from fullframe.planning.pool import Refusal, Runner
from fullframe.simulation.prediction import Prediction
from fullframe.simulation.simulate import ReadsNumbers
from fullframe.strategy import TECHNIQUES, Strategy

_PROOFS = 4  # simulations of what will hardly fit, where nothing else does
_LAST = 2  # of the fastest that fit get what takes long to simulate
_BUDGET_SHARE = 0.9  # of what is free that a budget of recompute hands out


@dataclass(kw_only=True)
class Search:
    """What is known so far; `run` fills it.

    known:    what was simulated
    refused:  what cannot be done, and why
    needless: what only saves memory where a strategy without does fit
    left:     what was not simulated, and what it would need
    untried:  of what was not simulated, all that may fit and be fastest, when the time was over; () where the search
              came to its end
    """

    job: Job
    limit_bytes: int
    known: dict[Strategy, Prediction] = field(default_factory=dict)
    refused: dict[Strategy, Refusal] = field(default_factory=dict)
    needless: dict[Strategy, Strategy] = field(default_factory=dict)
    left: dict[Strategy, Estimate] = field(default_factory=dict)
    untried: tuple[Strategy, ...] = ()
    _tried_frugal: bool = field(default=False, init=False)
    _refusals: dict[Strategy, Refusal] = field(default_factory=dict, init=False)  # of what was simulated itself

    def run(
        self, runner: Runner[Strategy], width: int, seconds: float, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Simulate, `width` at a time, until nothing left can be fastest, or for `seconds`."""
        end = time.monotonic() + seconds
        waiting = list(candidates(self.job))
        seeds = chosen = _seeds(waiting)
        while chosen and time.monotonic() < end:
            self._simulate(runner, chosen[:width])
            progress()
            waiting = self._sorted_out(waiting)
            self.left = self.estimates(waiting)
            seeds = [seed for seed in seeds if seed in waiting]  # what the first of them shows may refuse the other
            chosen = seeds or (self._next() if self.known else waiting)
        for more in (self._siblings, self._refined, self._last):
            if time.monotonic() < end:
                self._simulate(runner, more()[: 2 * width])
        self.left = {s: e for s, e in self.left.items() if s not in self.known and s not in self.refused}
        if time.monotonic() >= end:
            self.untried = tuple(self._promising() if self.known else waiting)

    def estimates(self, strategies: Iterable[Strategy]) -> dict[Strategy, Estimate]:
        """Scaled from what is known; none where nothing is."""
        estimator = Estimator(self.known, self.job)
        return {strategy: estimator(strategy) for strategy in strategies} if self.known else {}

    @property
    def fitting(self) -> dict[Strategy, Prediction]:
        """What is known to fit."""
        return {s: p for s, p in self.known.items() if p.device_bytes <= self.limit_bytes}

    def _simulate(self, runner: Runner[Strategy], strategies: Sequence[Strategy]) -> None:
        for strategy, outcome in zip(strategies, runner(strategies), strict=True):
            if isinstance(outcome, Prediction):
                self.known[strategy] = outcome
            elif outcome is not None:
                self.refused[strategy] = self._refusals[strategy] = outcome

    def _sorted_out(self, waiting: Iterable[Strategy]) -> list[Strategy]:
        """What is still to be thought of: neither known nor refused, nor saving what need not be saved."""
        fitting = self.fitting
        kept = []
        for strategy in waiting:
            if strategy in self.known or strategy in self.refused:
                continue
            refusals = self._refusals.items()
            refusal = next((r for other, r in refusals if _holds(r, other, strategy, self.job)), None)
            leaner = next((other for other in fitting if saves_more(strategy, other)), None)
            if refusal is not None:
                self.refused[strategy] = refusal
            elif leaner is not None:
                self.needless[strategy] = leaner
            else:
                kept.append(strategy)
        return kept

    def _next(self) -> list[Strategy]:
        """What is promising. Before it, once, where nothing fits yet, what needs least: then it is soon known whether
        anything fits at all. And replicas alone, while none is known, if they may fit: no split says how fast they are.
        """
        promising = self._promising()
        if all(s.ranks > s.data for s in self.known):
            alone = [s for s, e in self.left.items() if s.ranks == s.data and e.bytes * e.doubt <= self.limit_bytes]
            promising = [*sorted(alone, key=lambda s: self.left[s].seconds * weight(s))[:1], *promising]
        if self.fitting or self._tried_frugal or not promising:
            return promising
        self._tried_frugal = True
        frugal = min(self.left, key=lambda s: self.left[s].bytes)
        return [frugal, *(s for s in promising if s != frugal)]

    def _promising(self) -> list[Strategy]:
        """What may fit and be faster than all that do, fastest first; what needs least, where nothing does."""
        fastest = min((p.step_seconds for p in self.fitting.values()), default=None)
        may_fit = {s: e for s, e in self.left.items() if e.bytes * e.doubt <= self.limit_bytes}
        if fastest is not None:
            may_fit = {s: e for s, e in may_fit.items() if e.seconds * e.doubt < fastest}
        elif not may_fit:
            least = sorted(self.left, key=lambda s: self.left[s].bytes)
            tried = sum(p.device_bytes > self.limit_bytes for p in self.known.values())
            return least if tried < _PROOFS else []
        return sorted(may_fit, key=lambda s: may_fit[s].seconds * weight(s))

    def _siblings(self) -> list[Strategy]:
        """The winner with its replicas split in other ways, shortest cuts first: what no estimate tells apart."""
        fitting = self.fitting
        if not fitting:
            return []
        best = min(fitting, key=lambda s: fitting[s].step_seconds)
        alike = {s for s in self.left if s.parts == best.parts}
        alike = {s for s in alike if replace(s, depth=best.depth, height=best.height, width=best.width) == best}
        return sorted(alike, key=lambda s: border(mesh_of(s), self.job.frame))

    def _refined(self) -> list[Strategy]:
        """For strategies that fit with a technique and not without: what keeps as much as there is room for.

        Where nobody knows whether they fit without, and they may: without.
        """
        found = {}
        for (strategy, prediction), technique in product(self.fitting.items(), TECHNIQUES):
            free = self.limit_bytes - prediction.step_bytes
            budget = int(prediction.bytes.get("activation", 0) + _BUDGET_SHARE * free)
            refined = technique.refined(strategy, budget)
            if refined is None or refined[0] in self.fitting:
                continue
            without, estimate = self.known.get(refined[0]), self.left.get(refined[0])
            if without is None and estimate is not None and estimate.bytes * estimate.doubt <= self.limit_bytes:
                found[refined[0]] = prediction.step_seconds
            elif without is None or budget < without.bytes.get("activation", 0):
                found[refined[1]] = prediction.step_seconds
        return sorted(found, key=lambda strategy: found[strategy])

    def _last(self) -> list[Strategy]:
        """The fastest that fit, with what is tried at the end alone."""
        fitting = self.fitting
        fastest = sorted(fitting, key=lambda s: fitting[s].step_seconds * weight(s))[:_LAST]
        tried = product(fastest, TECHNIQUES)
        found = [with_value(s, technique, value) for s, technique in tried for value in technique.last(self.job, s)]
        return [strategy for strategy in found if strategy is not None and strategy not in self.known]


def weight(strategy: Strategy) -> float:
    """Three hundredths of a step are not worth a technique: predictions are off by more."""
    return 1 + 0.03 * complexity(strategy)


def complexity(strategy: Strategy) -> int:
    """How many techniques a strategy uses, beyond data parallelism; of equals the simpler one is taken."""
    techniques = sum(t.weight for t in TECHNIQUES if t.used(strategy) and not t.never)
    return techniques + sum(_splits(strategy))


def _splits(strategy: Strategy) -> tuple[bool, bool, bool]:
    return strategy.depth > 1, strategy.height > 1, strategy.width > 1


def _holds(refusal: Refusal, refused: Strategy, strategy: Strategy, job: Job) -> bool:
    """Whether what was refused of one strategy is refused of another: an op without a rule in any that splits the dims.

    What reads numbers without a split reads them always. What is wrong with the techniques is so with more of them, at
    any number of ranks and microbatches; what a step raised, where nobody has more: a batch norm of pooled features
    refuses one sample, and takes two.
    """
    if issubclass(refusal.kind, ReadsNumbers) and not any(_splits(refused)):
        return True
    if _splits(refused) != _splits(strategy):
        return False
    if issubclass(refusal.kind, (UnsupportedOp, ReadsNumbers)):
        return True
    if not _does_all_of(strategy, refused):
        return False
    if issubclass(refusal.kind, StrategyError):
        return True
    return all(mine <= its for mine, its in zip(_room(strategy, job), _room(refused, job), strict=True))


def _does_all_of(strategy: Strategy, other: Strategy) -> bool:
    """Whether it uses what the other uses, in numbers of the same kind and with the same optimizer."""
    if (strategy.precision, strategy.optimizer) != (other.precision, other.optimizer):
        return False
    used = zip(_kind(strategy), _kind(other), _kind(Strategy()), strict=True)
    return all(its in (mine, default) for mine, its, default in used)


@lru_cache(maxsize=1 << 16)
def _kind(strategy: Strategy) -> tuple[object, ...]:
    """What it uses, without numbers of replicas and microbatches."""
    values = (getattr(strategy, technique.name) for technique in TECHNIQUES if technique.name != "microbatches")
    return (strategy.data > 1, strategy.microbatches > 1, *values)


def _room(strategy: Strategy, job: Job) -> tuple[float, ...]:
    """Samples of a microbatch, and the part of a frame's slices, rows and columns that a rank has."""
    samples = job.batch_size / strategy.data / strategy.microbatches
    return samples, 1 / strategy.depth, 1 / strategy.height, 1 / strategy.width


def _seeds(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Far apart, on most ranks: the most replicas and the finest split, as simple as can be."""
    simplest = dict[Mesh, Strategy]()
    for strategy in strategies:
        simplest.setdefault(mesh_of(strategy), strategy)
    most = max(s.ranks for s in simplest.values())
    fullest = [s for s in simplest.values() if s.ranks == most]
    return list(dict.fromkeys((max(fullest, key=lambda s: s.data), min(fullest, key=lambda s: s.data))))
