"""Processes of ranks: what they are given, what is known of one that died, and that none is left behind."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fullframe.errors import MeshError
from fullframe.processes.rank_processes import Death, Ranks


def ended(folder: Path, script: str, count: int = 2) -> tuple[list[int | None], list[Death]]:
    """The exit codes of ranks that run `script`, and the deaths, once no rank runs."""
    with Ranks(count, ["-c", f"import os, sys, time, signal; {script}"], folder / "ranks", {"OF_ALL": "yes"}) as ranks:
        while ranks.running():
            time.sleep(0.05)
        return ranks.codes(), ranks.deaths()


def test_ranks_that_end_well(tmp_path: Path) -> None:
    script = "sys.exit(os.environ['OF_ALL'] != 'yes' or os.environ['WORLD_SIZE'] != '2')"
    assert ended(tmp_path, script) == ([0, 0], [])


def test_a_death_tells_rank_code_and_last_words(tmp_path: Path) -> None:
    codes, deaths = ended(tmp_path, "rank = int(os.environ['RANK']); print('no', file=sys.stderr); sys.exit(3 * rank)")
    assert codes == [0, 3]
    (death,) = deaths
    assert (death.rank, death.code, death.report, death.last_words) == (1, 3, {}, "no")
    assert str(death) == "rank 1 died (exit code 3)"


def test_a_death_by_a_signal_is_named() -> None:
    assert str(Death(0, -signal.SIGKILL, 0.0, {}, "")) == "rank 0 died (SIGKILL)"
    assert str(Death(0, -(signal.SIGRTMIN + 1), 0.0, {}, "")) == f"rank 0 died (signal {signal.SIGRTMIN + 1})"
    assert str(Death(2, 1, 0.0, {"summary": "KeyError: 'a'\nmore"}, "")) == "rank 2: KeyError: 'a'"


def test_a_signal_reaches_every_rank(tmp_path: Path) -> None:
    with Ranks(2, ["-c", "import time; time.sleep(1000)"], tmp_path / "ranks", {}) as ranks:
        ranks.send(signal.SIGKILL)
        while ranks.running():
            time.sleep(0.05)
        assert ranks.codes() == [-signal.SIGKILL] * 2


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_leaving_ends_those_that_run_with_their_children(tmp_path: Path) -> None:
    script = "import os, time; os.fork(); open(f'{os.environ[\"FOLDER\"]}/{os.getpid()}', 'w'); time.sleep(1000)"
    pids = tmp_path / "pids"
    pids.mkdir()
    with Ranks(2, ["-c", script], tmp_path / "ranks", {"FOLDER": str(pids)}):
        while len(os.listdir(pids)) < 4:
            time.sleep(0.05)
    for pid in map(int, os.listdir(pids)):
        deadline = time.monotonic() + 60
        while runs(pid):
            assert time.monotonic() < deadline, f"process {pid} was left behind"
            time.sleep(0.05)


def test_more_ranks_than_there_is_memory_for_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=250 * 2**20))
    with pytest.raises(MeshError, match=r"^3 ranks on this machine need more memory than it has, .*; start 2 at "):
        ended(tmp_path, "pass", count=3)
    assert not (tmp_path / "ranks").exists()
