"""What a strategy can be expected to need, scaled from those that were simulated; it decides what is simulated next."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fullframe.planning.candidates import Job, border, mesh_of
from fullframe.simulation.memory.terms import Terms
from fullframe.simulation.prediction import Prediction
from fullframe.strategy import TECHNIQUES, Strategy
from fullframe.technique import Precision, Rough

_STATE = ("parameter", "gradient", "optimizer")
_HELD = ("activation", "temporary")
_NO_WORK = ("launch", "gradients", "matmul", "convolution", "attention", "memory")  # waiting; what `limits` tell better
# What strategies may have in common that cannot be scaled, most first.
_LIKENESSES = (
    ("digits", "activations", "optimizer", "sharding"),
    ("digits", "activations", "optimizer"),
    ("digits", "activations"),
    ("digits", "optimizer"),
    ("activations",),
    (),
)
_DOUBT = {True: 0.95, False: 0.8}  # whether the two differ only in what can be scaled
_Spread = tuple[bool, bool, bool]


@dataclass(frozen=True)
class Estimate:
    """Bytes of the device and seconds of a step; `state_bytes` are those of parameters, gradients and optimizer.

    It was scaled from `like`; the truth may be as low as `doubt` times it.
    """

    bytes: float
    state_bytes: float
    seconds: float
    like: Strategy
    doubt: float


class Estimator:
    """Scales the most similar of what is known."""

    def __init__(self, known: Mapping[Strategy, Prediction], job: Job):
        self._job, self._known = job, known
        self._alike: dict[tuple[object, ...], list[Strategy]] = {}
        self._host: dict[tuple[Precision, _Spread], float] = {}  # least seconds of a microbatch
        for strategy, prediction in known.items():
            for key in _likenesses(strategy):
                self._alike.setdefault(key, []).append(strategy)
            host, kind = prediction.host_seconds / strategy.microbatches, (strategy.precision, _spread(strategy))
            self._host[kind] = min(host, self._host.get(kind, host))

    def __call__(self, strategy: Strategy) -> Estimate:
        """Raises LookupError where nothing is known."""
        likenesses = _likenesses(strategy)
        found = next((number for number, key in enumerate(likenesses) if key in self._alike), None)
        if found is None:
            raise LookupError("nothing was simulated")
        like = min(self._alike[likenesses[found]], key=lambda other: self._distance(strategy, other))
        ratio = self._host_ratio(_spread(strategy), _spread(like))
        close = found == 0 and ratio is not None
        host = (ratio or 1.0) * strategy.microbatches / like.microbatches
        return _scaled(strategy, like, self._known[like], self._job, host, close)

    def _host_ratio(self, mine: _Spread, its: _Spread) -> float | None:
        """By what the host has to do for replicas, stages and, most of all, split tensors; None where that is unknown.

        Of one precision: casts are work, too.
        """
        both = ((self._host.get((p, mine)), self._host.get((p, its))) for p in self._job.precisions)
        return 1.0 if mine == its else next((a / b for a, b in both if a and b), None)

    def _distance(self, a: Strategy, b: Strategy) -> tuple[float, ...]:
        mine, its = self._job.of(a), self._job.of(b)
        return (
            (a.parts == 1) != (b.parts == 1),
            abs(mine.held - its.held) / max(mine.held, its.held),
            sum(abs(m - n) for m, n in zip(mesh_of(a), mesh_of(b), strict=True)),
        )


def _spread(strategy: Strategy) -> _Spread:
    """Whether there are several ranks, parts of the model, parts of a frame."""
    return strategy.ranks > 1, strategy.ranks > strategy.data * strategy.parts, strategy.parts > 1


def _likenesses(strategy: Strategy) -> tuple[tuple[object, ...], ...]:
    """What the strategy has of each of `_LIKENESSES`; equal only to the same of another strategy."""
    has = dict[str, list[object]]()
    for technique in TECHNIQUES:
        value = technique.alike(strategy) if technique.alike else getattr(strategy, technique.name)
        has.setdefault(technique.bears_on, []).append(value)
    return tuple(
        (number, *(value for kind in kinds for value in has[kind])) for number, kinds in enumerate(_LIKENESSES)
    )


def _scaled(strategy: Strategy, like: Strategy, predicted: Prediction, job: Job, host: float, close: bool) -> Estimate:
    mine, its, rough, before = job.of(strategy), job.of(like), _rough(strategy), _rough(like)
    state = sum(predicted.bytes.get(kind, 0) * _share(kind, strategy) / _share(kind, like) for kind in _STATE)
    held = float(sum(predicted.bytes.get(kind, 0) for kind in _HELD))
    held *= mine.held / its.held * rough.kept / before.kept * rough.width / before.width
    counted = sum(predicted.bytes.get(kind, 0) for kind in (*_STATE, *_HELD))
    beside = predicted.step_bytes - counted + _nccl(strategy, like, predicted, job) - predicted.terms.get("nccl", 0)
    evaluation = 0.0 if predicted.evaluation is None else float(predicted.evaluation.device_bytes)
    evaluation *= min(1.0, like.parts / strategy.parts) * min(1.0, rough.width / before.width)  # at least
    return Estimate(
        bytes=max(state + held + beside, evaluation),
        state_bytes=state,
        seconds=_seconds(strategy, like, predicted, job, host),
        like=like,
        doubt=_DOUBT[close],
    )


def _nccl(strategy: Strategy, like: Strategy, predicted: Prediction, job: Job) -> float:
    """As its communicators take, by that of all ranks; at least that one's."""
    of_job = Terms(job.cluster.device, strategy.precision).nccl_bytes
    mine, its = of_job([strategy.ranks]), of_job([like.ranks])
    return predicted.terms.get("nccl", 0) * mine / its if its else mine


