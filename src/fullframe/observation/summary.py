"""What one wants to know of a run at a glance: how fast, how full, who is slow, and what needs a look."""

import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fullframe.observation.out_of_memory.account import PAGE
from fullframe.observation.out_of_memory.words import happened
from fullframe.observation.run_files import ObservedStep, RunFiles
from fullframe.observation.units import duration_text, seconds_text, size_text
from fullframe.processes.cores import apart
from fullframe.wording import plural

_RECENT = 50  # observed steps, or recorded ones, that "now" means
_WAITING = ("exchange", "all_reduce")  # where a rank waits for a slower one
_QUIET_SECONDS = 120.0
_DATA_SHARE, _CORE_SHARE, _SLOW_SHARE, _FULL_SHARE, _SLOWER_SHARE = 0.1, 0.1, 0.1, 0.95, 0.3
_BYTES_OFF, _SECONDS_OFF, _OTHERS_SHARE = 0.1, 0.25, 0.01
_SAID_IN_LOG = ("warning:", "started again", "out of memory", "left out")
_SAID_ELSEWHERE = ("ran out of memory in ", " out of memory: ")  # a finding of its own

Level = Literal["bad", "warn", "info"]


class Finding(NamedTuple):
    """Something about a run that a person should know; `remedy` may be empty."""

    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class RankNow(ObservedStep):
    """One rank's last steps: median seconds, the newest memory, and when the last was."""

    rank: int

    @property
    def busy_seconds(self) -> float:
        """What it works itself; in exchanges and all-reduces a rank waits for the others too."""
        return sum(value for kind, value in self.seconds.items() if kind not in _WAITING)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in a few numbers; None where they cannot be known.

    `slowest` is the rank that the others wait for, with its share of work above the median rank's, where that is
    more than a tenth. `peak` is the observed step that held most bytes, of all ranks.
    """

    step: int
    steps: int | None
    loss: float | None
    first_loss: float | None
    best_loss: float | None
    step_seconds: float | None
    images_per_second: float | None
    seconds_left: float | None
    lasted_seconds: float | None
    skipped: int
    ranks: tuple[RankNow, ...]
    slowest: tuple[int, float] | None
    peak: tuple[int, ObservedStep] | None
    findings: tuple[Finding, ...]

    @property
    def limit_bytes(self) -> int | None:
        """What a rank may hold, of the one that may hold most."""
        return max((rank.limit_bytes for rank in self.ranks if rank.limit_bytes), default=None)

    @property
    def level(self) -> Literal["good", "bad", "warn", "info"]:
        """The worst of the findings."""
        levels = {finding.level for finding in self.findings}
        return "bad" if "bad" in levels else "warn" if "warn" in levels else "good"


def summarize(run: RunFiles, now: float | None = None) -> Summary:
    """The run at a glance; `now` is the time since 1970, this moment's unless given."""
    now = time.time() if now is None else now
    ranks = tuple(_rank_now(rank, rows) for rank, rows in run.observed.items())
    _, losses = run.table.known("loss")
    seconds = _step_seconds(run, ranks)
    left = run.steps - run.step if run.steps is not None and run.state == "running" else None
    pace = _pace(run) or seconds
    summary = Summary(
        step=run.step,
        steps=run.steps,
        loss=run.table.last("loss"),
        first_loss=losses[0] if losses else None,
        best_loss=min(losses, default=None),
        step_seconds=seconds,
        images_per_second=run.known.batch_size / seconds if run.known.batch_size and seconds else None,
        seconds_left=left * pace if left is not None and pace else None,
        lasted_seconds=_lasted(run, now),
        skipped=int(sum(run.table.known("skipped")[1])),
        ranks=ranks,
        slowest=slowest_of(ranks),
        peak=_peak(run),
        findings=(),
    )
    order = {"bad": 0, "warn": 1, "info": 2}
    return replace(summary, findings=tuple(sorted(_findings(run, summary, now), key=lambda f: order[f.level])))


