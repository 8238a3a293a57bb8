"""The loops of the examples give on two ranks what they give in one process, whichever library steps."""

import difflib
import os
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

from examples.shapes import Network
from tests.rank_group import rank_group

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 5


def losses_of(script):
    """What the script's loop computes, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return runpy.run_path(str(EXAMPLES / script))["losses"]
    finally:
        torch.set_default_dtype(before)


def test_one_process_and_two_ranks_see_the_same_losses():
    alone = losses_of("plain_loop/before.py")
    assert len(alone) == 6 and alone[-1] < alone[0]
    assert losses_of("plain_loop/after.py") == pytest.approx(alone, rel=1e-12)
    for found in rank_group(2).run(losses_of, "plain_loop/after.py"):
        assert found == pytest.approx(alone, rel=1e-10)


def without_batch_norm():
    """The example's network; its batch norm takes the statistics of one replica."""
    network = Network()
    network.down[1], network.down[4] = (torch.nn.GroupNorm(4, channels) for channels in (16, 32))
    return network


def ignoring(width, naively=False):
    """The losses, in float64, of a loop whose replicas leave out unequally many pixels; the mean over the replicas."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        ignored = runpy.run_path(str(EXAMPLES / "plain_loop" / "ignored.py"))
        ignored["train"].__globals__["Network"] = without_batch_norm
        if naively:  # as `F.cross_entropy(..., ignore_index=...)` has it on each replica
            ignored["train"].__globals__["mean_over_batch"] = lambda summed, count, mesh: summed / count
        losses = torch.tensor(ignored["train"](width))
    finally:
        torch.set_default_dtype(before)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(losses)
        losses /= torch.distributed.get_world_size()
    return losses.tolist()


@pytest.mark.parametrize(("ranks", "width"), [(2, 1), (2, 2), (4, 2)])
def test_pixels_that_are_left_out_weigh_nothing_on_any_replica(ranks, width):
    alone = ignoring(1)
    for found in rank_group(ranks).run(ignoring, width):
        assert found == pytest.approx(alone, rel=1e-9)
    if ranks > width:
        naive = rank_group(ranks).run(ignoring, width, True)[0]
        assert naive[0] != pytest.approx(alone[0], rel=1e-6)  # or the example would show nothing


def test_few_lines_differ():
    before, after = ((EXAMPLES / "plain_loop" / name).read_text().splitlines() for name in ("before.py", "after.py"))
    differences = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert len(differences) <= MOST_LINES, "\n".join(differences)
    assert any("parallelize" in line for line in differences)


def with_library(name, *arguments, network=None, **options):
    """The losses of the example that uses another library, started as torchrun would."""
    started = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", "1")}
    before = dict(os.environ)
    os.environ.update(started, MASTER_ADDR="localhost", MASTER_PORT="0")
    try:
        train = runpy.run_path(str(EXAMPLES / name / "train.py"))["train"]
        if network is not None:
            train.__globals__["Network"] = network
        return train(*arguments, **options)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if name in ("accelerate", "hugging_face_trainer"):
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)  # one precision in a process


@pytest.mark.parametrize("library", ["fabric", "accelerate"])
def test_other_libraries_step(library):
    pytest.importorskip("lightning_fabric" if library == "fabric" else library)
    alone = with_library(library)
    assert len(alone) == 6 and alone[-1] < alone[0]
    first, second = rank_group(2).run(with_library, library)
    assert first == second == pytest.approx(alone, rel=1e-4)
    half = "bf16-mixed" if library == "fabric" else "bf16"
    for found in rank_group(2).run(with_library, library, half):
        assert found != first and found == pytest.approx(alone, rel=0.02)


def test_lightnings_trainer_trains():
    pytest.importorskip("lightning")
    alone = with_library("lightning_trainer")
    assert len(alone) == 6 and alone[-1] < alone[0]
    first, second = rank_group(2).run(with_library, "lightning_trainer")
    assert first == second == pytest.approx(alone, rel=1e-4)


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def hugging_face(width, resume=None, **options):
    """Losses of all batches, and three measures of the evaluation, in float64 but where bf16 is spoken of."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if "bf16" in options else torch.float64)
    try:
        losses, measures = with_library("hugging_face_trainer", width, resume, network=without_batch_norm, **options)
    finally:
        torch.set_default_dtype(before)
    return losses + [measures[f"eval_{name}"] for name in ("loss", "accuracy", "images")]


def test_hugging_faces_trainer_trains_and_evaluates():
    alone = hugging_face(1)
    assert len(alone) == 9 and alone[5] < alone[0] and alone[-1] == 8
    for ranks, width in ((2, 2), (2, 1), (4, 2)):
        for found in rank_group(ranks).run(hugging_face, width):
            assert found == pytest.approx(alone, rel=1e-9)


def test_hugging_faces_trainer_accumulates():
    alone = hugging_face(1)
    for found in (hugging_face(1, **ACCUMULATED), *rank_group(4).run(partial(hugging_face, 2, **ACCUMULATED))):
        pairs = torch.tensor(found[:-3], dtype=torch.float64).reshape(-1, 2).mean(1).tolist()
        assert pairs + found[-3:] == pytest.approx(alone, rel=1e-9)


def test_hugging_faces_trainer_takes_bf16():
    fp32, alone = hugging_face(1, bf16=False), hugging_face(1, bf16=True)
    assert alone[0] != fp32[0]
    for found in rank_group(2).run(partial(hugging_face, 2, bf16=True)):
        assert found[:6] == pytest.approx(alone[:6], rel=0.01)


@pytest.mark.parametrize(("step", "options"), [(4, {}), (3, {}), (3, ACCUMULATED)])  # of two an epoch
def test_hugging_faces_trainer_resumes_on_another_mesh(step, options, tmp_path):
    whole = hugging_face(1, save_strategy="steps", save_steps=step, output_dir=str(tmp_path), **options)
    begun = str(tmp_path / f"checkpoint-{step}")
    again = partial(hugging_face, 2, begun, output_dir=str(tmp_path / "again"), **options)
    for found in rank_group(4).run(again):
        assert found == pytest.approx(whole[step * options.get("gradient_accumulation_steps", 1) :], rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_resumes_with_weights_position_and_learning_rate(ranks, tmp_path):
    pytest.importorskip("accelerate")
    group = rank_group(ranks)
    (whole, *_) = group.run(with_library, "accelerate")
    state = str(tmp_path / "state")
    begun = group.run(with_library, "accelerate", "no", 1, 1, None, state)
    ended = group.run(with_library, "accelerate", "no", 1, 2, state)
    for first, second in zip(begun, ended, strict=True):
        assert first + second == pytest.approx(whole, rel=1e-6)


def test_accelerate_accumulates():
    alone = with_library("accelerate", "no", 2)
    assert alone[0] == pytest.approx(with_library("accelerate")[0], rel=1e-6)
    for found in rank_group(2).run(with_library, "accelerate", "no", 2):
        assert found == pytest.approx(alone, rel=1e-4)
