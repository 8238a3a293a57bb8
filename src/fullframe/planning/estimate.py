"""What a strategy can be expected to need, scaled from those that were simulated; it decides what is simulated next."""

from collections.abc import Mapping
from dataclasses import dataclass

from fullframe.planning.candidates import Job, border
from fullframe.simulation.prediction import Prediction
from fullframe.strategy import Strategy

_STATE = ("parameter", "gradient", "optimizer")
_HELD = ("activation", "temporary")
# Of the activations that are held without: rough, and only used until one strategy with it was simulated.
_ROUGH = {(True, False): 0.3, (False, True): 0.5, (True, True): 0.3}  # (recompute, offload)
_HALVES = 0.6  # of an activation's bytes, where autocast leaves some in fp32
_DOUBT = {True: 0.95, False: 0.8}  # whether the two differ only in what can be scaled


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
        for strategy in known:
            for key in _likenesses(strategy):
                self._alike.setdefault(key, []).append(strategy)

    def __call__(self, strategy: Strategy) -> Estimate:
        """Raises LookupError where nothing is known."""
        likenesses = _likenesses(strategy)
        found = next((number for number, key in enumerate(likenesses) if key in self._alike), None)
        if found is None:
            raise LookupError("nothing was simulated")
        like = min(self._alike[likenesses[found]], key=lambda other: self._distance(strategy, other))
        return _scaled(strategy, like, self._known[like], self._job, close=found == 0)

    def _distance(self, a: Strategy, b: Strategy) -> tuple[float, ...]:
        mine, its = self._job.of(a), self._job.of(b)
        return (
            (a.height * a.width == 1) != (b.height * b.width == 1),
            abs(mine.held - its.held) / max(mine.held, its.held),
            abs(a.height - b.height) + abs(a.width - b.width) + abs(a.data - b.data),
        )


def _likenesses(strategy: Strategy) -> tuple[tuple[object, ...], ...]:
    """What strategies have in common that cannot be scaled, most first."""
    precision = strategy.precision
    saving = (strategy.recompute != "none", strategy.offload)
    state = (strategy.optimizer, strategy.shard_parameters, strategy.shard_optimizer)
    return (
        (precision, saving, state),
        (precision, saving, strategy.optimizer),
        (precision, saving),
        (precision, strategy.optimizer),
        (saving,),
        (),
    )


def _scaled(strategy: Strategy, like: Strategy, predicted: Prediction, job: Job, close: bool) -> Estimate:
    mine, its = job.of(strategy), job.of(like)
    state = sum(predicted.bytes.get(kind, 0) * _share(kind, strategy) / _share(kind, like) for kind in _STATE)
    held = float(sum(predicted.bytes.get(kind, 0) for kind in _HELD))
    held *= mine.held / its.held * _technique(strategy) / _technique(like) * _width(strategy) / _width(like)
    counted = sum(predicted.bytes.get(kind, 0) for kind in (*_STATE, *_HELD))
    return Estimate(
        bytes=state + held + predicted.device_bytes - counted,
        state_bytes=state,
        seconds=_seconds(strategy, like, predicted, job),
        like=like,
        doubt=_DOUBT[close],
    )


def _seconds(strategy: Strategy, like: Strategy, predicted: Prediction, job: Job) -> float:
    """Work by the frames of a rank, launches by the microbatches, the exchange by the length of the cuts."""
    work = job.of(strategy).work / job.of(like).work * _recomputed_work(strategy) / _recomputed_work(like)
    rate = job.cluster.device.rate
    by_rate = work * rate(like.precision) / rate(strategy.precision)
    cut, cut_before = (border((s.data, s.height, s.width), job.rows, job.columns) for s in (strategy, like))
    scale = {
        "matmul": by_rate,
        "convolution": by_rate,
        "attention": by_rate,
        "memory": work * _width(strategy) / _width(like),
        "optimizer": _share("optimizer", strategy) / _share("optimizer", like),
        "launch": strategy.microbatches / like.microbatches,
        "exchange": cut / cut_before * like.data / strategy.data if cut_before else 0.0,
        "gradients": _traffic(strategy) / _traffic(like) if _traffic(like) else 1.0,
    }
    return sum(seconds * scale.get(kind, work) for kind, seconds in predicted.seconds.items())


def _technique(strategy: Strategy) -> float:
    return _ROUGH.get((strategy.recompute != "none", strategy.offload), 1.0)


def _width(strategy: Strategy) -> float:
    return _HALVES if strategy.precision in ("bf16", "fp16") else 1.0


def _recomputed_work(strategy: Strategy) -> float:
    """Forward is a third of the work; recompute does it once more."""
    return 4 / 3 if strategy.recompute != "none" else 1.0


def _share(kind: str, strategy: Strategy) -> float:
    """The part of the model's state of that kind that one rank keeps."""
    sharded = strategy.shard_parameters or (kind == "optimizer" and strategy.shard_optimizer)
    return 1 / strategy.ranks if sharded else 1.0


def _traffic(strategy: Strategy) -> float:
    """What a rank sends of gradients (and parameters), in units of the model."""
    share = 2 * (strategy.ranks - 1) / strategy.ranks
    return share * (1 + 0.5 * strategy.microbatches if strategy.shard_parameters else 1)