def slowest_of(ranks: Sequence[RankNow]) -> tuple[int, float] | None:
    """The rank with most work of its own, where it is more than a tenth above the median."""
    busy = {rank.rank: rank.busy_seconds for rank in ranks if rank.seconds}
    if len(busy) < 2:
        return None
    most, usual = max(busy, key=lambda rank: busy[rank]), statistics.median_low(busy.values())
    share = busy[most] / usual - 1 if usual else 0.0
    return (most, share) if share > _SLOW_SHARE else None


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a fortieth of all on either side; ends have fewer neighbours."""
    given = np.array(values, dtype=float)
    known = np.isfinite(given)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, given, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(given))
    # As many before as after, or the mean would lag.
    side = np.minimum(max(len(given) // 40, 2), np.minimum(places, places[::-1]))
    first, stop = places - side, places + side + 1
    count = counts[stop] - counts[first]
    means: list[float] = np.where(count > 0, (sums[stop] - sums[first]) / np.maximum(count, 1), np.nan).tolist()
    return means


def _rank_now(rank: int, rows: Sequence[ObservedStep]) -> RankNow:
    recent = rows[-_RECENT:]
    kinds = dict.fromkeys(kind for row in recent for kind in row.seconds)

    def usual(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def newest(name: str) -> Any:
        return next((found for row in reversed(rows) if (found := getattr(row, name))), None)

    def latest(name: str) -> Any:  # the driver is asked once a second: of a few rows, those that know
        return next((found for row in reversed(recent) if (found := getattr(row, name)) is not None), None)

    return RankNow(
        rank=rank,
        step=rows[-1].step,
        time=rows[-1].time,
        seconds={kind: usual(row.seconds.get(kind) for row in recent) or 0.0 for kind in kinds},
        peak_bytes=newest("peak_bytes"),
        bytes=newest("bytes") or {},
        modules=newest("modules") or {},
        reserved_bytes=newest("reserved_bytes"),
        limit_bytes=newest("limit_bytes"),
        host_bytes=newest("host_bytes"),
        gpu_percent=latest("gpu_percent"),
        others_bytes=latest("others_bytes"),
        without_core_seconds=usual(row.without_core_seconds for row in recent),
    )


def _step_seconds(run: RunFiles, ranks: Sequence[RankNow]) -> float | None:
    """Of a usual step now, reading its batch included where that was observed."""
    _, known = run.table.known("step_seconds")
    if not known:
        whole = [sum(rank.seconds.values()) for rank in ranks if rank.seconds]
        return max(whole, default=None)
    return statistics.median(known[-_RECENT:]) + max((rank.seconds.get("data", 0.0) for rank in ranks), default=0.0)


def _pace(run: RunFiles) -> float | None:
    """Seconds a step by the clock, evaluations included, over the steps observed last since the run was started."""
    started = run.known.started
    begun_at = started.timestamp() if started is not None else 0.0
    for rows in run.observed.values():
        timed = [(row.step, row.time) for row in rows[-_RECENT:] if row.time is not None and row.time >= begun_at]
        if len(timed) > 1:
            (step, begun), (last, ended) = timed[0], timed[-1]
            return (ended - begun) / (last - step) if ended > begun else None
    return None


def _lasted(run: RunFiles, now: float) -> float | None:
    facts = run.known
    if facts.started is None:
        return None
    end = now if run.state == "running" else run.written
    if facts.ended is not None:
        end = facts.ended.timestamp()
    return None if end is None else max(end - facts.started.timestamp(), 0.0)  # a clock may have been put back


def _peak(run: RunFiles) -> tuple[int, ObservedStep] | None:
    rows = [(rank, row) for rank, found in run.observed.items() for row in found if row.peak_bytes]
    # Of equal peaks one that says what it is made of.
    return max(rows, key=lambda pair: (pair[1].peak_bytes or 0, bool(pair[1].bytes)), default=None)


def _findings(run: RunFiles, summary: Summary, now: float) -> Iterator[Finding]:
    yield from _of_state(run, now)
    yield from _of_loss(run, summary)
    for leak in run.leaks:
        yield Finding("bad", f"leak: {leak_sentence(leak)}")
    yield from _of_memory(summary)
    yield from _of_others(summary)
    yield from _of_time(run, summary)
    yield from _of_prediction(run, summary)
    if run.known.restarts:
        times = "once" if run.known.restarts == 1 else f"{run.known.restarts} times"
        yield Finding("warn", f"the ranks were started again {times}", "the messages say why")
    known = [str(leak.get("text")) for leak in run.leaks]
    said = [line for line in run.log if any(sign in line for sign in _SAID_IN_LOG) and not line.endswith(tuple(known))]
    said = [line for line in said if not any(sign in line for sign in _SAID_ELSEWHERE)]
    yield from (Finding("info", line) for line in dict.fromkeys(said[-5:]))
    if run.unreadable:
        yield Finding("info", f"{plural(run.unreadable, 'line')} of the run's files could not be read and left out")


def _of_state(run: RunFiles, now: float) -> Iterator[Finding]:
    facts = run.known
    reason = f": {' '.join(facts.reason.split())}" if facts.reason else ""  # of an error, which may have lines
    command = shlex.join(["fullframe", "train", facts.recipe or "RECIPE", "--run-dir", str(run.path), "--resume"])
    go_on = f"go on with: {command}, and the options it was started with"
    if run.state == "died":
        yield Finding("bad", f"the run died after step {run.step}: process {facts.pid} is gone and said nothing", go_on)
    elif run.state == "failed":
        yield Finding("bad", f"the run failed after step {run.step}{reason}", go_on)
    elif run.state == "stopped":
        yield Finding("info", f"the run was stopped after step {run.step}{reason}", go_on)
    elif run.state == "finished" and reason:
        yield Finding("info", f"the run finished after step {run.step}{reason}")
    elif run.state == "running" and run.written is not None and now - run.written > _QUIET_SECONDS:
        quiet = duration_text(now - run.written)
        yield Finding("warn", f"nothing was written for {quiet}", "a step may take that long; or look into stacks/")
    elif run.state == "unknown":
        known = "run.json does not say how it stands" if (run.path / "run.json").exists() else "there is no run.json"
        yield Finding("info", f"{known}, so it is not known whether the run goes on")
    lost = run.out_of_memory
    if lost is not None:
        survived = run.state != "failed" and (run.goes_on or run.step >= lost.step)
        went_on = f"; {run.goes_on}" if run.goes_on else ""
        remedy = lost.ways[0].command if lost.ways else f"see {run.path / PAGE}" if (run.path / PAGE).exists() else ""
        yield Finding("warn" if survived else "bad", f"{happened(lost)}{went_on}", remedy)


def _of_loss(run: RunFiles, summary: Summary) -> Iterator[Finding]:
    column = run.table.column("loss")
    if summary.skipped:
        share = summary.skipped / len(run.table)
        level: Level = "bad" if share > 0.1 else "warn"
        steps = plural(summary.skipped, "step")
        yield Finding(
            level,
            f"{steps} of {len(run.table)} skipped: the loss or a gradient was not finite",
            "a lower learning rate, or clip_norm",
        )
    elif len(column) and column[-1] != column[-1]:
        yield Finding("bad", "the last loss is not finite")
    known = run.table.known("loss")[1]
    if len(known) >= 20:
        part = max(len(known) // 10, 5)
        first, last = statistics.median(known[:part]), statistics.median(known[-part:])
        if last > first:
            yield Finding(
                "warn",
                f"the loss is higher than at the start: {last:.4g} after {first:.4g}",
                "a lower learning rate, or clip_norm",
            )


def _of_memory(summary: Summary) -> Iterator[Finding]:
    full = []
    for rank in summary.ranks:
        held = max(rank.peak_bytes or 0, rank.reserved_bytes or 0)
        if rank.limit_bytes and held > _FULL_SHARE * rank.limit_bytes:
            full.append((held / rank.limit_bytes, held, rank))
    if full:
        _, held, rank = max(full, key=lambda each: each[0])
        others = f", and {len(full) - 1} more nearly as much" if len(full) > 1 else ""
        text = f"rank {rank.rank} holds {size_text(held)} of {size_text(rank.limit_bytes or 0)}{others}: little is left"
        yield Finding("warn", text, "more microbatches, recompute, or more ranks")


def _of_others(summary: Summary) -> Iterator[Finding]:
    """Memory of a rank's own GPU that other processes have."""
    for rank in summary.ranks:
        if rank.limit_bytes and (rank.others_bytes or 0) > _OTHERS_SHARE * rank.limit_bytes:
            size = size_text(rank.others_bytes or 0)
            yield Finding("warn", f"other processes hold {size} of rank {rank.rank}'s GPU", "fullframe watch gpus")


