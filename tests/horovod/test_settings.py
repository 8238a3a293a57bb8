"""Horovod's variables, in Horovod's units."""

import pytest

from fullframe.horovod.settings import Settings


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment() == Settings()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3.5")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "7")
    found = Settings.from_environment()
    assert (found.fusion_bytes, found.gradient_bytes) == (1 << 20, 1 << 20)
    assert (found.cycle_seconds, found.stall_seconds) == (0.0035, 7.0)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert Settings.from_environment().stall_seconds == 0.0
