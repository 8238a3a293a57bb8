"""Axes: which range, which ticks, which points are worth drawing. Numbers only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SPAN = 8.0  # positive values that differ by more than this factor are drawn on a logarithmic axis
_OUTLIER = 3.0  # a largest value this much above the 98th in a hundred is cut off
_LABELS = 5
_MOST = 700  # points of a line


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A range of values and where in it a value lies; `logarithmic` needs 0 < low."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; outside of the range, below 0 or above 1."""
        if self.logarithmic:
            if value <= 0:
                return -1.0
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        if not self.logarithmic:
            return linear_ticks(self.low, self.high)
        found = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factor in (1, 2, 5)
        ]
        inside = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
        if len(inside) > _LABELS + 2:
            inside = [value for value in inside if math.log10(value) % 1 < 1e-9 or math.log10(value) % 1 > 1 - 1e-9]
        return inside[:: math.ceil(len(inside) / (_LABELS + 2)) or 1]


def linear_ticks(low: float, high: float, count: int = _LABELS) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten between low and high."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def scale_for(values: Sequence[float], *, from_zero: bool = False, may_be_logarithmic: bool = False) -> Scale:
    """The axis for these values, of which none need be finite."""
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return Scale(low=0.0, high=1.0)
    low, high = known[0], known[-1]
    if may_be_logarithmic and low > 0 and high / low > _SPAN:
        return Scale(low=low * 0.9, high=high * 1.1, logarithmic=True)
    usual = known[round(0.98 * (len(known) - 1))]
    if from_zero and low >= 0:
        high = 1.3 * usual if high > _OUTLIER * usual > 0 else 1.08 * high
        return Scale(low=0.0, high=high or 1.0)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low=low - margin, high=high + margin)


def step_scale(first: int, last: int) -> Scale:
    """The axis for steps."""
    return Scale(low=float(first), high=float(last) if last > first else first + 1.0)


def thinned(values: Sequence[float]) -> list[int]:
    """The indices of at most `_MOST` values that draw the same line: of each run of them the least and the largest."""
    known = [index for index, value in enumerate(values) if math.isfinite(value)]
    if len(known) <= _MOST:
        return known
    kept, runs = {known[0], known[-1]}, _MOST // 2 - 1
    for run in range(runs):
        part = known[run * len(known) // runs : (run + 1) * len(known) // runs]
        kept |= {min(part, key=lambda i: values[i]), max(part, key=lambda i: values[i])}
    return sorted(kept)


def tick_text(value: float) -> str:
    """A tick's label, as short as it can be."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"