def _of_time(run: RunFiles, summary: Summary) -> Iterator[Finding]:

    def longest(wait: Callable[[ObservedStep], float]) -> tuple[float, int]:
        """The largest share of a usual step that a rank waits in this way, and the rank."""
        shares = []
        for rank, rows in run.observed.items():
            of_steps = [wait(row) / whole for row in rows[-_RECENT:] if (whole := sum(row.seconds.values()))]
            shares += [(statistics.median(of_steps), rank)] if of_steps else []
        return max(shares, key=lambda each: each[0], default=(0.0, 0))

    share, number = longest(lambda row: row.seconds.get("data", 0.0))
    if share > _DATA_SHARE:
        text = f"rank {number} waits for data {share:.0%} of a step"
        yield Finding("warn", text, "more workers in the recipe, or a reader that decodes only its slice")
    share, number = longest(lambda row: row.without_core_seconds or 0.0)
    if share > _CORE_SHARE:
        text = f"rank {number} waits for a core {share:.0%} of a step: others have them"
        remedy = "fewer workers in the recipe, less beside the run, or more cores a rank (Slurm: --cpus-per-task)"
        yield Finding("warn", text, remedy)
    if summary.slowest is not None:
        rank, share = summary.slowest
        yield Finding("warn", f"rank {rank} works {share:.0%} longer on a step than the others, who wait for it")
    known = run.table.known("step_seconds")[1]
    if len(known) >= 100:
        part = len(known) // 10
        early, late = statistics.median(known[part : 2 * part]), statistics.median(known[-part:])
        if late > (1 + _SLOWER_SHARE) * early:
            yield Finding("warn", f"steps became slower: {late:.3g} s after {early:.3g} s")


