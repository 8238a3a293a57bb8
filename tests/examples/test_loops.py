"""The loops of the examples give on two ranks what they give in one process, whichever library steps."""

import difflib
import os
import runpy
from pathlib import Path

import pytest
import torch

from tests.ranks import rank_group

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


def test_few_lines_differ():
    before, after = ((EXAMPLES / "plain_loop" / name).read_text().splitlines() for name in ("before.py", "after.py"))
    differences = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert len(differences) <= MOST_LINES, "\n".join(differences)
    assert any("parallelize" in line for line in differences)


def with_library(name, *arguments):
    """The losses of the example that uses another library, started as torchrun would."""
    started = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", "1")}
    before = dict(os.environ)
    os.environ.update(started, MASTER_ADDR="localhost", MASTER_PORT="0")
    try:
        return runpy.run_path(str(EXAMPLES / name / "train.py"))["train"](*arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if name == "accelerate":
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


def test_accelerate_accumulates():
    alone = with_library("accelerate", "no", 2)
    assert alone[0] == pytest.approx(with_library("accelerate")[0], rel=1e-6)
    for found in rank_group(2).run(with_library, "accelerate", "no", 2):
        assert found == pytest.approx(alone, rel=1e-4)
