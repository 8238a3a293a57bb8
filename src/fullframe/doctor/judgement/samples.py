"""Whether the replicas share out the samples: disjoint, covering, in a new order in each epoch, and in time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median

from fullframe.doctor.finding import Finding
from fullframe.doctor.probes import kinds
from fullframe.doctor.probes.notes import Backward, BatchRead, Loader, Notes, Update
from fullframe.wording import plural

_STARVING = 0.3  # of a step's time
_WORTH_SECONDS = 0.005  # a step
_OVERLAP = 0.5  # of what one replica reads; with replacement some are read by others, too


def judged_samples(notes: Sequence[Notes]) -> Iterator[Finding]:
    """Findings about what the ranks read."""
    replicas = _first_of_replicas(notes)
    numbers = sorted({loader for rank in notes for loader in trained_on(rank)})
    for number in numbers:
        yield from _of_replica(notes, number)
        yield from _order(notes, number)
        if len(replicas) > 1:
            yield from _shared(replicas, number)
            yield from _sizes(replicas, number)


def judged_waiting(notes: Sequence[Notes]) -> Iterator[Finding]:
    """Whether a rank waits for its loader; of a run at full size, for a small one computes too little."""
    for rank in notes:
        steps, waiting, whole = waited_of(rank)
        if steps > 1 and waiting > _STARVING * whole and waiting > _WORTH_SECONDS:
            workers = max(event.workers for event in rank.of(Loader) if event.loader in trained_on(rank))
            yield kinds.STARVES.found(
                f"rank {rank.rank} waits {1e3 * waiting:.3g} ms of a step of {1e3 * whole:.3g} ms for "
                f"its next batch: {100 * (waiting / whole):.0f} %",
                evidence=f"{plural(workers, 'loader worker')} a rank, {plural(steps, 'step')}",
            )
            return


def waited_of(rank: Notes) -> tuple[int, float, float]:
    """In how many steps a DataLoader was seen, how long the rank waits for its batches, and a step takes: medians."""
    trains, waited, seconds = trained_on(rank), [0.0], [0.0]
    first = next((update.optimizer for update in rank.of(Update)), 0)
    for event in rank.events:
        if isinstance(event, BatchRead) and event.loader in trains and event.number > 1:
            waited[-1] += event.waited
        elif isinstance(event, Update):
            seconds[-1] += event.seconds
            if event.optimizer == first:  # others step in between
                waited.append(0.0)
                seconds.append(0.0)
    steps = len(waited) - 2  # without the first, and what came after the last
    is_seen = trains and steps > 0  # what a loop reads otherwise, nobody has timed
    return (steps, median(waited[1:-1]), median(seconds[1:-1])) if is_seen else (0, 0.0, 0.0)


def trained_on(rank: Notes) -> set[int]:
    """Numbers of the loaders whose batches a backward pass follows."""
    return set(_first_epochs(rank))


def _first_epochs(rank: Notes) -> dict[int, int]:
    """By the loaders' numbers, in which of their iterations a backward pass first followed a batch."""
    found: dict[int, int] = {}
    last: BatchRead | None = None
    for event in rank.events:
        if isinstance(event, BatchRead):
            last = event
        elif isinstance(event, Backward) and last is not None:
            found.setdefault(last.loader, last.epoch)
    train = {event.loader for event in rank.of(Loader) if event.trains}
    return {number: epoch for number, epoch in found.items() if number in train}


def _first_of_replicas(notes: Sequence[Notes]) -> list[Notes]:
    """One rank of each replica."""
    found: dict[int, Notes] = {}
    for rank in notes:
        found.setdefault(rank.replica, rank)
    return list(found.values())


def _loader(rank: Notes, number: int) -> Loader | None:
    return next((event for event in rank.of(Loader) if (event.loader, event.epoch) == (number, 1)), None)


def _batches(rank: Notes, number: int) -> list[BatchRead]:
    return [event for event in rank.of(BatchRead) if (event.loader, event.epoch) == (number, 1)]


