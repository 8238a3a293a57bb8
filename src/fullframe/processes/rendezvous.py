"""How the machines of a job find each other, by torch elastic's rendezvous, and hear of one that is gone.

Whatever asks the store does so in a thread of its own: over a cut link it returns late or never.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped, unused-ignore]

from fullframe.errors import MeshError, RunError
from fullframe.processes import stores
from fullframe.processes.background import AskedToStop, in_background
from fullframe.processes.exit_reasons import StartAgain
from fullframe.processes.lease import NOBODY, Leader, Lease
from fullframe.processes.rank_processes import Place
from fullframe.processes.same_options import Started, require_same_options
from fullframe.wording import first_line, plural

_POLL_SECONDS = 0.1
_BEATS = 5  # signs of life in the time after which a node is taken for lost
_LEAVING_SECONDS = 5.0  # the store's holder waits so long for those that still read in it


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a job, as this one is told of them.

    count, least:     machines of the whole job, and how many it goes on with
    rank:             which of them this is, 0 to count - 1
    host, port:       where node 0 is reached, and at first leads
    processes:        ranks of a machine
    silence_seconds:  without a sign of life, after which a machine is taken for lost
    patience_seconds: how long to wait for the others, at the start and after one was lost
    lease:            a folder on a file system that all of them share, by which another than node 0 may lead where
                      fewer may do; None: nobody but node 0
    options:          the words behind each option that all machines are to be started with alike
    """

    count: int
    least: int
    rank: int
    host: str
    port: int
    processes: int
    silence_seconds: float
    patience_seconds: float
    lease: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class News:
    """What one machine tells all others of this round, or finds out of them.

    kind: "final": no other attempt would help; "again": all ranks are to start again; "grow": likewise, after a
          checkpoint, as a machine has come; "stop": the job was asked to stop
    """

    kind: Literal["final", "again", "grow", "stop"]
    text: str
    node: int
    code: int = 1
    changed: bool = False  # another attempt will not meet the same end


class Round:
    """One attempt of the machines that came: who they are, their signs of life, and what they tell each other."""

    def __init__(
        self, nodes: Nodes, leader: Leader, leads: Callable[[], bool], store: Any, waiting: Callable[[], int],
        rank: int, world: int,
    ):  # fmt: skip
        self.leader, self.leads = leader, leads
        self._nodes, self._store, self._waiting = nodes, store, waiting
        self.place, self.interface, self._others = _met(nodes, store, rank, world)
        self.node, self._heard = nodes.rank, dict.fromkeys(self._others, time.monotonic())
        self._contact, self._broken = time.monotonic(), ""
        self._news: News | None = None
        self._late = 0  # machines that wait to be let in
        self._ended = threading.Event()
        threading.Thread(target=self._pulse, name="fullframe node", daemon=True).start()

    @property
    def has_leader(self) -> bool:
        """Whether the machine that holds the store is one of the round."""
        return self.leader.node == self.node or self.leader.node in self._others

    def end(self) -> None:
        """No more signs of life of this round."""
        self._ended.set()
        self._waiting = lambda: 0  # or torch's thread for what stands behind it tells the store that this one is there

    def news(self) -> News | None:
        """What was told, or is to be seen: a machine that is silent, another that waits to be let in."""
        now, patience = time.monotonic(), self._nodes.silence_seconds
        if self._news is not None:
            return self._news
        if not self.leads():
            text = f"node {self.node} could not renew its lease in {self._nodes.lease} for {patience:g} s"
            return self.tell(News(kind="again", node=self.node, text=text))
        if self._broken or now - self._contact > patience:
            return News(kind="again", node=self.node, text=self._without_host())
        for node, heard in self._heard.items():
            if self._contact - heard > patience:  # not now: a store that does not answer says nothing of the others
                text = f"lost node {node} ({self._others[node]}): no sign of life for {patience:g} s"
                return self.tell(News(kind="again", node=self.node, text=text))
        if self._late and self.place.node == 0 and self.place.nodes < self._nodes.count:
            text = f"{plural(self._late, 'more node')} came"
            return self.tell(News(kind="grow", node=self.node, text=text, changed=True))
        return None

    def tell(self, news: News) -> News:
        """Tell all machines of the round; the news that came first is what counts, but for an error that is final."""

        def publish() -> News:
            key = "final" if news.kind == "final" else "news"
            return News(**json.loads(self._store.compare_set(key, "", json.dumps(vars(news)))))

        try:
            told = in_background(publish, self._nodes.silence_seconds)
        except Exception:  # the store is gone: what is known here must do
            told = news
        self._news = self._news if self._news is not None and self._news.kind == "final" else told
        return self._news

    def all_done(self) -> bool:
        """Whether the ranks of every machine have ended well; this one's have."""

        def count() -> int:
            self._store.set(f"done/{self.node}", "")
            return sum(self._store.check([f"done/{node}"]) for node in self._others)

        try:
            return in_background(count, self._nodes.silence_seconds) == len(self._others)
        except Exception:
            return bool(self._broken) or time.monotonic() - self._contact > self._nodes.silence_seconds

    def _without_host(self) -> str:
        why = self._broken or f"no answer for {self._nodes.silence_seconds:g} s"
        return f"node {self.node} lost the rendezvous at {self.leader.address}: {why}"

    def _pulse(self) -> None:
        seen = dict.fromkeys(self._others, -1)
        try:
            while not self._ended.wait(self._nodes.silence_seconds / _BEATS / 2):
                self._store.add(f"beat/{self.node}", 1)
                for node in self._others:
                    beat = self._store.add(f"beat/{node}", 0)
                    if beat != seen[node]:
                        seen[node], self._heard[node] = beat, time.monotonic()
                self._late = self._waiting()
                for key in ("final", "news"):
                    if (self._news is None or key == "final") and self._store.check([key]):
                        self._news = News(**json.loads(self._store.get(key)))
                self._contact = time.monotonic()
        except Exception as error:
            self._broken = first_line(error)


