"""What a rank notes when memory runs out: by a real allocation that fails on the CPU, and with a GPU's figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fullframe as ff
from fullframe.observation.memory.timeline import Timeline
from fullframe.observation.out_of_memory.account import OutOfMemory, read_out_of_memory
from fullframe.observation.out_of_memory.note import OutOfMemoryNotes
from tests.training.tiny import loss, recipe

GIB = 2**30
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 1.00 GiB is free."
    " Including non-PyTorch memory, this process has 15.00 GiB memory in use. Of the allocated memory 11.00 GiB is "
    "allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
)


class Short:
    """The loss of `tiny`, but in its `at`-th call memory runs out, by itself or with an error."""

    def __init__(self, at: int, error: Exception | None = None):
        self.at, self.error, self.calls = at, error, 0

    def __call__(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            if self.error is not None:
                raise self.error
            torch.empty(2**50, dtype=torch.uint8)  # never fits
        return loss(model, batch)


class OutInForward(torch.nn.Module):
    """Its second layer asks for too much in the step `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 4, 1).double(), Greedy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Greedy(torch.nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Greedy.calls += 1
        if Greedy.calls == 1:
            torch.empty(2**50, dtype=torch.uint8)
        return x


def noted(run_dir: Path, *observers: Any, steps: int = 4, **changes: Any) -> OutOfMemory:
    ff.fit(recipe(**changes), ff.Strategy(), run_dir, steps=steps, observers=observers)
    found = read_out_of_memory(run_dir)
    assert found is not None
    return found


def test_a_real_one_on_the_cpu(tmp_path: Path) -> None:
    timeline = Timeline()
    found = noted(tmp_path, timeline, OutOfMemoryNotes(lambda: timeline.live), loss=Short(3))
    assert (found.step, found.rank, found.asked_bytes, found.phase) == (3, 0, 2**50, "forward")
    assert found.line.endswith("test_note.py:" + found.line.rpartition(":")[2]) and "torch.empty(2**50" in found.source
    assert found.allocated_bytes is None and found.unused_bytes is None, "the CPU's allocator counts nothing"
    assert found.host_bytes and found.host_bytes > 2**20 and found.limit_bytes and found.free_bytes
    assert found.devices == "1xcpu" and found.batch_size == 4 and found.strategy["microbatches"] == 1
    assert found.live.when.startswith("the peak of step 2") and found.live.bytes["parameter"] > 0
    assert sum(found.live.bytes.values()) == found.live.peak_bytes and found.live.modules


def test_in_the_step_that_is_followed_what_was_live_until_then(tmp_path: Path) -> None:
    timeline = Timeline()
    found = noted(tmp_path, timeline, OutOfMemoryNotes(lambda: timeline.live), loss=Short(2))
    assert found.step == 2 and found.live.when.startswith("step 2 until then") and found.live.bytes["optimizer"] > 0


def test_the_module_whose_forward_asked(tmp_path: Path) -> None:
    Greedy.calls = 0
    found = noted(tmp_path, OutOfMemoryNotes(), steps=1, model=OutInForward)
    assert found.module == "second (Greedy)" and "torch.empty" in found.source and not found.live.bytes


def test_on_a_gpu_what_the_error_says_goes_before_what_is_counted_later(tmp_path: Path) -> None:
    counted = {"allocated_bytes": 2 * GIB, "reserved_bytes": 15 * GIB, "limit_bytes": 17 * GIB, "free_bytes": GIB}
    error = torch.OutOfMemoryError(SAID)
    found = noted(tmp_path / "a", OutOfMemoryNotes(counted=lambda: counted), loss=Short(1, error))
    assert (found.allocated_bytes, found.reserved_bytes, found.unused_bytes) == (11 * GIB, 14 * GIB, 3 * GIB)
    assert found.limit_bytes == 16 * GIB and found.others_bytes == 0 and found.is_fragmented
    short = torch.OutOfMemoryError("CUDA out of memory.")
    found = noted(tmp_path / "b", OutOfMemoryNotes(counted=lambda: counted), loss=Short(1, short))
    assert (found.unused_bytes, found.limit_bytes, found.asked_bytes) == (13 * GIB, 17 * GIB, None)


def test_what_fails_in_noting_is_not_what_is_met(tmp_path: Path) -> None:
    def broken() -> dict[str, int]:
        raise ZeroDivisionError("of the counters")

    model = ff.fit(
        recipe(loss=Short(2)), ff.Strategy(), tmp_path, steps=3, observers=[OutOfMemoryNotes(counted=broken)]
    )
    assert model is not None and read_out_of_memory(tmp_path) is None


def test_a_launch_begins_without_notes_but_ranks_that_start_again_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(tmp_path, OutOfMemoryNotes(), loss=Short(1), steps=1)
    (tmp_path / "oom.json").write_text(json.dumps({"step": 1}))
    with monkeypatch.context() as context:
        context.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        ff.fit(recipe(), ff.Strategy(), tmp_path, steps=2, observers=[OutOfMemoryNotes()])
        assert read_out_of_memory(tmp_path) is not None
    ff.fit(recipe(), ff.Strategy(), tmp_path, steps=3, resume=True, observers=[OutOfMemoryNotes()])
    assert read_out_of_memory(tmp_path) is None and list((tmp_path / "oom").iterdir()) == []
