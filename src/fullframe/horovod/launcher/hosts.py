"""Which hosts there are, and who is which rank on them. No processes."""

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullframe.errors import MeshError


@dataclass(frozen=True)
class Seat:
    """One rank's place in a job."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str) -> dict[str, int]:
    """Slots by host, of "server1:4,server2:2"; MeshError for anything else."""
    hosts: dict[str, int] = {}
    for part in text.split(","):
        host, _, slots = part.strip().rpartition(":")
        if not host or not slots.isdigit() or int(slots) < 1:
            raise MeshError(f"hosts are written host:slots,host:slots, with at least one slot each; got '{text}'")
        hosts[host] = hosts.get(host, 0) + int(slots)
    return hosts


def read_hostfile(path: Path) -> dict[str, int]:
    """Lines "host slots=4" as slots by host; of a host with several lines their sum, as with -H."""
    if not path.is_file():
        raise MeshError(f"there is no host file {path}")
    hosts = Counter[str]()
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line:
            host, _, slots = line.partition("slots=")
            hosts.update(parse_hosts(f"{host.strip()}:{slots.strip() or 1}"))
    return hosts


def discover(script: str, slots: int | None) -> dict[str, int]:
    """What a host discovery script prints: lines "host:slots", or "host" where `slots` says how many.

    Raises MeshError where it fails.
    """
    try:
        words = [script] if Path(script).exists() else script.split()
        done = subprocess.run(words, capture_output=True, text=True, timeout=60.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        raise MeshError(f"the host discovery script failed: {error} {said}".rstrip()) from error
    hosts: dict[str, int] = {}
    for line in done.stdout.split():
        if ":" not in line and slots is None:
            raise MeshError(f"the host discovery script says '{line}' without slots; print host:slots or give --slots")
        hosts |= parse_hosts(line if ":" in line else f"{line}:{slots}")
    return hosts


def seats(hosts: Mapping[str, int], count: int) -> list[Seat]:
    """The first `count` slots as seats, host by host; MeshError where there are too few."""
    available = sum(hosts.values())
    if count > available:
        named = ", ".join(f"{host}:{slots}" for host, slots in hosts.items())
        raise MeshError(
            f"{count} processes need {count} slots, {named} have {available}; "
            "give more hosts or slots with -H, or a smaller -np"
        )
    taken: dict[str, int] = {}
    for host, slots in hosts.items():
        if (part := min(slots, count - sum(taken.values()))) > 0:
            taken[host] = part
    places = [(host, local) for host, number in taken.items() for local in range(number)]
    return [_seat(places, taken, rank) for rank in range(count)]


def _seat(places: Sequence[tuple[str, int]], taken: Mapping[str, int], rank: int) -> Seat:
    host, local = places[rank]
    alike = [number for number, (_, other) in enumerate(places) if other == local]
    return Seat(host, rank, len(places), local, taken[host], alike.index(rank), len(alike))
