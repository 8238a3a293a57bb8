"""What every thread about several GPUs asks first, answered from the notes of the ranks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullframe.doctor.finding import Finding
from fullframe.doctor.judgement.samples import trained_on, waited_of
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Backward, BatchRead, Job, Loader, Memory, Notes, Update, Weights
from fullframe.observation.units import seconds_text
from fullframe.wording import GIB, plural, some

_MEASURES = {"allocated_bytes": "allocated", "reserved_bytes": "reserved", "process_bytes": "of the process"}


class Answer(NamedTuple):
    """One question, and what was seen."""

    question: str
    text: str
    fine: bool  # no finding speaks against it


def checklist(
    notes: Sequence[Notes], findings: Sequence[Finding], predicted: str = "", again: str = "", at_full_size: bool = True
) -> list[Answer]:
    """The answers; `predicted`: what memory was predicted, `again`: the command of the simplified example."""
    codes = {finding.code for finding in findings}
    rows = (
        ("framework", _framework(notes), (kinds.NO_JOB, kinds.SAME_DEVICE, kinds.FAILED)),
        ("one model on all ranks", _model(notes), (kinds.STARTED_APART, kinds.DRIFTED, kinds.RATES_DIFFER)),
        ("gradient synchronization", _gradients(notes), (kinds.GRADIENTS_DIFFER, kinds.NO_JOB)),
        ("data parallelism", _data(notes), (kinds.SAME_SAMPLES, kinds.UNREAD_SAMPLES, kinds.REPLICA_READS_APART)),
        ("loader", _waiting(notes, at_full_size), (kinds.STARVES,)),
        ("memory", "; ".join(filter(None, (_memory(notes), predicted))), (kinds.MEMORY_OFF, kinds.GRAPH_KEPT)),
        ("a simplified example", again, ()),
    )
    return [Answer(name, text, not codes & {kind.code for kind in against}) for name, text, against in rows if text]


def _first(notes: Sequence[Notes]) -> Notes | None:
    return next((rank for rank in notes if rank.one(Job) is not None), None)


def _framework(notes: Sequence[Notes]) -> str:
    jobs = [job for rank in notes for job in rank.of(Job)]
    if not jobs:
        return ""
    job, devices = jobs[0], sorted({each.device for each in jobs})
    using = some(job.frameworks, 5) or "no data parallel wrapper"
    group = f"{plural(job.ranks, 'rank')} in the process group ({job.backend or 'there is none'})"
    return f"torch {job.torch}, {plural(job.started, 'process')} started, {group}, on {some(devices)}; {using}"


def _model(notes: Sequence[Notes]) -> str:
    rank = _first(notes)
    weights = None if rank is None else rank.one(Weights)
    if weights is None:
        return ""
    steps = max(len(rank.of(Update)) for rank in notes)
    frozen = f", {len(weights.frozen)} frozen" if weights.frozen else ""
    return (
        f"{plural(len(weights.parameters), 'parameter')} ({weights.elements:,} numbers{frozen}), compared over "
        f"{plural(len(notes), 'rank')} before the first step and after each of {plural(steps, 'step')}"
    )


def _gradients(notes: Sequence[Notes]) -> str:
    rank = _first(notes)
    if rank is None or len(notes) == 1:
        return ""
    updates, passes = rank.of(Update), rank.of(Backward)
    compared = len(updates[0].gradients) if updates else 0
    return (
        f"{plural(compared, 'gradient')} compared to the bit over {plural(len(notes), 'rank')} in "
        f"{plural(len(updates), 'step')} of {plural(len(passes), 'backward')}"
    )


def _data(notes: Sequence[Notes]) -> str:
    lines = list(_loaders(notes))
    replicas = len({rank.replica for rank in notes})
    return f"{plural(replicas, 'replica')}; {'; '.join(lines)}" if lines else ""


def _loaders(notes: Sequence[Notes]) -> Iterator[str]:
    rank = _first(notes) or notes[0]
    for number in sorted(trained_on(rank)):
        read: list[tuple[int, int]] = []
        samples: dict[int, int | None] = {}  # by listing: each replica's dataset may have its own part
        of_stream = 0
        for one in {one.replica: one for one in reversed(notes)}.values():
            loader = next((event for event in one.of(Loader) if event.loader == number), None)
            if loader is not None:
                samples[loader.listing], sampler = loader.samples, loader.sampler
                batches = [batch for batch in one.of(BatchRead) if (batch.loader, batch.epoch) == (number, 1)]
                read += [(loader.listing, index) for batch in batches for index in batch.indices or ()]
                of_stream += sum(batch.samples or 0 for batch in batches if batch.indices is None)
        of = "" if None in samples.values() else f" of {sum(filter(None, samples.values())):,}"
        if of_stream:
            yield f"{plural(of_stream, 'sample')} of a stream read ({sampler})"
        else:
            yield f"{plural(len(set(read)), 'sample')}{of} read, {len(read) - len(set(read))} twice ({sampler})"


def _waiting(notes: Sequence[Notes], at_full_size: bool) -> str:
    waits = [(waiting, whole) for steps, waiting, whole in map(waited_of, notes) if steps]
    if not waits:
        return ""
    said = "a rank waits {} of a step of {}".format(*map(seconds_text, max(waits)))
    return said if at_full_size else f"{said}, which is judged at full size alone"


def _memory(notes: Sequence[Notes]) -> str:
    held: dict[str, float] = {}
    for rank in notes:
        for event in rank.of(Memory):
            for name, size in event.measured.items():
                held[name] = max(held.get(name, 0.0), size)
    return ", ".join(f"{size / GIB:.3g} GiB {_MEASURES.get(name, name)} measured" for name, size in held.items())
