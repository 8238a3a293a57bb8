"""How the program ended: with an error, waiting, on ranks that took different numbers of steps, or well."""

from collections.abc import Iterator, Mapping, Sequence

from fullframe.doctor.finding import Finding, Kind
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Backward, End, Failure, Notes, Scaling, Update
from fullframe.wording import numbered, plural

# What torch says, and the kind of which it is a sign.
_SIGNS: tuple[tuple[str, Kind], ...] = (
    ("Expected to have finished reduction in the prior iteration", kinds.UNUSED),
    ("does not require grad and does not have a grad_fn", kinds.NO_GRADIENT),
    ("unscale_() has already been called", kinds.SCALER_UPDATES),
    ("step() has already been called since the last update()", kinds.SCALER_UPDATES),
    ("unscale_() is being called after step()", kinds.SCALER_UPDATES),
    ("No inf checks were recorded", kinds.SCALER_UPDATES),
    ("Expected more than 1 value per channel when training", kinds.FEW_VALUES),
    ("Trying to backward through the graph a second time", kinds.GRAPH_GROWS),
    ("none of the parameters that are trained takes part", kinds.NO_GRADIENT),
    ("of one replica read different samples", kinds.REPLICA_READS_APART),
)


def judged_progress(notes: Sequence[Notes], stacks: Mapping[int, str] | None = None) -> Iterator[Finding]:
    """Findings about the end; `stacks`: where the ranks stood that had to be ended."""
    failures = {rank.rank: failed for rank in notes if (failed := rank.one(Failure)) is not None}
    causes = {rank: failed for rank, failed in failures.items() if not failed.consequence} or failures
    through = [rank.rank for rank in notes if _by_itself(rank)]
    if through and failures and all(failure.consequence for failure in failures.values()):
        done = ", ".join(f"rank {rank.rank}: {plural(len(rank.of(Update)), 'step')}" for rank in notes)
        yield kinds.DIFFERENT_STEPS.found(
            f"{numbered('rank', failures)} lost {numbered('rank', through)}, whose program is through ({done})"
        )
        return
    if causes:
        rank = min(causes)
        yield _failed(causes[rank], sorted(causes), len(notes))
        return
    steps = {rank.rank: len(rank.of(Update)) for rank in notes}
    waiting = [rank.rank for rank in notes if rank.one(End) is None]
    ended = [rank for rank in steps if rank not in waiting]
    if waiting:
        kind = kinds.DIFFERENT_STEPS if through else kinds.HANGS
        done = ", ".join(f"rank {rank}: {plural(count, 'step')}" for rank, count in steps.items())
        where = "; ".join(f"rank {rank} at {text}" for rank, text in (stacks or {}).items() if rank in waiting)
        meanwhile = f" while {numbered('rank', ended)} {'is' if len(ended) == 1 else 'are'} through" if ended else ""
        yield kind.found(f"{numbered('rank', waiting)} waited without end{meanwhile} ({done})", evidence=where)
    elif len(set(steps.values())) > 1:
        done = ", ".join(f"{count} on rank {rank}" for rank, count in steps.items())
        yield kinds.DIFFERENT_STEPS.found(f"the ranks took different numbers of steps: {done}")
    elif not any(steps.values()) and not any(rank.of(Scaling) for rank in notes):
        passes = sum(len(rank.of(Backward)) for rank in notes)
        yield kinds.NOTHING_SEEN.found(
            f"the program ended after {plural(passes, 'backward pass')} and no step of a torch optimizer"
        )


def _by_itself(rank: Notes) -> bool:
    end = rank.one(End)
    return end is not None and end.reason == "through"


def _failed(failure: Failure, ranks: Sequence[int], of: int) -> Finding:
    text = failure.text.strip()
    kind = next((kind for sign, kind in _SIGNS if sign in text), kinds.FAILED)
    where = "" if len(ranks) == of else f" on {numbered('rank', ranks)}"
    first = text.splitlines()[0] if text else ""
    more = {"path": failure.path, "line": failure.line} if failure.path else {}
    return kind.found(f"{failure.kind}{where}: {first}", evidence=failure.trace, **more)
