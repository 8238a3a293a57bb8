"""Elastic workers meet in a store; here the test writes what their launcher would."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import fullframe.horovod as hvd
from fullframe.horovod.exceptions import HorovodInternalError
from fullframe.horovod.membership import Membership, _Mine


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def plan(store: Any, epoch: int, *workers: str) -> None:
    seats = {name: (rank, len(workers), rank, len(workers)) for rank, name in enumerate(workers)}
    store.set(f"plan/{epoch}", json.dumps(seats))
    store.set("epoch", str(epoch))


def soon(call: Callable[[], None]) -> None:
    threading.Timer(0.3, call).start()


def test_those_that_others_do_not_come_to_ask_for_another_epoch(store: Any) -> None:
    plan(store, 1, "a", "b")
    worker = Membership("a", "127.0.0.1", store.port, 0.2)
    for _ in range(2):
        with pytest.raises(HorovodInternalError, match=r"did not come within 0\.2 s"):
            worker.meet()
        worker.report_failure()
    assert store.add("lost/1", 0) == 2
    assert store.add("arrived/1", 0) == 1, "it is one worker, however often it tries"


def test_a_worker_that_leaves_for_the_next_epoch_says_so_to_those_that_have_seen_all_come(store: Any) -> None:
    plan(store, 1, "a", "b")
    worker = Membership("a", "127.0.0.1", store.port, 60.0)
    soon(lambda: plan(store, 2, "a"))
    assert (worker.meet().size, worker.epoch) == (1, 2)
    assert store.check(["failed/1"])
    plan(store, 3, "b")
    assert worker.has_news() and worker.is_over()
    with pytest.raises(SystemExit):
        worker.meet()


@pytest.mark.parametrize("when", ["it dies", "it leaves"])
def test_where_a_worker_is_gone_as_all_have_come_the_others_meet_again(
    when: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(store, 1, "a", "b")
    store.add("arrived/1", 1)  # b, which then dies
    monkeypatch.setattr(_Mine, "membership", Membership("a", "127.0.0.1", store.port, 60.0))

    def launcher() -> None:
        store.set("failed/1", "1")
        time.sleep(0.3 * (when == "it dies"))
        plan(store, 2, "a")

    soon(launcher)
    begin = time.monotonic()
    hvd.init()
    try:
        assert hvd.size() == 1 and time.monotonic() - begin < 60.0
    finally:
        hvd.shutdown()
