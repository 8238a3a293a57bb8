"""What `init` makes and `shutdown` ends: this process's place among the ranks, and the engines of its process sets."""

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from fullframe.horovod.engine import Engine
from fullframe.horovod.exceptions import HorovodInternalError, RequestError
from fullframe.horovod.membership import membership
from fullframe.horovod.objects import pickled, unpickled
from fullframe.horovod.process_sets import ProcessSet, global_process_set
from fullframe.horovod.rendezvous import Place, connect, find_place
from fullframe.horovod.request import Request
from fullframe.horovod.settings import Settings
from fullframe.horovod.submission import Submission
from fullframe.horovod.timeline import Timeline
from fullframe.processes.orphans import die_with_launcher

_TIMELINE = "HOROVOD_TIMELINE"
_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_LEAVE_SECONDS = 2.0


class World:
    """The ranks of the job as long as they are initialized. `prefix` sets this time apart from others in the store."""

    def __init__(self, place: Place, store: Any, prefix: str, dynamic: bool, check: Callable[[], None]):
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.dynamic, self._check = dynamic, check
        self.settings, self.timeline = Settings.from_environment(), Timeline()
        self.sets: dict[int, ProcessSet] = {0: global_process_set}
        self._store, self._next_id = dist.PrefixStore(prefix, store), 1
        self._engines: dict[int, Engine] = {}
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()
        global_process_set.ranks = list(range(self.size))
        self._start(global_process_set, 0)
        host = (socket.gethostname(), self.local_rank, self.local_size)
        self._hosts: list[tuple[str, int, int]]
        try:
            self._hosts = self.all_gather_object("hosts", host)
        except BaseException:
            self.close()
            raise
        if self.rank == 0 and os.environ.get(_TIMELINE):
            marks = os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") == "1"
            self.timeline.start(Path(os.environ[_TIMELINE]), marks)

    @property
    def cross_rank(self) -> int:
        """This rank's number among those with the same local rank."""
        return [r for r, host in enumerate(self._hosts) if host[1] == self.local_rank].index(self.rank)

    @property
    def cross_size(self) -> int:
        """How many ranks have this local rank: nodes, where each has as many."""
        return sum(host[1] == self.local_rank for host in self._hosts)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len({host[2] for host in self._hosts}) == 1

    def engine(self, process_set: ProcessSet) -> Engine:
        """That of a process set that this rank belongs to; ValueError for others."""
        number = process_set.process_set_id
        if number is None or number not in self.sets:
            raise ValueError(f"{process_set} is not initialized; give it to init() or add_process_set()")
        if number not in self._engines:
            raise ValueError(f"rank {self.rank} is not in {process_set}; only its ranks may use it")
        return self._engines[number]

    def number(self, process_set: ProcessSet) -> int:
        """The next number of a collective without a name."""
        with self._lock:
            of = process_set.process_set_id or 0
            self._numbers[of] = self._numbers.get(of, -1) + 1
            return self._numbers[of]

    def restart_numbers(self) -> None:
        """Count the collectives of all ranks without a name from the beginning; all ranks do."""
        with self._lock:
            self._numbers[0] = -1

    def add(self, process_set: ProcessSet) -> None:
        """Make a process set usable; all ranks call this alike."""
        self.check(process_set)
        asked = self.all_gather_object("process sets", process_set.ranks)
        if any(ranks != process_set.ranks for ranks in asked):
            raise RequestError(f"the ranks add different process sets: {asked}; all must call add_process_set alike")
        self.sets[self._next_id] = process_set
        self._start(process_set, self._next_id)
        self._next_id += 1

    def check(self, process_set: ProcessSet) -> None:
        """Raise ValueError unless it can be added."""
        ranks = process_set.ranks
        if process_set.process_set_id is not None:
            raise ValueError(f"{process_set} is initialized already")
        if not ranks or ranks[0] < 0 or ranks[-1] >= self.size or len(set(ranks)) != len(ranks):
            raise ValueError(f"a process set needs different ranks of 0 to {self.size - 1}, got {ranks}")
        if any(known.ranks == ranks for known in self.sets.values()):
            raise ValueError(f"a process set of the ranks {ranks} exists already")

    def remove(self, process_set: ProcessSet) -> bool:
        """Give a process set up; all ranks call this alike. False for what is no set of this job, or the global one."""
        number = process_set.process_set_id
        if not number or number not in self.sets:
            return False
        self.all_gather_object("process sets", number)  # none is left in the middle of its collectives
        engine = self._engines.pop(number, None)
        if engine is not None:
            engine.close()
        del self.sets[number]
        process_set.detach()
        return True

    def all_gather_object(self, name: str, value: Any) -> list[Any]:
        """The value of every rank of the job, by rank."""
        data = pickled(value)
        request = Request("allgather", f"fullframe.{name}", (tuple(data.shape),), ("uint8",))
        engine = self._engines[0]
        submission = Submission(request, 0, [data])
        engine.submit(submission, waits=True)
        (whole,) = engine.wait(submission)
        return unpickled(whole, self.size)

    def close(self) -> None:
        """Leave all process sets, once the others leave too, or shortly after."""
        if all(engine.is_sound for engine in self._engines.values()):
            self._await_others()
        for engine in self._engines.values():
            engine.close()
        self.timeline.stop()
        for process_set in self.sets.values():
            process_set.detach()
        global_process_set.ranks = []

    def _await_others(self) -> None:
        """A rank whose peer is gone before it has read the last it was sent would see an error."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that held it
            left = self._store.add("left", 1)
            while left < self.size and time.monotonic() < deadline:
                time.sleep(0.005)
                left = self._store.add("left", 0)

    def _start(self, process_set: ProcessSet, number: int) -> None:
        process_set.attach(number, self.rank)
        own = process_set.rank()
        if own is not None and own >= 0:
            store = dist.PrefixStore(f"set{number}", self._store)
            self._engines[number] = Engine(
                store, own, len(process_set.ranks), self.settings, self.timeline, self._check
            )


class _Current:
    """The one world of this process; a store is kept for the next one."""

    world: World | None = None
    store: Any = None
    times = 0


def world() -> World:
    """What `init` made; ValueError before."""
    if _Current.world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _Current.world


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Meet the other ranks, as horovodrun, torchrun or Slurm started them; alone without any. Again: nothing.

    `process_sets`: those to use, the same on all ranks, or "dynamic", to add and remove them later. `comm` can only
    be all ranks. Raises ValueError for what is not there.
    """
    if _Current.world is not None:
        return
    if "HOROVOD_RANK" in os.environ:
        die_with_launcher()
    dynamic = process_sets == "dynamic" or os.environ.get(_DYNAMIC, "0") not in ("0", "")
    made = _Current.world = _met(comm, dynamic)
    try:
        for process_set in process_sets if process_sets is not None and not isinstance(process_sets, str) else ():
            made.add(process_set)
    except BaseException:
        shutdown()
        raise


