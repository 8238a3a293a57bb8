"""Which samples a replica reads, in which order: its share of each batch of the whole job, which all ranks know."""

import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import index
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from fullframe.errors import CheckpointError, RecipeError
from fullframe.ranks.randomness import mixed_seed, sample_randomness
from fullframe.training.loading.generators import generators_of, seed_generators
from fullframe.wording import described, plural

Place = tuple[int, ...]
"""(epoch, number) of a sample; (epoch, times before, number) where the epoch has it again, with other random draws."""

NEEDS_WEIGHTS = (
    "give the DataLoader drop_last=True, or ShardedLoader weighted=True and multiply each batch's mean loss by "
    "loader.weight"
)


@dataclass(frozen=True)
class Share:
    """What a replica has of each batch of the whole job: as many samples as the others, or one more.

    One more only where the loop is known to weight its means.
    """

    replica: int
    replicas: int
    weighted: bool

    def samples(self, size: int) -> int:
        """How many of a batch of `size` samples it has."""
        each, more = divmod(size, self.replicas)
        return each + (self.replica < more)

    def weight(self, size: int) -> float:
        """What the mean over these is to be multiplied by, so that the replicas' mean is that over the batch."""
        return self.samples(size) * self.replicas / size

    def require_divides(self, batch_size: int) -> None:
        """Raises RecipeError where the replicas cannot share a whole batch evenly."""
        if batch_size % self.replicas:
            raise RecipeError(
                f"batch_size {batch_size} (of the whole job) is no multiple of the {self.replicas} data replicas; "
                f"use {max(batch_size // self.replicas, 1) * self.replicas}"
            )

    def require_even(self, size: int, what: str) -> None:
        """Raises RecipeError, which begins with `what`, where a batch of `size` needs weights."""
        if size % self.replicas and not self.weighted:
            raise RecipeError(
                f"{what}, which {self.replicas} replicas cannot share evenly: the mean of their means would not be "
                f"that of the batch; {NEEDS_WEIGHTS}"
            )


