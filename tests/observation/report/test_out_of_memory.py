"""The page of a step that ran out of memory, and its section of the report, in a real browser."""

import json
from pathlib import Path
from typing import Any

import pytest

from fullframe.observation.report.out_of_memory import out_of_memory as section
from fullframe.observation.report.page import page, write_out_of_memory
from fullframe.observation.run_files import read_run
from tests.observation.browser import CHROMIUM, opened
from tests.observation.run_writer import WAYS, good_run, out_of_memory

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; .ci/run installs it as root")


def lost_run(path: Path, **changes: Any) -> Path:
    good_run(path)
    (path / "oom.json").write_text(json.dumps(out_of_memory(**changes)))
    return path


def test_every_figure_is_there(tmp_path: Path) -> None:
    run = read_run(lost_run(tmp_path / "run", ways=WAYS, error="CUDA out of memory. <Tried>"))
    text = page([run])
    for said in (
        "Rank 1 ran out of memory in step 201, in forward; 0.586 GiB were asked for.",
        "at examples/stereo_depth/recipe.py:41 (cost = correlation(left, right)), in module encoder.stages.0 (Stage)",
        "1.66 GiB more were reserved and in no tensor (fragmentation)",
        "expandable_segments:True",
        "Going on with 2 microbatches in place of 1.",
        "At the peak of step 2, which was followed, on rank 1.",
        "encoder.stages.6.blocks.0",
        "11.6 GiB a rank, 430 ms a step",
        "CUDA out of memory. &lt;Tried&gt;",
        *(way["command"] for way in WAYS),
    ):
        assert said in text, said
    assert section([]) == "" and "Out of memory" not in page([read_run(good_run(tmp_path / "good"))])


@in_browser
def test_it_opens_without_an_error_or_a_request(tmp_path: Path) -> None:
    on_cpu = dict.fromkeys(("allocated_bytes", "reserved_bytes", "others_bytes", "ways", "live"))
    for name, changes in (("gpu", {"ways": WAYS}), ("cpu", {**on_cpu, "host_bytes": 2**30, "asked_bytes": 2**50})):
        run = read_run(lost_run(tmp_path / name, **changes))
        out = write_out_of_memory(run, run.path / "oom.html")
        with opened(out) as seen:
            for width in (1400, 420):
                seen.resize(width)
                assert seen.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
                wide = "[...document.querySelectorAll('.card')].filter(c => c.scrollWidth > c.clientWidth).length"
                assert seen.evaluate(wide) == 0, "nothing sticks out of its card"
            assert seen.evaluate("document.querySelectorAll('pre').length") == (4 if name == "gpu" else 1)
            assert seen.said == [] and seen.asked_for == [out.as_uri(), *seen.asked_for[1:]]
            assert all(address.startswith("data:") for address in seen.asked_for[1:])
