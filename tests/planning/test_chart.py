"""The page of plans draws the schedule of the first one on stages."""

import re
from dataclasses import replace
from pathlib import Path

from fullframe.planning.chart import draw
from fullframe.planning.ranking import Plan
from fullframe.strategy import Strategy
from tests.planning.test_candidates import GIB, prediction

PLAN = Plan(
    strategy=Strategy(),
    prediction=prediction(activation=GIB),
    fits=True,
    reason="",
    devices="2xA100-80GB",
    memory_bytes=2 * GIB,
    batch_size=3,
)


def test_a_plan_on_stages_is_drawn_with_its_bubble(tmp_path: Path) -> None:
    staged = replace(PLAN, strategy=Strategy(stages=2, microbatches=3))
    draw([PLAN, staged], "plans", tmp_path / "plans.html")
    page = (tmp_path / "plans.html").read_text()
    assert "which wait 25% of the time" in page and "stage 1" in page and page.count("</body>") == 1
    draw([PLAN], "plans", tmp_path / "plain.html")
    assert re.search("which wait", (tmp_path / "plain.html").read_text()) is None