class Standing:
    """A place in the order of all samples: the epoch, and how many of its batches were handed out."""

    def __init__(self, share: Share):
        self.epoch = self.position = 0
        self._share = share

    def advance(self) -> None:
        """One batch more was handed out."""
        self.position += 1

    def state_dict(self) -> dict[str, int]:
        """The position, and what must not change to go on."""
        state = {"epoch": self.epoch, "position": self.position, **self._identity()}
        if self.position and (order := self._checksum()) is not None:
            state["order"] = order
        return state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state`; raises CheckpointError when the order would be another."""
        identity, state = self._identity(), {"sampler": 0, **state}  # which older ones lack
        if lacking := [name for name in ("epoch", "position", *identity) if name not in state]:
            raise CheckpointError(f"this is no state of a ShardedLoader: it lacks {', '.join(lacking)}")
        for name, value in identity.items():
            if state[name] != value:
                raise CheckpointError(
                    f"the checkpoint's loader had {name} {state[name]}, this one has {value}: the order of the samples "
                    f"would change; resume with the same data, {', '.join(identity)}"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._go_on(state.get("order"))

    def agreed(self, made: Iterable[Any], progress: Callable[[int, int], object]) -> Iterable[Any]:
        """The batches that the DataLoader makes, once it is known that all ranks read the same; here by their order.

        `progress` is called as those that are behind have to be read again, with their numbers and how many they are.
        """
        return made

    @property
    def batches(self) -> int | None:
        """How many the epoch has, where that is known."""
        return None

    def _identity(self) -> dict[str, int]:
        """What must not change."""
        raise NotImplementedError

    def _checksum(self) -> int | None:
        """Of the order so far, where it does not follow from these numbers alone."""
        raise NotImplementedError

    def _go_on(self, checksum: int | None) -> None:
        """From a place where the order so far had this `checksum`."""
        raise NotImplementedError


class Order(Standing, Sampler[list[Place]]):
    """This replica's share of every batch, from where it stands: the batch sampler of a DataLoader.

    Raises RecipeError where the loader's order cannot be kept, or its batches cannot be shared out.
    """

    def __init__(self, loader: "DataLoader[Any]", seed: int, share: Share):
        super().__init__(share)
        self._shuffle, self._sampler = _order_of(loader)
        self._samples = len(loader.dataset)  # type: ignore[arg-type]
        self._batch_size = loader.batch_size or 0  # 0: the sampler's batches have sizes of their own
        self._drop_last, self._seed = loader.drop_last, seed
        self._drawn: tuple[int, _Epoch] | None = None  # and of which epoch
        self._begun: int | None = None  # the checksum of the order in which a run that goes on has begun its epoch
        if self._batch_size:
            self._require_spreadable(self._samples if self._sampler is None else len(self._sampler))

    def begin(self) -> None:
        """Have the sampler, where there is one, give this epoch's order, unless its start is behind.

        Raises RecipeError where the sampler cannot be used, or the replicas cannot share a batch evenly;
        CheckpointError where a run would go on in another order.
        """
        if self._sampler is None:  # whose batches have been looked at when this was made
            return
        if not self.position:
            self._begun = None
        if not self.position or self._begun is not None:
            self._drawn = None  # also where it was asked for before the sampler was as it is now
        drawn = self._of_epoch()
        for size in dict.fromkeys(map(drawn.size, range(len(drawn.ends)))):
            self._share.require_even(size, f"epoch {self.epoch} has a batch of {size}")
        begun, self._begun = self._begun, None
        if begun is not None and begun != drawn.checksum():
            raise CheckpointError(
                f"the checkpoint was written in the middle of epoch {self.epoch}, whose samples the sampler now gives "
                "in another order; load what it draws by, weights say, before the ShardedLoader is iterated"
            )

    @property
    def words(self) -> str:
        """What the order of this epoch follows from, beside the place in it."""
        if self._sampler is not None:
            drawn, name = self._of_epoch(), type(self._sampler).__name__
            size = f", {self._batch_size} a batch" if self._batch_size else ""
            return f"{len(drawn.order)} samples as a {name} gives them ({drawn.checksum():08x}){size}"
        order = f"in an order shuffled by seed {self._seed}" if self._shuffle else "in order"
        rest = "" if self._drop_last or not self._samples % self._batch_size else " and the rest"
        return f"{self._samples} samples {order}, {self._batch_size} a batch{rest}"

    def _identity(self) -> dict[str, int]:
        sizes = {"samples": self._samples, "batch_size": self._batch_size}
        sampler = int(self._sampler is not None)
        return {**sizes, "shuffle": int(self._shuffle), "seed": self._seed, "sampler": sampler}

    def _checksum(self) -> int | None:
        if self._sampler is None:
            return None
        return self._of_epoch().checksum() if self._begun is None else self._begun

    def _go_on(self, checksum: int | None) -> None:
        self._begun, self._drawn = checksum, None

    @property
    def batches(self) -> int:
        """How many the epoch has."""
        return len(self)

    def __len__(self) -> int:
        if self._drawn is not None and self._drawn[0] == self.epoch:
            return len(self._drawn[1].ends)
        samples = self._samples if self._sampler is None else len(self._sampler)
        return len(_ends(samples, self._batch_size, self._drop_last)) if self._batch_size else samples

    @property
    def weight(self) -> float:
        """The weight of the batch before `position`, see `ShardedLoader.weight`."""
        return self._share.weight(self._of_epoch().size(self.position - 1)) if self.position else 1.0

    def __iter__(self) -> Iterator[list[Place]]:
        drawn = self._of_epoch()
        for number in range(self.position, len(drawn.ends)):
            batch = drawn.batch(number, self.epoch)
            mine = self._mine(len(batch)) or [-1]  # a replica that has none left steps with another's
            yield [batch[each] for each in mine]

    def _mine(self, size: int) -> range:
        """Which of a batch of `size` samples this replica reads."""
        each, more = divmod(size, self._share.replicas)
        first = self._share.replica * each + min(self._share.replica, more)
        return range(first, first + self._share.samples(size))

    def _of_epoch(self) -> "_Epoch":
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = self.epoch, self._draw()
        return self._drawn[1]

    def _draw(self) -> "_Epoch":
        if self._sampler is not None:
            return _sampled(self._sampler, self._seed, self.epoch, self._batch_size, self._drop_last)
        order: Sequence[int] = range(self._samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, self.epoch))
            order = torch.randperm(self._samples, generator=generator, device="cpu").tolist()
        return _Epoch(order, {}, _ends(self._samples, self._batch_size, self._drop_last))

    def _require_spreadable(self, samples: int) -> None:
        """Raises RecipeError where an epoch of so many samples gives no batch, or one that cannot be shared out."""
        size = self._batch_size
        self._share.require_divides(size)
        if samples < size and (self._drop_last or not samples):
            remedy = f"use a batch_size of at most {samples}" if samples else "does its folder or file list exist?"
            source = "dataset" if self._sampler is None else "sampler"
            raise RecipeError(f"the {source} has {plural(samples, 'sample')}, fewer than one batch of {size}; {remedy}")
        if not self._drop_last:
            rest = samples % size
            self._share.require_even(rest, f"{samples} samples in batches of {size} leave a last batch of {rest}")


class _Epoch(NamedTuple):
    """An epoch's samples in order, how often a row's was there before, where it was, and its batches' ends."""

    order: Sequence[int]
    again: Mapping[int, tuple[int]]
    ends: Sequence[int]

    def size(self, number: int) -> int:
        """Samples of a batch."""
        return self.ends[number] - (self.ends[number - 1] if number else 0)

    def batch(self, number: int, epoch: int) -> list[Place]:
        """A batch of the whole job."""
        end = self.ends[number]
        return [(epoch, *self.again.get(row, ()), self.order[row]) for row in range(end - self.size(number), end)]

    def checksum(self) -> int:
        """Of which samples come when, and in which batch."""
        return zlib.crc32(array("q", (*self.order, -1, *self.ends)).tobytes())


def _ends(samples: int, size: int, drop_last: bool) -> list[int]:
    rest = [] if drop_last or not samples % size else [samples]
    return [*range(size, samples + 1, size), *rest]


def _order_of(loader: "DataLoader[Any]") -> tuple[bool, Any]:
    """Whether `loader` shuffles, and the sampler, or batch sampler, that decides otherwise.

    Raises RecipeError for one that does not say of how many samples an epoch is, or shares them out itself.
    """
    sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if sampler is None:
        raise RecipeError("ShardedLoader shares batches out; make the DataLoader with batch_size=... or batch_sampler")
    name = type(sampler).__name__
    if any(isinstance(each, DistributedSampler) for each in (sampler, getattr(sampler, "sampler", None))):
        raise RecipeError(
            "a DistributedSampler gives every rank other samples, and ranks of one replica must read the same; leave "
            "it out (shuffle=True shuffles): ShardedLoader shares the samples out among the replicas"
        )
    try:
        length = len(sampler)
    except TypeError as error:  # of the sampler of a batch sampler, too
        raise RecipeError(f"{error}, so where an epoch of the {name} ends is not known; give it a __len__") from None
    samples = len(loader.dataset)  # type: ignore[arg-type]
    shuffles = type(sampler) in _random_samplers() and not sampler.replacement
    plain = loader.batch_size is not None and (shuffles or type(sampler) is SequentialSampler)
    if plain and length == samples == len(sampler.data_source):
        return shuffles, None
    return False, sampler


def _random_samplers() -> tuple[type, ...]:
    """The classes of samplers that shuffle: torch's, and torchdata's own where that is in use."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return (RandomSampler,) if torchdata is None else (RandomSampler, torchdata.RandomSampler)


def _sampled(sampler: Any, seed: int, epoch: int, batch_size: int, drop_last: bool) -> _Epoch:
    """What a sampler, or without a batch size a batch sampler, gives for an epoch: the same on every rank.

    Raises RecipeError where that does not follow from the random states, the generators that it holds and its
    `set_epoch`: a run that goes on would read in another order.
    """
    batches, again = (_asked(sampler, seed, epoch, bool(batch_size)) for _ in range(2))
    if batches != again:
        raise RecipeError(
            f"the {type(sampler).__name__} gives another order when it is asked for epoch {epoch} again; let it draw "
            "from torch's, numpy's or Python's random states or from a generator that it holds, and take from "
            "set_epoch(epoch) what changes with the epoch"
        )
    order = [number for batch in batches for number in batch]
    seen: Counter[int] = Counter()
    repeated: dict[int, tuple[int]] = {}
    for row, number in enumerate(order):
        if seen[number]:
            repeated[row] = (seen[number],)
        seen[number] += 1
    ends = _ends(len(order), batch_size, drop_last) if batch_size else [*accumulate(map(len, batches))]
    if not ends:
        name = type(sampler).__name__
        raise RecipeError(f"the {name} gives {plural(len(order), 'sample')} for epoch {epoch}, not one batch")
    return _Epoch(order, repeated, ends)


def _asked(sampler: Any, seed: int, epoch: int, by_sample: bool) -> list[list[int]]:
    """Its numbers, as one batch where it gives them one by one; raises RecipeError for what are none."""
    told: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
    for each in told:
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
    seed_generators(generators_of(sampler), seed, epoch)
    with sample_randomness(seed, epoch):
        most = len(sampler)
        found = list(islice(sampler if by_sample else map(_copied, sampler), most + 1))
    name = type(sampler).__name__
    if len(found) != most:
        gives = "more" if len(found) > most else f"only {len(found)}"
        raise RecipeError(f"the {name} says that an epoch has {most} (its len()), and gives {gives}")
    try:
        batches = [[*map(index, batch)] for batch in ([found] if by_sample else found)]
    except TypeError:
        wanted = "numbers of samples" if by_sample else "lists of numbers of samples"
        wrong = next((one for one in found if by_sample and not hasattr(one, "__index__")), found[0])
        raise RecipeError(f"the {name} gives {described(wrong)} where {wanted} are wanted") from None
    if not by_sample and not all(batches):
        raise RecipeError(f"the {name} gives a batch without samples")
    return batches


def _copied(batch: Any) -> Any:
    """A batch that its sampler may fill anew for the next one."""
    return list(batch) if isinstance(batch, Iterable) else batch
