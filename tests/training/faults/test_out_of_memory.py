"""Out of memory: the same step again with smaller microbatches, with the numbers of a run that had them from there."""

import gc
import json
import shutil
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import RunError, StrategyError
from fullframe.observation.out_of_memory.account import read_out_of_memory
from fullframe.processes.launch import launch
from fullframe.ranks import channel, device
from fullframe.recipe import load_recipe
from fullframe.training.faults.out_of_memory import by_one_that_is_through, cut_finer
from tests.rank_group import RankFailure, rank_group
from tests.training import tiny
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


def without_work_space():
    return RuntimeError("GET was unable to find an engine to execute this computation")


@pytest.mark.parametrize("error", [on_the_gpu, on_the_host, of_a_library, without_work_space])
def test_a_process_alone_takes_the_step_again(tmp_path, monkeypatch, error):
    monkeypatch.setattr(channel, "is_short_of_memory", lambda: error is without_work_space)
    messages = []
    short = recipe(loss=Short(3, error))
    found = ff.fit(short, ff.Strategy(), tmp_path / "run", steps=5, on_message=messages.append).state_dict()
    ff.fit(recipe(), ff.Strategy(), tmp_path / "calm", steps=2)
    calm = ff.fit(recipe(), ff.Strategy(microbatches=2), tmp_path / "calm", steps=5, resume=True).state_dict()
    assert numbers(tmp_path / "run") == numbers(tmp_path / "calm"), "dropout too"
    assert all(torch.equal(value, calm[name]) for name, value in found.items()), "running statistics too"
    said = [message for message in messages if message.startswith("out of memory in step 3 (")]
    assert len(said) == 1 and "): going on with 2 microbatches; batch norm now takes" in said[0]
    assert json.loads((tmp_path / "run" / "strategy.json").read_text())["microbatches"] == 2


def test_a_kernel_that_is_not_there_is_no_matter_of_memory(tmp_path):
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        ff.fit(recipe(loss=Short(2, without_work_space)), ff.Strategy(), tmp_path, steps=3)


def written_by(through):
    """Who acts where rank 0's device gets `through` its work, or waits for ever; what is there when it goes on."""
    rank, acted = dist.get_rank(), []
    device.is_through, before = lambda seconds: through or rank == 1, device.is_through
    what = f"state {through}"

    def act():
        time.sleep(0.5)
        acted.append(rank)
        dist.distributed_c10d._get_default_store().set(f"{what} of the test", str(rank))

    try:
        dist.barrier()
        if rank and through:  # so that rank 0 is the first
            dist.distributed_c10d._get_default_store().wait([f"fullframe: {what}"])
        by_one_that_is_through(what, act)
        is_there = dist.distributed_c10d._get_default_store().check([f"{what} of the test"])
    finally:
        device.is_through = before
    dist.barrier()
    return acted, is_there


def test_a_rank_whose_device_waits_for_ever_leaves_the_writing_to_another():
    assert rank_group(2).run(written_by, True) == [([0], True), ([], True)]
    assert rank_group(2).run(written_by, False) == [([], True), ([1], True)]


class Once:
    """`loss`, in whose `at`-th call memory runs out."""

    def __init__(self, loss, at=1):
        self.loss, self.at, self.calls = loss, at, 0

    def __call__(self, model, batch):
        self.calls += 1
        total = self.loss(model, batch)
        if self.calls == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return total


def replacing(model, batch):
    batch["image"] = batch["image"] / 2
    return loss(model, batch)


def writing(model, batch):
    batch["image"] /= 2
    return loss(model, batch)


def moving(model, batch):
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data.mul_(0.5)
    return loss(model, batch)


def half_frozen():
    model = Plain()
    model.layers[0].requires_grad_(False)
    return model