def _met(comm: Sequence[int] | None, dynamic: bool) -> World:
    member = membership()
    if member is None:
        place = find_place()
        _Current.times += 1
        if _Current.store is None or not place.address:  # a port is served once, a process group may be another one
            _Current.store = connect(place)
        _require_all(comm, place.size)
        return World(place, _Current.store, f"horovod{_Current.times}", dynamic, _no_check)
    while True:
        place = member.meet()
        _require_all(comm, place.size)
        try:
            return World(place, member.connected(), f"horovod.epoch{member.epoch}", dynamic, member.check)
        except HorovodInternalError:
            if not member.is_over():  # else one died meanwhile, and those that are left meet again
                raise


def _require_all(comm: Sequence[int] | None, size: int) -> None:
    if comm is not None and not (hasattr(comm, "__iter__") and sorted(comm) in ([], list(range(size)))):
        raise ValueError(
            "comm can only be a list of all ranks; there is no MPI. Use process sets for some of the ranks"
        )


def _no_check() -> None:
    """Nobody says that ranks are gone but their connections."""


@atexit.register
def shutdown() -> None:
    """Leave the other ranks: what they ask for from now on ends in HorovodInternalError."""
    made, _Current.world = _Current.world, None
    if made is not None:
        with contextlib.suppress(RuntimeError):
            made.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not since."""
    return _Current.world is not None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set, or one of these ranks, after `init(process_sets="dynamic")`; all ranks call this alike."""
    if not world().dynamic:
        raise ValueError(
            "process sets can be added after init() only with init(process_sets='dynamic') or "
            f"{_DYNAMIC}=1 in the environment"
        )
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world().add(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set that `add_process_set` or `init` added; whether there was one. All ranks call this alike."""
    if not world().dynamic:
        raise ValueError(f"process sets can be removed only with init(process_sets='dynamic') or {_DYNAMIC}=1")
    return world().remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every process set, by its id."""
    return {number: list(process_set.ranks) for number, process_set in sorted(world().sets.items())}
