"""Two launchers and one folder: never do both lead, whatever either has seen of it, and when."""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fullframe.errors import MeshError
from fullframe.processes import lease as lease_module
from fullframe.processes.lease import Lease

SILENCE = 0.5
LONG = 600.0  # of a lease that does not run out, nor is looked at again, in the time of a test


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Callable[[int], Lease]]:
    """A launcher's view of the lease, that of this node."""
    all_made: list[Lease] = []

    def made(node: int, *, silence: float = SILENCE) -> Lease:
        found = Lease(tmp_path / "run" / "lease", node, silence)
        found.start()
        all_made.append(found)
        return found

    yield made
    for one in all_made:
        one._ended.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_node_0_leads_first_and_says_where(lease: Callable[..., Lease]) -> None:
    other, first = lease(1), lease(0)
    assert (other.may_take(), first.may_take()) == (False, True)
    assert first.take("10.0.0.1", 29400) and first.is_mine()
    until(lambda: other.leader is not None)
    assert other.leader is not None and (other.leader.node, other.leader.address) == (0, "10.0.0.1:29400")
    assert not other.may_take()
    until(lambda: first.leader is not None and first.leader.count > 15 and first.is_mine())  # it is renewed
    with first._lock:
        assert len(list(first.folder.iterdir())) == 1


def test_of_two_that_make_the_first_lease_one_leads(lease: Callable[..., Lease]) -> None:
    both = [lease(0, silence=LONG), lease(0, silence=LONG)]
    assert [one.take("a", 1) for one in both] == [True, False]
    assert [one.is_mine() for one in both] == [True, False]
    assert [path.name for path in both[0].folder.parent.iterdir()] == ["lease"]


def test_of_two_that_have_seen_the_same_one_leads(lease: Callable[..., Lease]) -> None:
    first = lease(0, silence=LONG)
    first.take("a", 1)
    both = [lease(1, silence=LONG), lease(2, silence=LONG)]  # they look once, as they begin
    assert [one.take("b", 2) for one in both] == [True, False]
    first._look()
    assert not first.is_mine() and both[0].is_mine()


def test_a_holder_that_cannot_renew_is_at_its_end_long_before_another_may_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own: both look when it goes on."""
    now = 100.0
    monkeypatch.setattr(lease_module, "time", SimpleNamespace(monotonic=lambda: now))
    first, other = (Lease(tmp_path / "lease", node, SILENCE) for node in (0, 1))

    def goes_on(seconds: float) -> None:
        nonlocal now
        now += seconds
        for one in (first, other):
            with contextlib.suppress(OSError):
                one._look()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "the file system is gone")

    first.take("a", 1)
    for _ in range(20):
        goes_on(SILENCE / 5)
        assert first.is_mine() and not other.may_take(), "it is renewed"
    renewed = now
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(first, "_renamed", broken)
        while first.is_mine():
            goes_on(0.01)
        lost = now
        while not other.may_take():
            goes_on(0.01)
        assert lost <= renewed + SILENCE + 0.02 and now - lost > 5.0, "ranks are still to be ended then"
        assert other.take("b", 2)
    goes_on(0.01)
    assert first.leader is not None and first.leader.node == 1
    assert not first.is_mine() and other.is_mine()


def test_a_renewal_whose_end_was_not_known_counts_from_its_beginning(
    lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lease(0)
    first.take("a", 1)
    renamed, began, until_then = first._renamed, list[float](), list[float]()

    def late(*names: object) -> bool:
        if not began:
            began.append(time.monotonic())
            renamed(*names)  # type: ignore[arg-type]
            raise OSError(errno.EIO, "no answer")
        until_then.append(first._until)
        return renamed(*names)  # type: ignore[arg-type]

    monkeypatch.setattr(first, "_renamed", late)
    until(lambda: len(until_then) >= 2)
    assert until_then[1] - began[0] <= SILENCE, "another may have seen that name since"
    until(first.is_mine)


def test_an_answer_that_was_lost_on_the_way_is_no_refusal(
    lease: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lease(0)
    rename = Path.rename

    def lost(old: Path, new: Path) -> None:
        rename(old, new)
        raise FileNotFoundError(errno.ENOENT, "asked again")

    first.take("a", 1)
    monkeypatch.setattr(Path, "rename", lost)
    until(lambda: first.leader is not None and first.leader.count > 10 and first.is_mine())


def test_what_was_given_back_is_for_who_comes_next(lease: Callable[..., Lease]) -> None:
    first, waits = lease(0), lease(1)
    first.take("a", 1)
    until(lambda: waits.leader is not None)
    first.give_back()
    until(lambda: waits.leader is not None and waits.leader.has_ended)
    assert not waits.may_take(), "the job has ended in its time"
    following = lease(1)
    assert following.may_take() and following.take("b", 2)
    assert not lease(0).may_take()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises((MeshError, OSError)) as raised:
        Lease(tmp_path / "run" / "lease", 0, SILENCE).take("a", 1)
    assert "cannot write the lease" in str(raised.value)
