"""Which samples a replica reads, in which order: its share of each batch of the whole job, which all ranks know."""

import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


class Order(Sampler[list[Place]]):
    """This replica's share of every batch, from where it stands: the batch sampler of a DataLoader.

    Raises RecipeError where the loader's order cannot be kept, or its batches cannot be shared out.
    """

    def __init__(self, loader: "DataLoader[Any]", seed: int, replica: int, replicas: int, weighted: bool):
        self._shuffle, self._sampler = _order_of(loader)
        self._samples = len(loader.dataset)  # type: ignore[arg-type]
        self._batch_size = loader.batch_size or 0  # 0: the sampler's batches have sizes of their own
        self._drop_last, self._seed = loader.drop_last, seed
        self._replica, self._replicas, self._weighted = replica, replicas, weighted
        self.epoch = self.position = 0
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
        for size in map(drawn.size, range(len(drawn.ends))):
            if size % self._replicas:
                self._require_weights(f"epoch {self.epoch} has a batch of {size}")
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

    def state_dict(self) -> dict[str, int]:
        """The position, and what must not change to go on."""
        state = {"epoch": self.epoch, "position": self.position, **self._identity()}
        if self._sampler is not None and self.position:
            state["order"] = self._of_epoch().checksum() if self._begun is None else self._begun
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
                    "would change; resume with the same data, batch_size, shuffle, sampler and seed"
                )
        self.epoch, self.position, self._begun = state["epoch"], state["position"], state.get("order")
        self._drawn = None

    def _identity(self) -> dict[str, int]:
        sizes = {"samples": self._samples, "batch_size": self._batch_size}
        sampler = int(self._sampler is not None)
        return {**sizes, "shuffle": int(self._shuffle), "seed": self._seed, "sampler": sampler}

    def __len__(self) -> int:
        if self._drawn is not None and self._drawn[0] == self.epoch:
            return len(self._drawn[1].ends)
        samples = self._samples if self._sampler is None else len(self._sampler)
        return len(_ends(samples, self._batch_size, self._drop_last)) if self._batch_size else samples

    @property
    def weight(self) -> float:
        """The weight of the batch before `position`, see `ShardedLoader.weight`."""
        if not self.position:
            return 1.0
        size = self._of_epoch().size(self.position - 1)
        return len(self._mine(size)) * self._replicas / size

    def __iter__(self) -> Iterator[list[Place]]:
        drawn = self._of_epoch()
        for number in range(self.position, len(drawn.ends)):
            batch = drawn.batch(number, self.epoch)
            mine = self._mine(len(batch)) or [-1]  # a replica that has none left steps with another's
            yield [batch[each] for each in mine]

    def _mine(self, size: int) -> range:
        """Which of a batch of `size` samples this replica reads: as many as the others, or one more."""
        each, more = divmod(size, self._replicas)
        first = self._replica * each + min(self._replica, more)
        return range(first, first + each + (self._replica < more))

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
        size, replicas = self._batch_size, self._replicas
        if size % replicas:
            raise RecipeError(
                f"batch_size {size} (of the whole job) is no multiple of the {replicas} data replicas; "
                f"use {max(size // replicas, 1) * replicas}"
            )
        if samples < size and (self._drop_last or not samples):
            remedy = f"use a batch_size of at most {samples}" if samples else "does its folder or file list exist?"
            source = "dataset" if self._sampler is None else "sampler"
            raise RecipeError(f"the {source} has {plural(samples, 'sample')}, fewer than one batch of {size}; {remedy}")
        if not self._drop_last and samples % size % replicas:
            self._require_weights(f"{samples} samples in batches of {size} leave a last batch of {samples % size}")

    def _require_weights(self, what: str) -> None:
        if not self._weighted:
            raise RecipeError(
                f"{what}, which {self._replicas} replicas cannot share evenly: the mean of their means would not be "
                "that of the batch; give the DataLoader drop_last=True, or ShardedLoader weighted=True and multiply "
                "each batch's mean loss by loader.weight"
            )


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
