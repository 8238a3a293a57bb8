"""All findings of a run, each kind once, the worst first, without those that follow from another."""

from collections.abc import Iterable, Mapping, Sequence

from fullframe.doctor.finding import Finding, Kind, Severity
from fullframe.doctor.judgement.learning import judged_learning
from fullframe.doctor.judgement.progress import judged_progress
from fullframe.doctor.judgement.samples import judged_samples, judged_waiting
from fullframe.doctor.judgement.scaling import judged_scaling
from fullframe.doctor.judgement.weights import judged_weights
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Notes

# Where the first is found, the others follow from it, or cannot be told from it.
_CONSEQUENCES: dict[str, tuple[Kind, ...]] = {
    kinds.NO_JOB.code: (kinds.SAME_SAMPLES, kinds.UNREAD_SAMPLES, kinds.DIFFERENT_STEPS),
    kinds.GRAPH_GROWS.code: (kinds.GRAPH_KEPT,),
    kinds.NO_GRADIENT.code: (kinds.UNUSED, kinds.NOTHING_SEEN, kinds.ZERO_GRADIENT),
    kinds.SCALE_FALLS.code: (kinds.NOTHING_SEEN, kinds.NOT_FINITE),
    kinds.NOT_FINITE.code: (kinds.NOTHING_SEEN, kinds.NOT_REPEATABLE, kinds.NEVER_CHANGES),
    kinds.SCALER_UPDATES.code: (kinds.NOTHING_SEEN,),
    kinds.DATA_NOT_REPEATABLE.code: (kinds.NOT_REPEATABLE,),
    kinds.FROZEN_IN_OPTIMIZER.code: (kinds.NEVER_CHANGES,),
    kinds.FAILED.code: (kinds.NOTHING_SEEN, kinds.DIFFERENT_STEPS),
}
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def judge(
    notes: Sequence[Notes], stacks: Mapping[int, str] | None = None, *, at_full_size: bool = True
) -> list[Finding]:
    """What the notes of all ranks show; `stacks` says where ranks stood that had to be ended."""
    return ordered(
        (
            *judged_weights(notes),
            *judged_samples(notes),
            *judged_learning(notes),
            *judged_progress(notes, stacks),
            *judged_scaling(notes),
            *(judged_waiting(notes) if at_full_size else ()),
        )
    )


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Each kind once, the worst first, without consequences."""
    by_code: dict[str, Finding] = {}
    for finding in findings:
        by_code.setdefault(finding.code, finding)
    follow = {kind.code for code in by_code for kind in _CONSEQUENCES.get(code, ())}
    kept = [finding for code, finding in by_code.items() if code not in follow]
    return by_severity(kept)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first."""
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.severity), finding.code))
