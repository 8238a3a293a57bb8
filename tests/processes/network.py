"""Two hosts as network namespaces of this machine, with a router between them that can stop to forward; ports."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = ("10.213.1.1", "10.213.2.1")  # of the two hosts; seen by nobody else


def free_port() -> int:
    """A port to listen on later, which no connection is given meanwhile: those get numbers from 32768 on."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("of 100 ports none is free")


def why_not() -> str:
    """Why no namespaces can be made here; "" where they can."""
    if shutil.which("ip") is None:
        return "no ip (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"ff{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return "" if made.returncode == 0 else f"network namespaces cannot be made: {made.stderr.strip()}"


@dataclass(frozen=True)
class Network:
    """Two hosts; `on(host)` is what a command is started with to run on one of them."""

    name: str

    def on(self, host: int) -> list[str]:
        """The words before a command."""
        return ["ip", "netns", "exec", f"{self.name}{host}"]

    def forward(self, forwards: bool) -> None:
        """Let the router forward packets, or drop all of them without a word, as a cut cable does."""
        write = f"echo {int(forwards)} > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(["ip", "netns", "exec", f"{self.name}r", "sh", "-c", write], check=True)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """The hosts inside `with`; the namespaces are gone afterwards."""
    made = Network(f"ff{os.getpid()}")
    spaces = [f"{made.name}{end}" for end in ("0", "1", "r")]
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        for host, address in enumerate(ADDRESSES):
            router = f"{address.rpartition('.')[0]}.254"
            here, there = (spaces[host], f"eth{host}"), (spaces[2], f"port{host}")
            _ip("link", "add", here[1], "netns", here[0], "type", "veth", "peer", "name", there[1], "netns", there[0])
            for (space, device), own in ((here, address), (there, router)):
                _ip("-n", space, "address", "add", f"{own}/24", "dev", device)
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", spaces[host], "route", "add", "default", "via", router)
        made.forward(True)
        yield made
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr}")
