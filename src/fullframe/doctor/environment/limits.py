"""What the system lets a process have: shared memory, open files, the container's memory and processors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fullframe.doctor.environment import kinds
from fullframe.doctor.finding import Finding
from fullframe.wording import GIB

_NO_LIMIT = 2**60  # cgroup v1 says a huge number


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Plain numbers; None where nothing says."""

    shared_memory_bytes: int | None
    open_files: int | None
    locked_bytes: int | None  # None: unlimited
    memory_limit_bytes: int | None  # of the container; None: none
    memory_used_bytes: int | None
    processors_seen: int
    processors_given: float | None  # by the container's quota; None: all
    infiniband: tuple[str, ...] = ()


def cgroup_limits(root: Path) -> tuple[int | None, int | None, float | None]:
    """(memory limit, memory used without what can be dropped, processors) of this container, v2 or v1."""
    base = root / "sys/fs/cgroup"
    limit = _number(base / "memory.max", base / "memory/memory.limit_in_bytes")
    used = _number(base / "memory.current", base / "memory/memory.usage_in_bytes")
    dropped = _stat(base / "memory.stat") or _stat(base / "memory/memory.stat")
    used = None if used is None else max(used - dropped, 0)
    both = _text(base / "cpu.max").split()
    if len(both) == 2 and both[0] != "max":
        return _real(limit), used, int(both[0]) / int(both[1])
    quota, period = _number(base / "cpu/cpu.cfs_quota_us"), _number(base / "cpu/cpu.cfs_period_us")
    given = quota / period if quota and period and quota > 0 else None
    return _real(limit), used, given


def judged_limits(limits: Limits, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about what is too little."""
    shared = limits.shared_memory_bytes
    if shared is not None and shared < GIB:
        yield kinds.SMALL_SHARED_MEMORY.found(f"/dev/shm has {shared / 2**20:.0f} MiB")
    if limits.open_files is not None and limits.open_files < 4096:
        yield kinds.FEW_FILES.found(f"{limits.open_files} files may be open")
    most, used = limits.memory_limit_bytes, limits.memory_used_bytes
    if most is not None and used is not None and most - used < max(0.1 * most, GIB):
        yield kinds.LITTLE_MEMORY.found(f"{(most - used) / GIB:.2g} of {most / GIB:.3g} GiB are left")
    given = limits.processors_given
    if given is not None and given < limits.processors_seen and "OMP_NUM_THREADS" not in environment:
        yield kinds.CPU_QUOTA.found(
            f"this container is given {given:g} of {limits.processors_seen} processors, and OMP_NUM_THREADS is not set"
        )
    if limits.infiniband and limits.locked_bytes is not None:
        yield kinds.LOCKED_MEMORY.found(
            f"{limits.locked_bytes / 2**20:.3g} MiB may be locked, and there is {limits.infiniband[0]}"
        )


def _real(limit: int | None) -> int | None:
    return None if limit is None or limit >= _NO_LIMIT else limit


def _text(*paths: Path) -> str:
    for path in paths:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return ""


def _number(*paths: Path) -> int | None:
    text = _text(*paths)
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path) -> int:
    """Bytes of files that are kept in memory and can be dropped."""
    found = dict(line.split()[:2] for line in _text(path).splitlines() if len(line.split()) >= 2)
    return int(found.get("inactive_file", found.get("total_inactive_file", 0)))
