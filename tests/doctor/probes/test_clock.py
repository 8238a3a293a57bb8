"""Seconds that pass for a loop: not those in which other programs have its core."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fullframe.doctor.probes import clock
from fullframe.doctor.probes.loading import Loading
from fullframe.doctor.probes.notes import BatchRead, Event
from fullframe.processes import cores

_HOUR = 3600 * 10**9  # nanoseconds


def test_time_without_a_core_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "schedstat"
    monkeypatch.setattr(cores, "_MAIN", kept)
    before = clock.seconds()  # a kernel that keeps no such file
    kept.write_text("7 0 1")
    assert clock.seconds() >= before
    kept.write_text(f"7 {_HOUR} 2")
    assert clock.seconds() < before


def test_a_loader_is_not_blamed_for_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "schedstat"
    kept.write_text("7 0 1")
    monkeypatch.setattr(cores, "_MAIN", kept)

    class Interrupted(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> torch.Tensor:
            kept.write_text(f"7 {_HOUR} 2")
            return torch.zeros(1)

    events: list[Event] = []
    with Loading(events.append).attached():
        list(DataLoader(Interrupted()))
    (read,) = [event for event in events if isinstance(event, BatchRead)]
    assert read.waited == 0.0
