"""torch's TCPStore, held and reached; what answers in its place is named, of which torch speaks in stacks of C++."""

import os
import socket
import struct
from datetime import timedelta
from functools import partial
from typing import Any

from fullframe.processes.background import in_background

_CONNECTING_SECONDS = 5.0  # for one attempt of many
_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13  # how a client of torch's greets its store


def held(port: int) -> Any:
    """A new store of this machine, that others reach on this port; 0 for any. Raises as torch does."""
    from torch.distributed import TCPStore

    # It serves all addresses. By the one that others know it may not be reached from here, or another machine may be.
    return TCPStore("localhost", port, is_master=True, wait_for_workers=False)


def reached(host: str, port: int, seconds: float) -> Any:
    """The store there. Raises OSError where nothing answers within the time, or something else does."""
    from torch.distributed import TCPStore

    seconds = min(max(seconds, 0.1), _CONNECTING_SECONDS)
    _greet(host, port, seconds)  # by a socket of our own, as torch says at length that nobody listens
    timeout = timedelta(seconds=seconds)
    client = partial(TCPStore, host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return in_background(client, 2 * _CONNECTING_SECONDS)  # a machine that is frozen takes the call, no more


def _greet(host: str, port: int, seconds: float) -> None:
    token = os.urandom(4)
    with socket.create_connection((host, port), seconds) as connection:
        connection.sendall(struct.pack("=BIB", _VALIDATE, _MAGIC, _PING) + token)
        try:
            answer = connection.recv(len(token), socket.MSG_WAITALL)
        except TimeoutError:
            raise TimeoutError(f"what listens there gives no answer within {seconds:.2g} s") from None
    if answer != token:
        raise ConnectionError("what listens there is no node 0 of a run, but another program, or a proxy")
