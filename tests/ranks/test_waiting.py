"""Who waits for other ranks."""

import threading

from fullframe.ranks.waiting import waiting_for_ranks, waits


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