def _shared(replicas: Sequence[Notes], number: int) -> Iterator[Finding]:
    loaders = {rank.rank: found for rank in replicas if (found := _loader(rank, number)) is not None}
    if len(loaders) < len(replicas) or len({loader.listing for loader in loaders.values()}) > 1:
        return  # a number is another sample where each rank's dataset lists its own part
    sampler = next(iter(loaders.values())).sampler
    planned = {rank: loader.planned for rank, loader in loaders.items()}
    sets = {rank: set(found) for rank, found in planned.items() if found is not None}
    if len(sets) == len(replicas):
        twice = sum(map(len, sets.values())) - len(set().union(*sets.values()))
        if twice >= len(replicas):  # fewer are a sampler's padding
            yield kinds.SAME_SAMPLES.found(
                f"{plural(twice, 'sample')} of an epoch are read by more than one of {len(replicas)} replicas",
                evidence=f"the sampler is a {sampler}, which gives each rank {len(next(iter(sets.values())))} of "
                f"{next(iter(loaders.values())).samples} samples",
            )
        yield from _uncovered(loaders, set[int]().union(*sets.values()), len(replicas))
        return
    yield from _read_alike(replicas, number, sampler)


def _uncovered(loaders: Mapping[int, Loader], read: set[int], replicas: int) -> Iterator[Finding]:
    samples = next(iter(loaders.values())).samples or 0
    missing = samples - len(read)
    if missing >= replicas:  # fewer are what drop_last leaves
        yield kinds.UNREAD_SAMPLES.found(
            f"{missing} of {samples} samples are in no rank's share of an epoch",
            evidence=f"{replicas} replicas, the sampler is a {next(iter(loaders.values())).sampler}",
        )


def _read_alike(replicas: Sequence[Notes], number: int, sampler: str) -> Iterator[Finding]:
    """Of a sampler that cannot be asked: by the batches that were read."""
    batches = {rank.rank: _batches(rank, number) for rank in replicas}
    count = min(map(len, batches.values()))
    if not count:
        return
    read = {rank: [batch.indices for batch in found[:count]] for rank, found in batches.items()}
    if all(indices is not None for found in read.values() for indices in found):
        flat = [[n for indices in found for n in indices or ()] for found in read.values()]
        sets = [*map(set, flat)]
        if any(len(one & other) > _OVERLAP * min(len(one), len(other)) for one, other in combinations(sets, 2)):
            twice = sum(map(len, sets)) - len(set[int]().union(*sets))
            same = len(set(map(tuple, flat))) == 1
            yield kinds.SAME_SAMPLES.found(
                f"{plural(twice, 'sample')} were read by more than one of {len(replicas)} replicas in their first "
                f"{plural(count, 'batch')}" + (", in the same order" if same else ""),
                evidence=f"the sampler is a {sampler}",
            )
        return
    contents = {rank: tuple(batch.contents for batch in found[:count]) for rank, found in batches.items()}
    if len(set(contents.values())) == 1 and len(set(next(iter(contents.values())))) > 1:
        yield kinds.SAME_SAMPLES.found(
            f"the first {plural(count, 'batch')} are equal to the bit on all {len(replicas)} replicas",
            evidence=f"a {sampler} gives no numbers of samples that could be shared out",
        )


def _order(notes: Sequence[Notes], number: int) -> Iterator[Finding]:
    for rank in notes:
        begun = _first_epochs(rank).get(number, 1)  # before, a batch was looked at
        epochs = [each for each in rank.of(Loader) if each.loader == number and each.epoch >= begun and each.trains]
        if len(epochs) < 2 or epochs[0].sampler != "DistributedSampler":
            continue
        first, second, *_ = epochs
        planned = first.planned
        if planned is not None and planned == second.planned and list(planned) != sorted(planned):
            yield kinds.SAME_ORDER.found(
                f"the second epoch reads the same {len(planned)} samples in the same order as the first",
                evidence=f"the first three are {', '.join(map(str, planned[:3]))} in both, on rank {rank.rank}",
            )
            return


def _of_replica(notes: Sequence[Notes], number: int) -> Iterator[Finding]:
    replicas: dict[int, list[Notes]] = defaultdict(list)
    for rank in notes:
        replicas[rank.replica].append(rank)
    for replica, ranks in replicas.items():
        for together in zip(*(_batches(rank, number) for rank in ranks), strict=False):
            if len({batch.indices for batch in together}) > 1:
                read = "; ".join(f"rank {r.rank}: {b.indices}" for r, b in zip(ranks, together, strict=True))
                yield kinds.REPLICA_READS_APART.found(
                    f"batch {together[0].number} of replica {replica} is not the same on its ranks: {read}"
                )
                return


def _sizes(replicas: Sequence[Notes], number: int) -> Iterator[Finding]:
    for together in zip(*(_batches(rank, number) for rank in replicas), strict=False):
        sizes = [batch.samples for batch in together]
        if len(set(sizes)) > 1:
            yield kinds.SIZES_DIFFER.found(
                f"batch {together[0].number} has {', '.join(map(str, sizes))} samples on the replicas"
            )
            return
