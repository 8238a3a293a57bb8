"""torch's store is reached; what stands in its place is named in a sentence, without a stack of C++."""

import socket
import threading
from collections.abc import Iterator

import pytest

from fullframe.processes import stores
from tests.processes.network import free_port


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_store_is_held_and_reached() -> None:
    store = stores.held(0)
    client = stores.reached("127.0.0.1", store.port, 5.0)
    store.set("key", "value")
    assert client.get("key") == b"value"


def test_another_program_is_no_store(listening: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    def hang_up() -> None:
        connection, _ = listening.accept()
        connection.recv(100)
        connection.close()

    threading.Thread(target=hang_up, daemon=True).start()
    with pytest.raises(ConnectionError, match="no node 0 of a run, but another program, or a proxy"):
        stores.reached("127.0.0.1", listening.getsockname()[1], 60.0)
    assert capfd.readouterr() == ("", "")


def test_who_is_silent_or_not_there_is_no_store(listening: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError, match=r"gives no answer within 0\.1 s"):
        stores.reached("127.0.0.1", listening.getsockname()[1], 0.0)
    with pytest.raises(ConnectionRefusedError):
        stores.reached("127.0.0.1", free_port(), 5.0)
    assert capfd.readouterr() == ("", "")
