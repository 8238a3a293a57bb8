"""A job of workers from beginning to end: of a fixed number, or elastic, of as many as there are hosts for."""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fullframe.errors import MeshError
from fullframe.horovod.launcher.hosts import Seat, seats
from fullframe.horovod.launcher.workers import Worker, end, is_here
from fullframe.horovod.membership import WORKER
from fullframe.processes.deaths import CONSEQUENCE_SECONDS
from fullframe.processes.stop_signals import STOP_SIGNALS, StopSignals

_POLL_SECONDS = 0.1
_DISCOVER_SECONDS = 1.0
_HOST_FAILURES = 3  # of a host's workers, after which it is left out


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run: `command` by each of the workers, with `environment` added to ours."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh_port: int | None = None
    output: Path | None = None
    stdout: TextIO = sys.stdout
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)


def run_fixed(job: Job, hosts: Mapping[str, int], count: int) -> int:
    """Run `count` workers; the exit code of the first that fails, which ends the others; 128 + a signal if stopped.

    A worker that leaves tells the others first, so that they may end before it does.
    """
    places = seats(hosts, count)
    store, address = _serve(places)
    stop = StopSignals((*STOP_SIGNALS, signal.SIGHUP), interrupts=False)
    workers: list[Worker] = []
    deadline = math.inf
    try:
        with stop:
            for seat in places:
                workers.append(_start(job, str(seat.rank), seat, address, store.port, {}))
            while not stop.number:
                codes, failed = [worker.code for worker in workers], _failed(workers)
                if failed:
                    deadline = min(deadline, time.monotonic() + CONSEQUENCE_SECONDS)
                    if None in codes and failed[0].lost_another and time.monotonic() < deadline:
                        time.sleep(_POLL_SECONDS)
                        continue
                    job.say(f"rank {failed[0].seat.rank} ended with exit code {failed[0].code}; the others are ended")
                    return failed[0].code or 1
                if None not in codes:
                    return 0
                time.sleep(_POLL_SECONDS)
            return 128 + stop.number
    finally:
        end(workers)


def _failed(workers: Sequence[Worker]) -> list[Worker]:
    """Those that failed; last those that only lost another."""
    return sorted((worker for worker in workers if worker.code), key=lambda worker: worker.lost_another)


