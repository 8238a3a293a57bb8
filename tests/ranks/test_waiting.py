"""Who waits for other ranks."""

import threading

import pytest
import torch.distributed as dist

from fullframe.errors import RankError
from fullframe.ranks.waiting import lost_rank, naming_lost_ranks, waiting_for_ranks, waits


def test_a_thread_waits_until_its_outermost_wait_ends() -> None:
    me = threading.get_ident()
    assert not waits(me)
    with waiting_for_ranks():
        with waiting_for_ranks():
            assert waits(me)
        assert waits(me)
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(waits(threading.get_ident())))
        thread.start()
        thread.join()
        assert other == [False]
    assert not waits(me)


def test_an_error_ends_the_wait() -> None:
    try:
        with waiting_for_ranks():
            raise OSError
    except OSError:
        assert not waits(threading.get_ident())


LOST = [
    (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "another rank has ended"),
    (
        RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms"),
        "another rank does not come",
    ),
    (dist.DistStoreError("wait timeout after 10000ms"), "another rank does not come"),
]


@pytest.mark.parametrize(("error", "said"), LOST)
@pytest.mark.parametrize("around", [waiting_for_ranks, naming_lost_ranks])
def test_a_wait_for_a_lost_rank_ends_in_words(error: Exception, said: str, around: type) -> None:
    with pytest.raises(RankError, match=said) as caught, around():
        raise error
    assert caught.value.__cause__ is error and isinstance(caught.value, dist.DistError)
    assert "at ranks/test_waiting.py:" in str(caught.value)
    assert lost_rank(caught.value) is None, "it is in words already"


@pytest.mark.parametrize("error", [RuntimeError("mine"), OSError("gone"), None])
def test_what_says_nothing_of_other_ranks_is_left(error: Exception | None) -> None:
    assert lost_rank(error) is None
    with pytest.raises(KeyError), naming_lost_ranks():
        raise KeyError