def test_what_a_loss_changes_in_its_batch_is_not_changed_twice(tmp_path):
    job = {"model": Plain, "steps": 1}
    ff.fit(recipe(loss=replacing, **job), ff.Strategy(microbatches=2), tmp_path / "calm")
    ff.fit(recipe(loss=Once(replacing), **job), ff.Strategy(), tmp_path / "cut")
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "calm")
    ff.fit(
        recipe(loss=replacing, **job),
        ff.Strategy(recompute="budget", recompute_modules=("layers.0",), recompute_budget_bytes=2**30),
        tmp_path / "budget",
    )
    assert numbers(tmp_path / "budget")[0]["loss"] == pytest.approx(numbers(tmp_path / "calm")[0]["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "did", "does"),
    [(writing, "written into its batch", "writes into"), (moving, "moved frozen", "writes to parameters")],
)
def test_a_step_that_cannot_be_undone_is_not_taken_again(tmp_path, changes, did, does):
    for at in (1, 3):
        with pytest.raises(RunError, match=f"cannot be taken again, for it has {did}.*--resume --microbatches 2"):
            ff.fit(recipe(loss=Once(changes, at), model=half_frozen), ff.Strategy(), tmp_path / f"run{at}", steps=4)
    budget = ff.Strategy(recompute="budget", recompute_modules=("layers.0",), recompute_budget_bytes=2**30)
    with pytest.raises(StrategyError, match=f"runs the loss once before the first step, and it {does}"):
        ff.fit(recipe(loss=changes, model=half_frozen), budget, tmp_path / "budget")


BOTH_RUN_OUT = """
import sys, torch
import torch.distributed as dist
from fullframe.cli.application import run
from fullframe.ranks import device
from tests.training import tiny

device.is_through = lambda seconds: dist.get_rank() == 1  # rank 0's waits for a message of rank 1
sys.exit(run(sys.argv[1:]))
"""
RECIPE = """
import os, torch
from tests.training import tiny
steps = 0

def loss(model, batch):
    global steps
    steps += 1
    if steps == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return tiny.loss(model, batch)

def recipe():
    return tiny.recipe(loss=loss, steps=4)
"""


def trained(run_dir, microbatches, steps, resume):
    ff.fit(recipe(), ff.Strategy(data=2, microbatches=microbatches), run_dir, steps=steps, resume=resume)


def test_several_ranks_run_out_at_once(tmp_path):
    (tmp_path / "job.py").write_text(RECIPE)
    run_dir = tmp_path / "run"
    words = ["train", tmp_path / "job.py", "--data", 2, "--run-dir", run_dir, "--checkpoint-every", 100]
    assert launch(2, ["-c", BOTH_RUN_OUT, *map(str, words)], restarts=1) == 0
    log = (run_dir / "log.txt").read_text()
    assert "started again: rank" in log and "resumed after step 2" in log, "the state before the step was written"
    assert json.loads((run_dir / "strategy.json").read_text())["microbatches"] == 2
    rank_group(2).run(trained, tmp_path / "calm", 1, 2, False)
    rank_group(2).run(trained, tmp_path / "calm", 2, 4, True)
    assert [line["loss"] for line in numbers(run_dir)] == [line["loss"] for line in numbers(tmp_path / "calm")]


EVALUATED = """
import os, torch
import torch.distributed as dist
from tests.training import tiny

def evaluate(model, batch):
    if os.environ.get("TOO_LARGE") and dist.get_rank() == dist.get_world_size() - 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return tiny.evaluate(model, batch)

def recipe():
    data = {"evaluation_data": lambda: tiny.Frames(augment=False), "evaluate": evaluate, "evaluate_every": 2}
    return tiny.recipe(steps=4, **data)
"""


def resumed(path, run_dir):
    ff.fit(load_recipe(path), ff.Strategy(data=2), run_dir, resume=True, checkpoint_every=100)


def test_an_evaluation_that_does_not_fit_ends_the_run_with_its_state_kept(tmp_path, monkeypatch, capfd):
    (tmp_path / "job.py").write_text(EVALUATED)
    run_dir = tmp_path / "run"
    words = ["train", tmp_path / "job.py", "--data", 2, "--checkpoint-every", 100, "--run-dir", run_dir]
    with monkeypatch.context() as meanwhile:
        meanwhile.setenv("TOO_LARGE", "1")
        assert launch(2, ["-m", "fullframe.cli", *map(str, words)], restarts=1) == 2, "and it is not tried again"
    said = capfd.readouterr().err
    assert "error: out of memory in the evaluation after step 2 (CUDA out of memory. Tried to allocate 2.00 Gi" in said
    assert "; the state after step 2 is kept, for --resume. An evaluation takes one sample at a time: give" in said
    found = read_out_of_memory(run_dir)
    assert found is not None and (found.step, found.rank, found.phase) == (2, 1, "evaluation")
    assert found.source.startswith('raise torch.OutOfMemoryError("CUDA out') and not found.live.bytes
    rank_group(2).run(resumed, tmp_path / "job.py", run_dir)
    assert [(line["step"], "entropy" in line) for line in numbers(run_dir)] == [(n, n % 2 == 0) for n in (1, 2, 3, 4)]


def test_an_evaluation_of_a_process_alone_that_does_not_fit(tmp_path):
    fits = [False]

    def evaluate(model, batch):
        if not fits[0]:
            raise MemoryError
        return tiny.evaluate(model, batch)

    measured = {"evaluation_data": lambda: tiny.Frames(augment=False), "evaluate": evaluate, "evaluate_every": 2}
    with pytest.raises(RunError, match=r"evaluation after step 2 \(MemoryError\); the state after step 2 is kept, for"):
        ff.fit(recipe(**measured), ff.Strategy(), tmp_path / "run", steps=4)
    fits[0] = True
    ff.fit(recipe(**measured), ff.Strategy(), tmp_path / "run", steps=4, resume=True)
    ff.fit(recipe(**measured), ff.Strategy(), tmp_path / "calm", steps=4)
    kept, calm = numbers(tmp_path / "run"), numbers(tmp_path / "calm")
    assert [line["loss"] for line in kept] == [line["loss"] for line in calm] and kept[3] == calm[3]


def evaluated_wrongly(folder, wrong_rank):
    def evaluate(model, batch):
        if wrong_rank in (None, dist.get_rank()):
            raise KeyError("no such score")
        return tiny.evaluate(model, batch)

    measured = {"evaluation_data": lambda: tiny.Frames(augment=False), "evaluate": evaluate, "evaluate_every": 2}
    ff.fit(recipe(**measured), ff.Strategy(width=dist.get_world_size()), folder, steps=4)


@pytest.mark.parametrize(("ranks", "wrong_rank"), [(1, None), (2, None), (2, 1)])
def test_a_wrong_evaluation_costs_no_steps(tmp_path, ranks, wrong_rank):
    with pytest.raises(RankFailure, match="KeyError: 'no such score'"):
        rank_group(ranks).run(evaluated_wrongly, tmp_path, wrong_rank)
    assert "the evaluation after step 2 failed; the state is kept, for --resume" in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").exists()


def test_a_run_that_begins_anew_in_the_same_process_keeps_its_state_again(tmp_path):
    """In a notebook, say: the folder was removed, and the evaluation is as wrong as before."""
    ff.init_mesh()
    for _ in range(2):
        with pytest.raises(KeyError):
            evaluated_wrongly(tmp_path / "run", None)
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
        shutil.rmtree(tmp_path / "run")


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