def _of_prediction(run: RunFiles, summary: Summary) -> Iterator[Finding]:
    for one in compared(run, summary):
        if not one.holds:
            predicted, measured = one.text(one.predicted), one.text(one.measured)
            said = f"{one.name}: {predicted} predicted, {measured} measured ({one.share:+.0%})"
            yield Finding("info", f"{said} and {one.text(one.beside)} more without a core" if one.beside else said)


class Compared(NamedTuple):
    """Something that was predicted and measured; `text` writes either for people."""

    name: str
    predicted: float
    measured: float
    most: float  # of `share` either way: what is further off is worth saying
    text: Callable[[float], str]
    beside: float = 0.0  # measured too, and not counted: it is not the run's doing

    @property
    def share(self) -> float:
        """How far off the measured number is, of the predicted one."""
        return self.measured / self.predicted - 1

    @property
    def holds(self) -> bool:
        """Whether the prediction was good enough."""
        return abs(self.share) <= self.most


def compared(run: RunFiles, summary: Summary) -> Iterator[Compared]:
    """What was both predicted and measured."""
    prediction = run.prediction
    if prediction is None:
        return
    if prediction.peak_bytes and summary.peak is not None and summary.peak[1].peak_bytes:
        yield Compared("peak memory", prediction.peak_bytes, summary.peak[1].peak_bytes, _BYTES_OFF, size_text)
    _, known = run.table.known("step_seconds")
    if prediction.step_seconds and known:
        first = next((rank for rank in summary.ranks if rank.rank == 0), None)  # whose seconds they are
        stood = first.without_core_seconds or 0.0 if first is not None else 0.0
        step, stood = apart(statistics.median(known[-_RECENT:]), stood)
        yield Compared("step time", prediction.step_seconds, step, _SECONDS_OFF, seconds_text, stood)


def leak_sentence(leak: Mapping[str, Any]) -> str:
    """What a leak's record says, with its place."""
    text = str(leak.get("text") or leak.get("leak") or "").removeprefix("leak: ")
    place = f"{leak['path']}:{leak.get('line', '?')}" if leak.get("path") else ""
    return text if not place or place in text else f"{text} ({place})"