class Rendezvous:
    """Inside `with`, `join` gives one round after another; one machine leads: it holds the store where they meet.

    That is node 0. Where fewer machines may do it is whichever holds the lease, node 0 at first.
    """

    def __init__(self, nodes: Nodes):
        self._nodes = nodes
        self._lease: Lease | None = None
        if nodes.lease is not None and nodes.least < nodes.count:
            self._lease = Lease(nodes.lease, nodes.rank, nodes.silence_seconds)
        self._leader = Leader(node=0, host=nodes.host, port=nodes.port)
        self._met = False
        self._held: Any = None  # the store, on the machine that leads
        self._handler: Any = None
        self._store: Any = None

    def __enter__(self) -> "Rendezvous":
        # Each attempt's ranks meet in a store of their own, so torch's need not be made.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return self

    def __exit__(self, *error: object) -> None:
        for call in (self._leave, *([] if self._lease is None else [self._lease.give_back])):
            with contextlib.suppress(Exception):
                in_background(call, _LEAVING_SECONDS)
        self._forget()

    def join(self, asked: Callable[[], int]) -> Round:
        """The next round, once enough machines are there.

        Raises AskedToStop as soon as `asked()` is true, StartAgain when too few machines came in time, RunError when
        another has ended the run, MeshError when the machines do not fit each other or the lease cannot be written.
        """
        from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

        nodes, reason = self._nodes, ""
        deadline = time.monotonic() + nodes.patience_seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                return in_background(
                    partial(self._meet, left), left + 2 * _LEAVING_SECONDS, lambda: asked() or self._is_elsewhere()
                )
            except (MeshError, KeyboardInterrupt):
                raise
            except AskedToStop:
                if asked():
                    raise
                self._forget()
            except RendezvousClosedError:
                raise RunError(
                    f"node {nodes.rank}: the other nodes have ended this run; see what node {self._leader.node} says"
                ) from None
            except Exception as error:
                reason = first_line(error)
                self._forget()
                time.sleep(min(1.0, max(left, 0)))
        if nodes.rank == 0 and not _is_own(nodes.host):
            reason = f"{nodes.host} is no address of this machine, which is node 0"
        wanted = f"{nodes.count}" if nodes.least == nodes.count else f"at least {nodes.least} of {nodes.count}"
        raise StartAgain(
            f"error: node {nodes.rank} waited {nodes.patience_seconds:g} s for {wanted} nodes at "
            f"{self._leader.address}, in vain{f' ({reason})' if reason else ''}",
            remedy="the same command on all nodes, with --auto-resume",
        )

    def close(self) -> None:
        """Nobody is to wait for another round."""
        if self._handler is not None:
            with contextlib.suppress(Exception):
                in_background(self._handler.shutdown, _LEAVING_SECONDS)

    def _forget(self) -> None:
        """Ask this store no more. Torch's thread would tell it for ever that this machine is there."""
        handler, self._handler, self._store = self._handler, None, None
        if handler is not None:
            with contextlib.suppress(Exception):
                in_background(handler._stop_heartbeats, 2 * _POLL_SECONDS)

    def _meet(self, seconds: float) -> Round:
        nodes, deadline = self._nodes, time.monotonic() + seconds
        self._find_leader()
        if self._handler is None:
            self._store = self._connected(deadline - time.monotonic())
            self._handler = _handler(nodes, self._store)
        leader, handler = self._leader, self._handler
        while time.monotonic() < deadline:
            info = handler.next_rendezvous()
            if handler is not self._handler:  # nobody waits for this any more
                break
            waiting = handler.num_nodes_waiting
            met = Round(nodes, leader, self._leads, info.store, waiting, info.rank, info.world_size)
            if self._lease is None or met.has_leader:  # nobody goes on without it
                self._met = True
                return met
            met.end()
            if met.place.listening is not None:
                met.place.listening.close()
        raise TimeoutError(f"node {leader.node}, which leads, did not come")

    def _find_leader(self) -> None:
        """Who leads now; this machine, if nobody else does."""
        from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

        lease, nodes = self._lease, self._nodes
        if lease is None:
            if nodes.rank == 0 and self._held is None:
                self._held = self._listening()
            return
        lease.start()
        if lease.is_mine():
            return
        self._held = None  # another may lead since
        self._forget()
        if lease.leader is not None and lease.leader.has_ended and self._met:
            raise RendezvousClosedError
        if lease.may_take():
            own = nodes.host if nodes.rank == 0 else _address_toward(nodes.host, nodes.port)
            store = self._listening()
            if not lease.take(own, store.port):
                raise RuntimeError("another machine leads now")
            self._held, self._leader = store, Leader(node=nodes.rank, host=own, port=store.port)
        elif lease.leader is not None:
            if lease.leader.node in (nodes.rank, NOBODY):
                raise RuntimeError(f"the lease in {lease.folder} has not run out")
            self._leader = lease.leader

    def _leads(self) -> bool:
        """Whether nothing says that this machine, if it leads, should no longer."""
        return self._lease is None or self._held is None or self._lease.is_mine()

    def _is_elsewhere(self) -> bool:
        """Whether the store that is waited at is no longer the one to meet at."""
        found = None if self._lease is None or self._handler is None else self._lease.leader
        return found is not None and found.address != self._leader.address

    def _listening(self) -> Any:
        """A new store. Raises MeshError where nothing else may be tried."""
        port = self._nodes.port
        try:
            return stores.held(port)
        except (OSError, RuntimeError) as error:
            if self._nodes.rank or self._met:
                return stores.held(0)
            raise MeshError(
                f"node 0 cannot listen on port {port} ({first_line(error)}); end what uses it, or give another port to "
                "--rendezvous on all nodes"
            ) from None

    def _connected(self, seconds: float) -> Any:
        store = self._held or stores.reached(self._leader.host, self._leader.port, seconds)
        store.set_timeout(timedelta(seconds=self._nodes.silence_seconds))
        return store

    def _leave(self) -> None:
        if self._store is None:
            return
        left = self._store.add("left", 1)
        while self._held is not None and left < self._nodes.count:
            time.sleep(_POLL_SECONDS)
            left = self._store.add("left", 0)


