"""Hosts as users write them, and who is which rank on them."""

from pathlib import Path

import pytest

from fullframe.errors import MeshError
from fullframe.horovod.launcher.hosts import discover, parse_hosts, read_hostfile, seats


def test_hosts() -> None:
    assert parse_hosts("a:4,b:2") == {"a": 4, "b": 2}
    for wrong in ("a", "a:0", "a:x", ":3", "a:1,,b:1"):
        with pytest.raises(MeshError, match="host:slots"):
            parse_hosts(wrong)


def test_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("aa slots=2\n\n# no longer: bb slots=2\ncc slots=3 # new\n")
    assert read_hostfile(tmp_path / "hosts") == {"aa": 2, "cc": 3}
    (tmp_path / "twice").write_text("aa slots=2\nbb slots=1\naa slots=1\n")
    assert read_hostfile(tmp_path / "twice") == parse_hosts("aa:2,bb:1,aa:1") == {"aa": 3, "bb": 1}
    with pytest.raises(MeshError, match="no host file"):
        read_hostfile(tmp_path / "none")


def test_seats() -> None:
    #  a: ranks 0 1    b: ranks 2 3 4    c: full before it is reached
    found = seats({"a": 2, "b": 3, "c": 1}, 5)
    assert [(s.host, s.rank, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in found] == [
        ("a", 0, 0, 2, 0, 2),
        ("a", 1, 1, 2, 0, 2),
        ("b", 2, 0, 3, 1, 2),
        ("b", 3, 1, 3, 1, 2),
        ("b", 4, 2, 3, 0, 1),
    ]
    with pytest.raises(MeshError, match="7 processes need 7 slots, a:2, b:3 have 5"):
        seats({"a": 2, "b": 3}, 7)


def test_discovery(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho a:2\necho b\n")
    script.chmod(0o755)
    assert discover(str(script), 3) == {"a": 2, "b": 3}
    with pytest.raises(MeshError, match="'b' without slots"):
        discover(str(script), None)
    script.write_text("#!/bin/sh\necho nothing here >&2\nexit 1\n")
    with pytest.raises(MeshError, match=r"failed.*nothing here"):
        discover(str(script), None)
    with pytest.raises(MeshError, match="failed"):
        discover(str(tmp_path / "none"), None)
