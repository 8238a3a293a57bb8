"""Which machine leads a job that may go on with fewer machines: a lease on the file system that all of them share.

It is one file, whose name says who holds it and counts up. The holder renames it again and again; whoever wants to lead
renames it, too: of two that do, one finds the name gone, whatever old contents a file system may have shown it. The
others try only after they have seen one name for so long that its holder, which counts from before it gave that name,
has ended its ranks. No two clocks are compared.
"""

import contextlib
import shutil
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from fullframe.errors import MeshError

_RENEWALS = 5  # in the time that a lease is good for
_SPARE_SECONDS = 5.0  # to end ranks, and for what they still wrote
NOBODY = -1  # the node of a lease that was given back


@dataclass(frozen=True, kw_only=True)
class Leader:
    """The machine that holds the store, where that is reached, and which launcher of that machine it is."""

    node: int
    host: str
    port: int
    launcher: str = ""
    count: int = 0  # of the lease's names

    @property
    def address(self) -> str:
        """As it is said and compared."""
        return f"{self.host}:{self.port}"

    @property
    def has_ended(self) -> bool:
        """Whether the last one that led has given the lease back."""
        return self.node == NOBODY

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.count:012d},{self.node},{self.host},{self.port},{self.launcher}"


class Lease:
    """The lease in `folder`, as the launcher of `node` sees it, holds it and renews it, in a thread of its own.

    A holder that could not renew it for `silence_seconds` holds it no more, and is to end its ranks; another takes it
    after more than three times that.
    """

    def __init__(self, folder: Path, node: int, silence_seconds: float):
        self.folder, self.silence_seconds = folder, silence_seconds
        self.leader: Leader | None = None  # as it was last seen
        self._node, self._launcher = node, uuid.uuid4().hex[:8]
        self._own: Leader | None = None
        self._until = self._since = 0.0  # the own lease is good, the leader's name was first seen
        self._trying: float | None = None  # since when a renewal is under way whose end is not known
        self._waits = False  # whether another has held it in this launcher's time
        self._lock, self._ended = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Look once, then keep looking. Raises OSError where the file system does not answer as it should."""
        if self._since == 0.0:
            self._look()
            threading.Thread(target=self._watch, name="fullframe lease", daemon=True).start()

    def is_mine(self) -> bool:
        """Whether this machine leads, and nobody else can."""
        return self._own is not None and time.monotonic() < self._until

    def may_take(self) -> bool:
        """Whether `take` is worth a try: nobody leads, or whoever did has ended or fallen silent.

        The first lease of all is node 0's; one that was given back in this launcher's time belongs to a job that ended.
        """
        if self.leader is None:
            return self._node == 0
        if self.leader.has_ended and not self._waits:
            return True
        return time.monotonic() - self._since > 3 * self.silence_seconds + _SPARE_SECONDS

    def take(self, host: str, port: int) -> bool:
        """Lead from now on, with a store at this address; False where another was faster.

        Raises MeshError where the file system does not let it.
        """
        with self._lock:
            seen, started = self.leader, time.monotonic()
            wanted = Leader(node=self._node, host=host, port=port, launcher=self._launcher)
            try:
                if seen is None:
                    taken = self._made(wanted)
                else:
                    wanted = replace(wanted, count=seen.count + 1)
                    taken = self._renamed(seen, wanted)
            except OSError as error:
                raise MeshError(
                    f"cannot write the lease in {self.folder} ({error.strerror}), which --min-nodes needs; name "
                    "another --run-dir, or leave out --min-nodes"
                ) from error
            if taken:
                self._own, self._until = wanted, started + self.silence_seconds
                self.leader, self._since = wanted, started
            return taken

    def give_back(self) -> None:
        """Somebody else may lead at once: the ranks here have ended."""
        self._ended.set()
        with self._lock:
            own, self._own = self._own, None
            if own is not None:
                self._renamed(own, replace(own, count=own.count + 1, node=NOBODY))

    def _watch(self) -> None:
        while not self._ended.wait(self.silence_seconds / _RENEWALS):
            with contextlib.suppress(OSError):
                self._look()

    def _look(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            if self._own is not None:
                self._renew(self._own)
            found = self._own or self._found()
            if found != self.leader or self._since == 0.0:
                self.leader, self._since = found, time.monotonic()
            self._waits |= self._own is None and found is not None and not found.has_ended

    def _renew(self, own: Leader) -> None:
        now, following = time.monotonic(), replace(own, count=own.count + 1)
        self._trying = now if self._trying is None else self._trying
        if self._renamed(own, following):  # an OSError leaves open whether it was, and the same is tried again
            self._own, self._until = following, self._trying + self.silence_seconds
        else:
            self._own = None
        self._trying = None

    def _found(self) -> Leader | None:
        """The lease as it lies there; the one seen before, where it is just being renamed."""
        try:
            there = [leader for path in self.folder.iterdir() if (leader := _read(path.name)) is not None]
        except FileNotFoundError:
            return self.leader
        return max(there, key=lambda leader: leader.count, default=self.leader)

    def _renamed(self, seen: Leader, wanted: Leader) -> bool:
        try:
            (self.folder / seen.name).rename(self.folder / wanted.name)
            return True
        except FileNotFoundError:  # another was faster; or NFS has lost its own answer, and asked again
            return (self.folder / wanted.name).exists()

    def _made(self, first: Leader) -> bool:
        """Make the folder together with the file: it can be made once, and never without."""
        own = self.folder.with_name(f".{self.folder.name}-{self._launcher}")
        own.mkdir(parents=True)
        (own / first.name).touch()
        try:
            own.rename(self.folder)
            return True
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
            if not self.folder.exists():
                raise
            return False


def _read(name: str) -> Leader | None:
    try:
        count, node, host, port, launcher = name.split(",")
        return Leader(node=int(node), host=host, port=int(port), launcher=launcher, count=int(count))
    except ValueError:
        return None
