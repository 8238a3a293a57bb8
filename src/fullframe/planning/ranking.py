"""Plans: every strategy that was thought of, the best first, each with the reason why it wins or loses."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fullframe.planning.estimate import Estimate
from fullframe.planning.search import Search, weight
from fullframe.simulation.prediction import Prediction
from fullframe.strategy import Strategy, describe
from fullframe.training.evaluation import NEEDS_LESS
from fullframe.wording import amount


class Why(Enum):
    """The kind of a plan's reason; the value is said of all plans of that kind together, "" where each says its own."""

    OWN = ""  # simulated, refused, or not tried
    STATE = "the model's own state would not fit"
    TOO_LARGE = "would need more memory than there is"
    NEEDLESS = "would save memory that there is enough of"
    SLOWER = "would be slower than the fastest"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One strategy: what was predicted of it, whether it fits, and why it is where it is in the list.

    why:          the kind of `reason`
    prediction:   None where it was not simulated; `reason` says why
    devices:      what it is for, as `plan` was asked
    memory_bytes: what one device offers, less what is kept free
    batch_size:   samples of one step of the whole job
    """

    strategy: Strategy
    prediction: Prediction | None
    fits: bool
    reason: str
    devices: str
    memory_bytes: int
    batch_size: int
    why: Why = Why.OWN

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of the device's memory; negative where it does not fit, None where it was not simulated."""
        return None if self.prediction is None else self.memory_bytes - self.prediction.device_bytes

    @property
    def samples_per_second(self) -> float | None:
        """Of the whole job; None where it was not simulated."""
        return None if self.prediction is None else self.batch_size / self.prediction.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "strategy": dataclasses.asdict(self.strategy),
            "fits": self.fits,
            "reason": self.reason,
            "devices": self.devices,
            "memory_bytes": self.memory_bytes,
            "headroom_bytes": self.headroom_bytes,
            "batch_size": self.batch_size,
            "samples_per_second": self.samples_per_second,
            "prediction": None if self.prediction is None else self.prediction.as_dict(),
        }


def plans_of(search: Search) -> list[Plan]:
    """Those that fit, fastest first; those that do not, least bytes first; what was not simulated; what was refused.

    Of two that fit the simpler one is first where the other is not faster by 3 % for each technique that it has more.
    """
    fitting = search.fitting
    order = sorted(fitting, key=lambda s: (fitting[s].step_seconds * weight(s), fitting[s].device_bytes))
    too_large = sorted((s for s in search.known if s not in fitting), key=lambda s: search.known[s].device_bytes)
    left = sorted(search.left, key=lambda s: search.left[s].seconds)
    fastest = min(order, key=lambda s: fitting[s].step_seconds, default=None)
    seconds = None if fastest is None else fitting[fastest].step_seconds
    reasons: dict[Strategy, tuple[Why, str]] = {}
    for strategy in order:
        slower = f"{fitting[strategy].step_seconds / (seconds or 1.0):.2f} times the fastest's step"
        first = f"the fastest of {len(fitting)} that fit, of {len(search.known)} simulated"
        said = first if strategy == fastest else slower
        simpler = ", and simpler" if strategy == order[0] != fastest else ""
        host = ", bound by the host" if fitting[strategy].bound_by_host else ""
        reasons[strategy] = Why.OWN, said + simpler + host
    for strategy in too_large:
        reasons[strategy] = Why.OWN, _too_large(search.known[strategy], search.limit_bytes)
    for strategy in left:
        reasons[strategy] = _passed_over(search.left[strategy], search.limit_bytes, seconds)
    for strategy, leaner in search.needless.items():
        reasons[strategy] = Why.NEEDLESS, f"saves memory that there is enough of: {describe(leaner)} fits"
    reasons |= {strategy: (Why.OWN, str(refusal)) for strategy, refusal in search.refused.items()}
    reasons |= {strategy: (Why.OWN, "not tried: the time was over") for strategy in search.untried}
    return [
        Plan(
            strategy=strategy,
            prediction=search.known.get(strategy),
            fits=strategy in fitting,
            why=why,
            reason=reason,
            devices=search.job.cluster.name,
            memory_bytes=search.limit_bytes,
            batch_size=search.job.batch_size,
        )
        for strategy, (why, reason) in reasons.items()
    ]


def _too_large(prediction: Prediction, limit: int) -> str:
    if prediction.step_bytes <= limit:
        missing = amount(prediction.device_bytes - limit)
        return f"its steps fit, its evaluation needs {missing} more than there is. {NEEDS_LESS}"
    most = max(prediction.bytes, key=lambda kind: prediction.bytes[kind], default="")
    return (
        f"needs {amount(prediction.device_bytes)}, {amount(prediction.device_bytes - limit)} more than there is; "
        f"{amount(prediction.bytes.get(most, 0))} of it {most}"
    )


def _passed_over(estimate: Estimate, limit: int, fastest: float | None) -> tuple[Why, str]:
    if estimate.state_bytes > limit:
        return Why.STATE, f"parameters, gradients and optimizer state alone need {amount(estimate.state_bytes)}"
    like = f"scaled from: {describe(estimate.like)}"
    if fastest is None or estimate.bytes * estimate.doubt > limit:
        return Why.TOO_LARGE, f"needs about {amount(estimate.bytes)}, {like}"
    return Why.SLOWER, f"about {estimate.seconds / fastest:.2f} times the fastest's step, {like}"


def winner(plans: Sequence[Plan]) -> Plan | None:
    """The first, if it fits."""
    return plans[0] if plans and plans[0].fits else None


def by_category(prediction: Prediction) -> Mapping[str, int]:
    """Bytes of the device: the tensors at the peak by category, the allocator's unused part, what lies beside it."""
    unused = prediction.reserved_bytes - prediction.peak_bytes
    beside = prediction.step_bytes - prediction.reserved_bytes
    return {**prediction.bytes, "unused by the allocator": unused, "context": beside}
