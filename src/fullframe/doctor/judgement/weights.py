"""Whether all ranks train one model: its weights, gradients, learning rates and devices, compared."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fullframe.doctor.finding import Finding
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Backward, Event, Failure, Job, Notes, Sketch, Update, Weights
from fullframe.wording import numbered, plural, some

_ROUNDING = 1e-6
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
ByRank = Mapping[int, Mapping[str, Sketch]]


def judged_weights(notes: Sequence[Notes]) -> Iterator[Finding]:
    """Findings about what must be equal on all ranks."""
    if len(notes) < 2:
        return
    jobs = {rank.rank: job for rank in notes if (job := rank.one(Job)) is not None}
    if jobs and all(job.started > 1 and job.ranks == 1 for job in jobs.values()):
        yield kinds.NO_JOB.found(
            f"{len(notes)} processes were started, and none has a process group after its first step",
            evidence="torch.distributed.is_initialized() is False",
        )
        return
    yield from _devices(jobs)
    started_apart = _different({r.rank: found.parameters for r in notes if (found := r.one(Weights)) is not None})
    if started_apart:
        yield kinds.STARTED_APART.found(_sentence("weights", started_apart, "before the first step"))
    if any(_UNFINISHED in failure.text for rank in notes for failure in rank.of(Failure)):
        return  # unused parameters keep DDP from averaging
    gradients = list(_gradients(notes))
    rates = list(_rates(notes))
    yield from gradients[:1]
    yield from rates[:1]
    if not (started_apart or gradients or rates):
        yield from list(_drift(notes))[:1]


def updates_by_step(notes: Sequence[Notes]) -> dict[tuple[int, int], dict[int, Update]]:
    """(optimizer, number) -> rank -> the update, of those that all ranks have taken."""
    found: dict[tuple[int, int], dict[int, Update]] = defaultdict(dict)
    for rank in notes:
        for update in rank.of(Update):
            found[update.optimizer, update.number][rank.rank] = update
    return {step: by_rank for step, by_rank in found.items() if len(by_rank) == len(notes)}


def _gradients(notes: Sequence[Notes]) -> Iterator[Finding]:
    for (_, number), by_rank in updates_by_step(notes).items():
        different = _different({rank: update.gradients for rank, update in by_rank.items()})
        if different:
            every = set[str]().union(*(update.gradients for update in by_rank.values()))
            about = f"of {plural(len(every), 'parameter')} in step {number}"
            yield kinds.GRADIENTS_DIFFER.found(
                _sentence("gradients", different, about), evidence=_why(notes, number), fix=_remedy(notes, number)
            )


def _why(notes: Sequence[Notes], number: int) -> str:
    """What explains that gradients were not averaged; "" where nothing does."""
    loose = {name for rank in notes if (job := rank.one(Job)) is not None for name in job.unsynchronized}
    held_back = [rank.rank for rank in notes if not _synchronized(rank.events, number)]
    if held_back:
        return f"the last backward before the step ran under no_sync() on {numbered('rank', held_back)}"
    return f"no data parallel wrapper was called, only {some(sorted(loose))}" if loose else ""


def _remedy(notes: Sequence[Notes], number: int) -> str:
    if any(not _synchronized(rank.events, number) for rank in notes):
        return "leave no_sync() before the last backward of a step"
    return kinds.GRADIENTS_DIFFER.fix


def _synchronized(events: Sequence[Event], number: int) -> bool:
    last = True
    for event in events:
        if isinstance(event, Backward):
            last = event.synchronizes
        if isinstance(event, Update) and event.number == number:
            return last
    return True


def _rates(notes: Sequence[Notes]) -> Iterator[Finding]:
    for (_, number), by_rank in updates_by_step(notes).items():
        found = {rank: update.rates for rank, update in by_rank.items()}
        if len(set(found.values())) > 1:
            odd = _odd_ranks(found)
            rates = ", ".join(f"{found[rank]} on rank {rank}" for rank in (min(set(found) - odd), min(odd)))
            yield kinds.RATES_DIFFER.found(f"in step {number} the learning rates are {rates}")


def _drift(notes: Sequence[Notes]) -> Iterator[Finding]:
    for (_, number), by_rank in updates_by_step(notes).items():
        different = _different({rank: update.parameters for rank, update in by_rank.items()})
        if different:
            yield kinds.DRIFTED.found(
                _sentence("weights", different, f"after step {number}"),
                evidence="the weights before the first step, all gradients and learning rates up to here are equal",
            )


def _devices(jobs: Mapping[int, Job]) -> Iterator[Finding]:
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, job in jobs.items():
        if job.device_id:
            places[job.host, job.device_id].append(rank)
    for ranks in places.values():
        if len(ranks) > 1:
            device = jobs[ranks[0]].device
            yield kinds.SAME_DEVICE.found(f"{numbered('rank', ranks)} all compute on {device}")


def _different(by_rank: ByRank) -> dict[str, dict[int, Sketch]]:
    """Name -> rank -> sketch, of the tensors that ranks hold in common and that are not equal on all of them."""
    found: dict[str, dict[int, Sketch]] = {}
    for name in dict.fromkeys(name for held in by_rank.values() for name in held):
        sketches = {rank: held[name] for rank, held in by_rank.items() if name in held}
        if len({str((sketch.checksum, sketch.sample)) for sketch in sketches.values()}) > 1:  # text: NaN equals NaN
            found[name] = sketches
    return found


def _sentence(what: str, different: Mapping[str, Mapping[int, Sketch]], about: str) -> str:
    name, sketches = max(different.items(), key=lambda item: _distance(item[1]))
    odd = _odd_ranks(sketches)
    usual = min(set(sketches) - odd, default=min(odd))
    other = min(odd)
    far = _distance(sketches)
    how = ", by rounding alone" if far < _ROUNDING else f" (relative difference {far:.2g})"
    return (
        f"{what} of {len(different)} tensors differ {about}; {name} has norm {sketches[usual].norm:.6g} on rank "
        f"{usual} and {sketches[other].norm:.6g} on rank {other}{how}"
    )


def _odd_ranks(values: Mapping[int, object]) -> set[int]:
    common, _ = Counter(map(str, values.values())).most_common(1)[0]
    return {rank for rank, value in values.items() if str(value) != common}


def _distance(sketches: Mapping[int, Sketch]) -> float:
    """The largest difference between ranks in the sampled elements, relative to the largest of them."""
    samples = [sketch.sample for sketch in sketches.values()]
    largest = max((abs(value) for sample in samples for value in sample), default=0.0)
    spread = max((max(column) - min(column) for column in zip(*samples, strict=False)), default=0.0)
    return spread / largest if largest > 0 else 0.0
