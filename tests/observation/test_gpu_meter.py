"""What the driver says of a rank's own GPU; the driver is a stand-in."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fullframe as ff
from fullframe.observation.gpu_meter import GpuMeter, meter_of_rank
from fullframe.observation.memory.timeline import Timeline
from fullframe.observation.run_files import read_run
from fullframe.observation.summary import summarize
from tests.observation.fake_nvml import GIB, FakeNvml
from tests.training.tiny import recipe


@dataclass
class Clock:
    now: float = 100.0
    calls: int = field(default=0, init=False)

    def __call__(self) -> float:
        return self.now


def meter(holders: Any, gpu: str = "1a2b3c4d-0000", clock: Any = None, **more: Any) -> GpuMeter:
    return GpuMeter(gpu, FakeNvml(holders=[{}, holders], **more), clock or Clock())


def test_own_use_and_what_others_hold() -> None:
    found = meter({os.getpid(): 5 * GIB, 7: 2 * GIB, 8: GIB}).look()
    assert found == {"gpu_percent": 37.0, "others_bytes": 3 * GIB}
    assert meter({os.getpid(): 5 * GIB}, gpu="GPU-1a2b3c4d-0000").look()["others_bytes"] == 0


def test_the_driver_is_asked_once_a_second() -> None:
    clock = Clock()
    one = meter({os.getpid(): GIB}, clock=clock)
    assert one.look() and not one.look()
    clock.now += 1.0
    assert one.look()


def test_what_is_not_known_is_not_said() -> None:
    assert meter({7: GIB}).look() == {"gpu_percent": 37.0}, "from within a container: which of them is this one?"
    assert meter({os.getpid(): GIB, 7: None}).look() == {"gpu_percent": 37.0}
    assert meter({}, gpu="9f9f-0000").look() == {}, "another machine's"
    assert meter({}, tells_percent=False).look() == {}
    assert meter({}, has_driver=False).look() == {}
    assert meter_of_rank() is None, "no GPU is in use here"


def test_it_is_in_the_timeline_and_others_are_told(tmp_path: Path) -> None:
    held = {os.getpid(): GIB, 7: 30 * GIB}
    observers = [Timeline(meter=lambda: meter(held))]
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=2, observers=observers)
    run = read_run(tmp_path)
    first = run.observed[0][0]
    assert (first.gpu_percent, first.others_bytes) == (37.0, 30 * GIB)
    summary = summarize(run)
    assert summary.ranks[0].gpu_percent == 37.0, "of the step that asked"
    (finding,) = [one for one in summary.findings if "other processes" in one.text]
    assert finding == ("warn", "other processes hold 30 GiB of rank 0's GPU", "fullframe watch gpus")
