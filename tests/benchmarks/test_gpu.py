"""The benchmark of GPUs where there is none: its parts on the CPU, what it prints, and when it gives up."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main, markdown, run
from benchmarks.gpu.child import answer
from benchmarks.gpu.exact import differences
from benchmarks.gpu.found import Found, difference
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.lone_rank import profiled
from benchmarks.gpu.loopback import loopback
from benchmarks.gpu.parts import PARTS, missing
from benchmarks.gpu.recipe import recipe
from benchmarks.gpu.several import bound, overlap, traced
from fullframe.spatial.tensor import SpatialTensor
from tests.rank_group import rank_group

BY_NAME = {part.name: part for part in PARTS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    assert capsys.readouterr().out.startswith("there is no GPU that torch can use here: torch ")


def test_every_part_is_there_and_one_gpu_takes_ten_minutes_at_most() -> None:
    assert sum(part.seconds for part in PARTS if part.gpus == 1) <= 600
    for part in PARTS:
        source = f"from benchmarks.gpu.{part.module} import {part.function or part.name}"
        exec(source, {})
    assert main(list=True) == 0 and main(only=("nothing",)) == 2
    assert missing(BY_NAME["bound"], "cuda", 1) == "it needs 2 GPUs, there is 1"
    assert missing(BY_NAME["bound"], "cpu", 0) == "it asks about GPUs"
    assert missing(BY_NAME["exact"], "cuda", 1) == missing(BY_NAME["exact"], "cpu", 0) == ""


def test_a_part_runs_in_a_process_of_its_own_and_is_ended_in_time(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert main(device="cpu", only=("facts,bound",), out=out, patience=20.0) == 0
    parts = json.loads(out.read_text())["parts"]
    assert parts["facts"]["rows"][0]["what"] == "machine" and parts["facts"]["failures"] == []
    assert parts["bound"]["skipped"] == "it asks about GPUs"
    late = run(BY_NAME["memory_time"], "cpu", 0, str(tmp_path), patience=0.001)
    assert late["failures"][0] == "not done after 0.13 s"


def test_rules_are_held_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels("cpu", ("max pool 3x3", "group norm", "cross entropy"))
    assert found.failures == [] and found.rows[0]["ops"] == 3
    local = SpatialTensor.local
    monkeypatch.setattr(SpatialTensor, "local", property(lambda x: local.__get__(x) * 1.05))
    wrong = kernels("cpu", ("group norm",))
    assert any("group norm, NCHW, float64, 1 channels: differs from fp64 by" in said for said in wrong.failures)


def test_parts_run_on_the_cpu() -> None:
    for name in ("precision", "lone_rank", "offload"):
        found = answer(BY_NAME[name], "cpu")
        assert found.rows and found.failures == [], name
    found = loopback("cpu")
    assert found.failures == [] and found.rows[-1]["both_ms"] > 0


def on_two_ranks() -> tuple[list[tuple[str, float]], dict[str, Any]]:
    unet = itertools.islice(differences(torch.device("cpu")), 2)
    return [(name, error) for name, _, _, error in unet], bound("cpu").rows[0]


def test_ranks_give_the_numbers_of_one_process() -> None:
    for errors, row in rank_group(2).run(on_two_ranks):
        assert [name for name, _ in errors] == ["UNet", "UNet"]
        assert errors[0][1] < 1e-9 and errors[1][1] < 2e-2
        assert row["ranks"] == 2 and 0 < row["share_of_bound"] < 5


def test_what_is_read_from_a_profile() -> None:
    model = torch.nn.Linear(4, 4)
    device = torch.device("cpu")
    assert set(profiled(lambda: model(torch.ones(1, 4)), device, 1.0)) == {"kernels", "busy_share", "waits"}
    assert traced(model, torch.ones(1, 4), device) == {"message_seconds": 0.0, "hidden_share": 1.0}
    #   messages  |========|   |===|      11 in all, of which 1 + 3 are hidden
    #   others           |=|     |======|
    assert overlap([(0, 5), (4, 8), (11, 14)], [(7, 8), (11, 12), (12, 20)]) == (11, 4)


def test_differences_are_of_the_largest_value() -> None:
    a, tiny = torch.tensor([100.0, 1.0]), torch.tensor([1e-9])
    assert difference([a], [a + 1]) == pytest.approx(0.01)
    assert difference([a, tiny], [a, -tiny]) < 1e-6  # zero but for rounding
    assert difference([a], [a[:1]]) == difference([a], [a * float("nan")]) == float("inf")


def test_what_is_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Found, "file", tmp_path / "found.json")
    found = Found()
    found.note(op="relu", seconds=0.123456)
    with found.trying("a case"):
        raise ValueError("no mesh\nat all")
    kept = json.loads((tmp_path / "found.json").read_text())
    text = markdown("kernels", {"seconds": 3.2, **kept})
    assert "## kernels (3 s)" in text and "| op | seconds |\n|---|---|\n| relu | 0.1235 |" in text
    assert text.rstrip().endswith("no mesh") and "- FAILED: a case: " in text
    assert markdown("bound", {"skipped": "why"}) == "## bound\n\nskipped: why\n"
    assert recipe().steps == 6
