"""Planted containers."""

from dataclasses import replace
from pathlib import Path

import pytest

from fullframe.doctor.environment.limits import Limits, cgroup_limits, judged_limits

GIB = 2**30
ROOMY = Limits(
    shared_memory_bytes=8 * GIB,
    open_files=65536,
    locked_bytes=None,
    memory_limit_bytes=None,
    memory_used_bytes=None,
    processors_seen=8,
    processors_given=None,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


def test_both_versions_of_cgroups_are_read(tmp_path: Path) -> None:
    second = {
        "memory.max": "4096\n",
        "memory.current": "3000",
        "memory.stat": "inactive_file 1000\nx 1",
        "cpu.max": "150000 100000",
    }
    assert cgroup_limits(write(tmp_path / "2", second)) == (4096, 2000, 1.5)
    first = {
        "memory/memory.limit_in_bytes": "4096",
        "memory/memory.usage_in_bytes": "3000",
        "memory/memory.stat": "total_inactive_file 500",
        "cpu/cpu.cfs_quota_us": "200000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    assert cgroup_limits(write(tmp_path / "1", first)) == (4096, 2500, 2.0)


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == (None, None, None)
    assert cgroup_limits(write(tmp_path / "2", {"memory.max": "max", "cpu.max": "max 100000"})) == (None, None, None)
    first = {
        "memory/memory.limit_in_bytes": str(2**63 - 4096),
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "1",
    }
    assert cgroup_limits(write(tmp_path / "1", first)) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"shared_memory_bytes": 64 << 20}, ["FF204"]),
        ({"open_files": 1024}, ["FF205"]),
        ({"memory_limit_bytes": 16 * GIB, "memory_used_bytes": 4 * GIB}, []),
        ({"memory_limit_bytes": 16 * GIB, "memory_used_bytes": 15 * GIB}, ["FF206"]),
        ({"processors_given": 2.0}, ["FF207"]),
        ({"locked_bytes": 65536}, []),  # without InfiniBand
        ({"locked_bytes": 65536, "infiniband": ("mlx5_0",)}, ["FF208"]),
    ],
)
def test_what_is_too_little(changes: dict[str, object], expected: list[str]) -> None:
    assert [finding.code for finding in judged_limits(replace(ROOMY, **changes), {})] == expected


def test_threads_that_were_chosen_are_left_alone() -> None:
    assert list(judged_limits(replace(ROOMY, processors_given=2.0), {"OMP_NUM_THREADS": "2"})) == []
