"""Rates: what lies between two measured sizes, files, and the timer."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fullframe.errors import DeviceError
from fullframe.simulation.devices.calibration import (
    Rates,
    calibrated,
    calibration_path,
    clock_of,
    load_rates,
    measured_now,
    rate_at,
    store_rates,
)
from fullframe.simulation.devices.host_costs import HostCosts


def rates(**changed: Any) -> Rates:
    facts: dict[str, Any] = {
        "device": "mine", "measured_on": "here", "date": "2026-01-01", "memory_bytes": 10, "launch_seconds": 1e-6,
        "matmul": {"fp32": ((1.0, 2.0), (3.0, 4.0))}, "convolution": {}, "depthwise": {}, "copy": ((8.0, 9.0),),
        "context_bytes": 7,
    }  # fmt: skip
    return Rates(**{**facts, **changed})


def test_a_rate_between_two_sizes_is_between_their_logarithms() -> None:
    points = ((1e3, 10.0), (1e5, 1000.0))
    assert rate_at(points, 1) == 10 and rate_at(points, 1e9) == 1000 and rate_at(points, 1e3) == 10
    assert math.isclose(rate_at(points, 1e4), 100.0)


def test_rates_are_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibrated("mine") is None
    path = store_rates(rates(link=((1.0, 2.0),)))
    assert path == calibration_path("mine") and str(path).startswith(str(tmp_path))
    assert calibrated("mine") == rates(link=((1.0, 2.0),))
    other = store_rates(rates(), tmp_path / "deep" / "other.json")
    assert load_rates(other) == rates()
    host = HostCosts(exchange_seconds=3e-4, source="here")
    assert load_rates(store_rates(rates(host=host), tmp_path / "host.json")) == rates(host=host)
    old = json.loads(other.read_text())
    del old["host"]  # as files of before it was measured are
    other.write_text(json.dumps(old))
    assert load_rates(other) == rates()


@pytest.mark.parametrize("text", ["", "[]", '{"device": "mine"}', '{"matmul": 3}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(DeviceError, match=r"broken\.json: .*measure again"):
        load_rates(path)
    with pytest.raises(DeviceError, match=r"missing\.json"):
        load_rates(tmp_path / "missing.json")


def test_this_machine_is_measured_once_and_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    found = measured_now("cpu", 1)
    assert found is measured_now("cpu", 1) and torch.get_num_threads() == before
    assert set(found.matmul) == {"fp32", "bf16", "fp64"} and found.link == ()
    assert all(rate > 0 for points in (*found.matmul.values(), found.copy) for _, rate in points)
    assert found.launch_seconds > 0 and found.context_bytes > 0


def test_one_thread_is_timed_by_its_own_work() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        now = clock_of(torch.device("cpu"))
        torch.set_num_threads(2)
        assert now is not clock_of(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
