"""What split tensors cost the host: measured for a moment, of the right order, and gone again."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullframe.ranks.exchange import InFlight
from fullframe.simulation.clock.measured_host import measured_host

ATTEMPTS = 5  # a processor that others share may be slower for one of two measurements


def test_an_exchange_costs_more_than_a_function_and_nothing_is_left_behind() -> None:
    before = torch.get_num_threads()
    there = dist.is_initialized()

    def is_of_the_right_order() -> bool:
        found = measured_host("here", seconds=0.05)
        assert found.source == "here"
        return (
            1e-6 < found.function_seconds < found.exchange_seconds < 0.02
            and found.function_seconds < found.reduction_seconds < 0.02
        )

    assert any(is_of_the_right_order() for _ in range(ATTEMPTS))
    assert torch.get_num_threads() == before and dist.is_initialized() == there


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_slower_exchange_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    init = InFlight.__init__

    def slower(self: InFlight, *args: Any, **kwargs: Any) -> None:
        busy(5e-3)
        init(self, *args, **kwargs)

    def is_noticed() -> bool:
        usual = measured_host(seconds=0.02)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(InFlight, "__init__", slower)
            found = measured_host(seconds=0.02)
        return (
            4e-3 < found.exchange_seconds - usual.exchange_seconds < 7e-3
            and found.reduction_seconds < usual.reduction_seconds + 1e-3
        )

    assert any(is_noticed() for _ in range(ATTEMPTS))
