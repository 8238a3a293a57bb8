"""Out of memory: the same step again with smaller microbatches, with the numbers of a run that had them from there."""

import gc
import json
import weakref

import pytest
import torch

import fullframe as ff
from fullframe.errors import RunError
from fullframe.training.faults.out_of_memory import cut_finer
from tests.training.tiny import Plain, loss, recipe


def numbers(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "step_seconds"} for line in lines]


class Short:
    """The loss of `tiny`, but in its `at`-th call memory runs out after the forward pass."""

    def __init__(self, at, error):
        self.at, self.error, self.calls, self.output = at, error, 0, lambda: None

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == self.at + 1:
            gc.collect()
            assert self.output() is None, "what the failed step computed is still held when it is taken again"
        total, count = loss(model, batch)
        if self.calls == self.at:
            output = model(batch["image"])
            self.output = weakref.ref(output)
            raise self.error()
        return total, count


def on_the_gpu():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def on_the_host():
    return RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory")


def of_a_library():
    return RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize("error", [on_the_gpu, on_the_host, of_a_library])
def test_a_process_alone_takes_the_step_again(tmp_path, error):
    messages = []
    ff.fit(recipe(loss=Short(3, error)), ff.Strategy(), tmp_path / "run", steps=5, on_message=messages.append)
    ff.fit(recipe(), ff.Strategy(), tmp_path / "calm", steps=2)
    ff.fit(recipe(), ff.Strategy(microbatches=2), tmp_path / "calm", steps=5, resume=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "calm"), "running statistics and dropout too"
    said = [message for message in messages if message.startswith("out of memory in step 3 (")]
    assert len(said) == 1 and "): going on with 2 microbatches; batch norm now takes" in said[0]
    assert json.loads((tmp_path / "run" / "strategy.json").read_text())["microbatches"] == 2


def test_recomputed_blocks_go_on_as_well(tmp_path):
    strategy = ff.Strategy(recompute="blocks", recompute_modules=("body", "head"))
    ff.fit(recipe(loss=Short(3, on_the_gpu)), strategy, tmp_path / "run", steps=5)
    ff.fit(recipe(), ff.Strategy(), tmp_path / "calm", steps=2)
    ff.fit(recipe(), ff.Strategy(microbatches=2), tmp_path / "calm", steps=5, resume=True)
    for found, wanted in zip(numbers(tmp_path / "run"), numbers(tmp_path / "calm"), strict=True):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_batch_norm_is_mentioned_only_where_there_is_some(tmp_path):
    messages = []
    job = recipe(model=Plain, loss=Short(1, on_the_gpu))
    ff.fit(job, ff.Strategy(), tmp_path, steps=1, on_message=messages.append)
    assert messages[0].endswith("Tried to allocate 2.00 GiB): going on with 2 microbatches")


def test_the_counts_are_divisors_of_a_replicas_batch():
    assert cut_finer(ff.Strategy(), 6, "").microbatches == 2
    assert cut_finer(ff.Strategy(microbatches=2), 6, "").microbatches == 6
    assert cut_finer(ff.Strategy(data=3), 6, "").microbatches == 2
    with pytest.raises(RunError, match="2 microbatches cannot be cut finer, for each holds one sample; recompute act"):
        cut_finer(ff.Strategy(data=3, microbatches=2), 6, "2 GiB")
    with pytest.raises(RunError, match="cannot be cut finer, for update_in_backward takes one"):
        cut_finer(ff.Strategy(update_in_backward=True), 6, "")


def test_one_sample_that_does_not_fit_is_an_error(tmp_path):
    def never(model, batch):
        loss(model, batch)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(RunError, match=r"out of memory \(CUDA out of memory\), and 4 microbatches cannot be cut finer"):
        ff.fit(recipe(loss=never), ff.Strategy(), tmp_path, steps=2)


def test_out_of_memory_in_the_update_is_an_error(tmp_path):
    class Large(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(RunError, match="while the parameters were updated"):
        ff.fit(recipe(optimizer=lambda p: Large(p, lr=1.0)), ff.Strategy(), tmp_path, steps=2)


def test_another_exception_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="no room for doubt"):
        ff.fit(recipe(loss=Short(2, lambda: RuntimeError("no room for doubt"))), ff.Strategy(), tmp_path, steps=3)