def _seconds(strategy: Strategy, like: Strategy, predicted: Prediction, job: Job, host: float) -> float:
    """Work by the frames of a rank, the exchange by the length of the cuts; the host's is `host` times what it was.

    What the matrix units limit goes by their rate; the shortest kernels take as long, however little they work on.
    """
    rough, before = _rough(strategy), _rough(like)
    again = rough.work / before.work
    work = job.of(strategy).work / job.of(like).work * again
    rate = job.cluster.device.rate
    cut, cut_before = (border(mesh_of(s), job.frame) for s in (strategy, like))
    scale = {
        "arithmetic": work * rate(like.precision) / rate(strategy.precision),
        "bytes": work * rough.width / before.width,
        "kernel": again * strategy.microbatches / like.microbatches,
        "layout": work * rough.width / before.width * (strategy.precision != "fp32"),
        "optimizer": _share("optimizer", strategy) / _share("optimizer", like),
        "exchange": cut / cut_before * like.data / strategy.data if cut_before else 0.0,
    }
    known = {kind: seconds for kind, seconds in predicted.seconds.items() if kind not in _NO_WORK}
    known.update(predicted.limits)
    busy = sum(seconds * scale.get(kind, work) for kind, seconds in known.items())
    waiting = predicted.seconds.get("gradients", 0.0) * (_traffic(strategy) / _traffic(like) if _traffic(like) else 1.0)
    waiting += 0.0 if predicted.bound_by_host else predicted.seconds.get("launch", 0.0) * host
    waiting -= max(busy - sum(known.values()), 0.0)  # more work fills it
    return busy + max(waiting, predicted.host_seconds * host - busy, 0.0)


@lru_cache(maxsize=1 << 16)
def _rough(strategy: Strategy) -> Rough:
    """The factors of all techniques together; of what two of them keep the device holds what the stronger one does."""
    used = [technique.rough(strategy) for technique in TECHNIQUES if technique.used(strategy)]
    return Rough(
        kept=min((rough.kept for rough in used), default=1.0),
        width=prod(rough.width for rough in used),
        work=prod(rough.work for rough in used),
        traffic=prod(rough.traffic for rough in used),
    )


def _share(kind: str, strategy: Strategy) -> float:
    """The part of the model's state of that kind that one rank keeps."""
    sharded = any(kind in technique.shards and technique.used(strategy) for technique in TECHNIQUES)
    return 1 / strategy.ranks if sharded else 1.0


def _traffic(strategy: Strategy) -> float:
    """What a rank sends of gradients (and parameters), in units of the model."""
    return 2 * (strategy.ranks - 1) / strategy.ranks * _rough(strategy).traffic