class ElasticJob:
    """Workers that come and go with the hosts, `least` to `most`; see `membership` for what they are told.

    A worker that fails is started again, `resets` times in all (None: without end); a host whose workers failed three
    times is left out. `start_seconds` is how long to wait for enough slots.
    """

    def __init__(
        self,
        job: Job,
        discover: Callable[[], dict[str, int]],
        *,
        first: int,
        least: int,
        most: int,
        resets: int | None = None,
        start_seconds: float = 600.0,
    ):
        self._job, self._discover = job, discover
        self._first, self._least, self._most = first, least, most
        self._resets, self._start_seconds = resets, start_seconds
        self._hosts = discover()  # the first failure is final
        self._failures: dict[str, int] = {}
        self._workers: list[Worker] = []  # those of the epoch, in the order of their ranks
        self._leaving: list[Worker] = []
        self._epoch, self._started, self.changes = 0, 0, 0
        self._store: Any = None
        self._address = ""
        self._looked = time.monotonic()
        self._deadline = math.inf  # until which a worker is waited for that others say to have lost

    def run(self) -> int:
        """0 once all workers have ended well; else the exit code of the one that ended the job, 128 + a signal."""
        with StopSignals((*STOP_SIGNALS, signal.SIGHUP), interrupts=False) as stop:
            try:
                self._wait_for(self._first, stop)
                if stop.number:
                    return 128 + stop.number
                self._plan("")
                while not stop.number:
                    code = self._look(stop)
                    if code is not None:
                        return code
                    time.sleep(_POLL_SECONDS)
                return 128 + stop.number
            finally:
                end([*self._workers, *self._leaving])

    def _look(self, stop: StopSignals) -> int | None:
        codes = [worker.code for worker in self._workers]
        if all(code == 0 for code in codes):
            return 0
        failed = _failed(self._workers)
        if failed and None in codes and failed[0].lost_another:
            self._deadline = min(self._deadline, time.monotonic() + CONSEQUENCE_SECONDS)
            if time.monotonic() < self._deadline:
                return None
        self._deadline = math.inf
        if 0 in codes:  # training is over; what fails now is final
            return failed[0].code if failed else None
        for worker in failed:
            host = worker.seat.host
            if worker.lost_another == failed[0].lost_another:
                self._failures[host] = self._failures.get(host, 0) + 1
            self._job.say(f"rank {worker.seat.rank} on {host} ended with exit code {worker.code}")
        if failed or int(self._store.add(f"lost/{self._epoch}", 0)):
            self._store.set(f"failed/{self._epoch}", "1")
            if self._resets is not None and self.changes >= self._resets:
                self._job.say(f"{self.changes} resets were not enough (--reset-limit); giving up")
                return failed[0].code if failed else 1
            return self._anew("a worker failed", failed, stop)
        if self._hosts_changed():
            return self._anew("hosts were added or removed", [], stop)
        return None

    def _anew(self, reason: str, failed: Sequence[Worker], stop: StopSignals) -> int | None:
        self.changes += 1
        for worker in failed:
            worker.drain()
        self._workers = [worker for worker in self._workers if worker not in failed]
        code = next((worker.code for worker in failed if worker.code), 1)
        try:
            self._wait_for(self._least, stop)
        except MeshError as error:
            self._job.say(f"error: {error}")
            return code
        if not stop.number:
            self._plan(reason)
        return None

    def _usable(self) -> dict[str, int]:
        return {host: slots for host, slots in self._hosts.items() if self._failures.get(host, 0) < _HOST_FAILURES}

    def _hosts_changed(self) -> bool:
        """Look at the hosts now and then; whether what can be used is other than before."""
        if time.monotonic() - self._looked < _DISCOVER_SECONDS:
            return False
        before = self._usable()
        try:
            self._hosts = self._discover()
        except MeshError as error:
            self._job.say(f"warning: {error}; going on with the hosts that are known")
        self._looked = time.monotonic()
        running = {worker.seat.host for worker in self._workers}
        grown = sum(self._usable().values()) > len(self._workers) < self._most
        shrunk = any(self._usable().get(host, 0) < before.get(host, 0) for host in running)
        return self._usable() != before and (grown or shrunk)

    def _wait_for(self, count: int, stop: StopSignals) -> None:
        deadline, said = time.monotonic() + self._start_seconds, False
        while sum(self._usable().values()) < count and not stop.number:
            if time.monotonic() > deadline:
                raise MeshError(f"{count} slots were not found within {self._start_seconds:g} s: {self._usable()}")
            if not said:
                said = True
                self._job.say(f"waiting for {count} slots; there are {sum(self._usable().values())}")
            time.sleep(_POLL_SECONDS)
            self._hosts_changed()

    def _plan(self, reason: str) -> None:
        """Begin an epoch: seats for those that live, the first ranks theirs; others started or left without one."""
        by_host: dict[str, list[Worker]] = {}
        for worker in self._workers:  # hosts in the order of their first ranks
            by_host.setdefault(worker.seat.host, []).append(worker)
        usable = self._usable()
        order = [host for host in (*by_host, *usable) if host in usable]
        places = seats({host: usable[host] for host in order}, min(self._most, sum(usable.values())))
        if self._store is None:
            self._store, self._address = _serve(places)
        self._epoch += 1
        kept = [(seat, by_host.get(seat.host, [])) for seat in places]
        living = {seat: free.pop(0) for seat, free in kept if free}
        leaving = [worker for free in by_host.values() for worker in free]
        self._leaving += leaving
        names = {seat: living[seat].name if seat in living else self._name(seat) for seat in places}
        plan = {names[s]: (s.rank, s.size, s.local_rank, s.local_size, self._address, self._store.port) for s in places}
        self._store.set(f"plan/{self._epoch}", json.dumps(plan))
        self._store.set("epoch", str(self._epoch))
        if reason:
            gone, new = len(leaving), len(places) - len(living)
            self._job.say(f"{reason}: {len(places)} ranks go on, {new} of them new" + f", {gone} left" * bool(gone))
        for seat in places:
            if seat not in living:
                elastic = {WORKER: names[seat], "HOROVOD_ELASTIC": "1"}
                living[seat] = _start(self._job, names[seat], seat, self._address, self._store.port, elastic)
                self._workers.append(living[seat])  # if the next cannot be started, this one is ended too
            living[seat].seat = seat
        self._workers = [living[seat] for seat in places]

    def _name(self, seat: Seat) -> str:
        self._started += 1
        return f"{seat.host}:{self._started}"


def _serve(places: Sequence[Seat]) -> tuple[Any, str]:
    """The store where the workers meet, in this process, so that any worker may die; and its address."""
    from torch.distributed import TCPStore

    alone = all(is_here(seat.host) for seat in places)
    address = "127.0.0.1" if alone else socket.gethostname()
    return TCPStore(address, 0, is_master=True, wait_for_workers=False), address


def _start(job: Job, name: str, seat: Seat, address: str, port: int, environment: Mapping[str, str]) -> Worker:
    ours = {
        "HOROVOD_RANK": seat.rank,
        "HOROVOD_SIZE": seat.size,
        "HOROVOD_LOCAL_RANK": seat.local_rank,
        "HOROVOD_LOCAL_SIZE": seat.local_size,
        "HOROVOD_CROSS_RANK": seat.cross_rank,
        "HOROVOD_CROSS_SIZE": seat.cross_size,
        "HOROVOD_HOSTNAME": seat.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        # For torch's own process group beside ours: fullframe's meshes are made on it.
        "RANK": seat.rank,
        "WORLD_SIZE": seat.size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"horovodrun-{os.getpid()}",
        "PYTHONUNBUFFERED": "1",
        # As fullframe's own launcher: sets of names in one order, and not a thread of each rank for every core.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // seat.local_size, 1))),
    }
    site = str(Path(__file__).parents[1] / "site")
    paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    together = {**{key: str(value) for key, value in ours.items()}, "PYTHONPATH": os.pathsep.join(paths)}
    return Worker(
        name,
        seat,
        job.command,
        {**together, **job.environment, **environment},
        ssh_port=job.ssh_port,
        output=job.output,
        stdout=job.stdout,
    )