def _handler(nodes: Nodes, store: Any) -> Any:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    silence = timedelta(seconds=nodes.silence_seconds)
    return DynamicRendezvousHandler.from_backend(
        run_id="fullframe",
        store=store,
        backend=C10dRendezvousBackend(store, "fullframe"),
        min_nodes=nodes.least,
        max_nodes=nodes.count,
        local_addr=_address_toward(nodes.host, nodes.port),
        timeout=RendezvousTimeout(timedelta(seconds=nodes.patience_seconds), silence, silence, silence),
        keep_alive_interval=nodes.silence_seconds / _BEATS,  # type: ignore[arg-type]  # it makes a timedelta of it
        keep_alive_max_attempt=_BEATS,
    )


def _met(nodes: Nodes, store: Any, rank: int, world: int) -> tuple[Place, str, Mapping[int, str]]:
    """This machine's place, the interface by which it reaches the others ("" for any), and the others' addresses.

    Machines are numbered by their --node-rank, whatever the order in which they came.
    """
    own = _address_toward(nodes.host, nodes.port)
    mine = {"node": nodes.rank, "address": own, "processes": nodes.processes, "options": dict(nodes.options)}
    store.set(f"node/{rank}", json.dumps(mine))
    found = sorted((json.loads(store.get(f"node/{other}")) for other in range(world)), key=lambda node: node["node"])
    numbers = [node["node"] for node in found]
    if len(set(numbers)) < world:
        raise MeshError(f"two nodes have the same --node-rank: {numbers}; number them 0 to {nodes.count - 1}")
    if len({node["processes"] for node in found}) > 1:
        counts = ", ".join(f"node {node['node']}: {node['processes']}" for node in found)
        raise MeshError(f"every node starts as many ranks, these do not ({counts}); give --processes on all of them")
    require_same_options([Started(node["node"], node["options"]) for node in found])
    place, peer = numbers.index(nodes.rank), next((node for node in found if node["node"] != nodes.rank), None)
    address = own if peer is None else _address_toward(peer["address"], nodes.port)
    others = {node["node"]: node["address"] for node in found if node is not found[place]}
    if place == 0:
        listening = socket.create_server(("", 0))
        port = listening.getsockname()[1]
        store.set("ranks", json.dumps([address, port]))
        return Place(0, world, address, port, listening), _interface(address), others
    leader, port = json.loads(store.get("ranks"))
    return Place(place, world, leader, port, None), _interface(address), others


def _address_toward(host: str, port: int) -> str:
    """This machine's address as `host` sees it; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_own(host: str) -> bool:
    """Whether this machine has the address that `host` stands for; also where that is not known."""
    with contextlib.suppress(OSError):
        return _address_toward(host, 1) == socket.getaddrinfo(host, 1)[0][4][0]
    return True


def _interface(address: str) -> str:
    """The name of the network interface that has this address; "" for the loopback, which is for no other machine."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return "" if address.startswith("127.") or address == "::1" else name
    return ""
