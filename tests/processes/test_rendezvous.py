"""Machines find each other and hear of each other; here each is a thread with a store of its own to talk to."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fullframe.errors import MeshError
from fullframe.processes import rendezvous
from fullframe.processes.background import AskedToStop
from fullframe.processes.exit_reasons import StartAgain
from fullframe.processes.rendezvous import News, Nodes, Rendezvous
from tests.processes.network import free_port


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(
        count=2,
        least=2,
        rank=0,
        host="127.0.0.1",
        port=free_port(),
        processes=3,
        silence_seconds=6.0,
        patience_seconds=120.0,
    )


def test_machines_meet_and_hear_what_one_of_them_says(nodes: Nodes) -> None:
    with Rendezvous(nodes) as first, Rendezvous(replace(nodes, rank=1)) as second, ThreadPoolExecutor() as pool:
        rounds = [pool.submit(one.join, lambda: 0) for one in (first, second)]
        mine, other = (found.result(60) for found in rounds)
        assert (mine.place.node, mine.place.nodes, other.place.node) == (0, 2, 1)
        assert mine.place.listening is not None and other.place.port == mine.place.listening.getsockname()[1]
        mine.place.listening.close()
        assert (mine.news(), other.news(), mine.all_done()) == (None, None, False)
        told = mine.tell(News(kind="again", node=0, text="a rank died"))
        assert other.tell(News(kind="again", node=1, text="it lost another")) == told, "the first word counts"
        final = other.tell(News(kind="final", node=1, text="an error"))
        deadline = time.monotonic() + 20
        while mine.news() != final:
            assert time.monotonic() < deadline, "an error of the job is heard after all else"
            time.sleep(0.05)
        assert other.all_done() is True, "both have said it"
        other.end()
        mine.end()
    deadline = time.monotonic() + 20
    while [thread.name for thread in threading.enumerate() if "KeepAlive" in thread.name]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_store_that_does_not_answer_says_nothing_of_the_other_machines(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()

    class Silent:
        def add(self, key: str, amount: int) -> int:
            asked.set()
            over.wait(60)
            raise TimeoutError

        compare_set = add

    with Rendezvous(nodes) as first, Rendezvous(replace(nodes, rank=1)) as second, ThreadPoolExecutor() as pool:
        rounds = [pool.submit(one.join, lambda: 0) for one in (first, second)]
        mine, other = (found.result(60) for found in rounds)
        assert mine.place.listening is not None
        mine.place.listening.close()
        monkeypatch.setattr(other, "_store", Silent())
        assert asked.wait(60)
        # Of node 0 it had last heard a while before the store fell silent: 7 s ago, longer than one may be silent.
        for answered, text in ((3.0, None), (6.1, "no answer for 6 s")):
            other._contact = time.monotonic() - answered
            other._heard[0] = other._contact - 4.0
            found = other.news()
            assert (found and found.text) == (text and f"node 1 lost the rendezvous at 127.0.0.1:{nodes.port}: {text}")
        mine.end()
        over.set()
        other.end()


@pytest.mark.slow
def test_where_fewer_may_do_whoever_holds_the_lease_leads(nodes: Nodes, tmp_path: Path) -> None:
    few = replace(nodes, least=1, lease=tmp_path / "run" / "lease")
    with Rendezvous(few) as first, Rendezvous(replace(few, rank=1)) as second, ThreadPoolExecutor() as pool:
        rounds = [pool.submit(one.join, lambda: 0) for one in (first, second)]
        for met in (found.result(60) for found in rounds):
            assert (met.leader.node, met.leader.address, met.has_leader) == (0, f"127.0.0.1:{nodes.port}", True)
            assert met.leads() and met.news() is None
            met.end()
            if met.place.listening is not None:
                met.place.listening.close()
    with Rendezvous(replace(few, rank=1)) as alone:  # node 0 never comes; it has given the lease back
        met = alone.join(lambda: 0)
        assert (met.leader.node, met.place.nodes, met.leads()) == (1, 1, True)
        for file in few.lease.iterdir() if few.lease else ():
            file.rename(file.with_name("000000009999,0,10.0.0.9,29400,another"))
        deadline = time.monotonic() + 20
        while met.leads():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = met.news()
        assert found is not None and found.text.startswith(f"node 1 could not renew its lease in {few.lease}")
        met.end()
        assert met.place.listening is not None
        met.place.listening.close()


def test_node_0_at_an_address_that_is_not_its_own_says_so(nodes: Nodes, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = replace(nodes, host="192.0.2.1", patience_seconds=0.5)  # of a network for examples, which no one has
    with Rendezvous(elsewhere) as alone, pytest.raises(StartAgain):
        alone.join(lambda: 0)
    (said,) = capfd.readouterr().err.splitlines()  # and no stacks of torch's
    assert "(192.0.2.1 is no address of this machine, which is node 0)" in said


def test_machines_that_do_not_fit_each_other_are_refused(nodes: Nodes) -> None:
    fewer = replace(nodes, rank=1, processes=2)
    with Rendezvous(nodes) as first, Rendezvous(fewer) as second, ThreadPoolExecutor() as pool:
        for found in [pool.submit(one.join, lambda: 0) for one in (first, second)]:
            with pytest.raises(MeshError, match="node 0: 3, node 1: 2"):
                found.result(60)


def test_machines_that_were_started_otherwise_are_refused(nodes: Nodes) -> None:
    other = replace(nodes, rank=1, options={"--keep-checkpoints": "5"})
    with Rendezvous(nodes) as first, Rendezvous(other) as second, ThreadPoolExecutor() as pool:
        for found in [pool.submit(one.join, lambda: 0) for one in (first, second)]:
            with pytest.raises(MeshError, match="with no --keep-checkpoints, node 1 with --keep-checkpoints 5; give"):
                found.result(60)


def test_a_request_to_stop_ends_the_waiting(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LEAVING_SECONDS", 0.2)  # for others, who never come
    with Rendezvous(nodes) as alone, pytest.raises(AskedToStop):
        alone.join(lambda: 15)
