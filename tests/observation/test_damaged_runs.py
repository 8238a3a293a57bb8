"""Whatever is missing or wrong in a run's files: the page, the screen and the data are still made."""

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fullframe.observation.report.page import page
from fullframe.observation.run_files import read_run
from fullframe.observation.summary import summarize
from fullframe.observation.watch.drawing import Glyphs
from fullframe.observation.watch.screen import screen
from fullframe.observation.watch.snapshot import as_data, as_line
from tests.observation.run_writer import good_run, troubled_run

JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    3.5,
    1e300,
    -1e300,
    10**400,
    "",
    "text",
    "<b>",
    [],
    [1],
    {},
    {"a": 1},
    {"a": None},
]


def damaged(value: Any, draw: random.Random, share: float) -> Any:
    """The same with some entries gone, some of another type, some of another size."""
    if draw.random() < share:
        return draw.choice(JUNK)
    if isinstance(value, dict):
        return {name: damaged(each, draw, share) for name, each in value.items() if draw.random() > share}
    if isinstance(value, list):
        return [damaged(each, draw, share) for each in value if draw.random() > share]
    return value


@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.002, 0.03, 0.2]))
@settings(max_examples=25, deadline=None)
def test_damage_is_no_error(tmp_path_factory: Any, seed: int, share: float) -> None:
    draw = random.Random(seed)
    path: Path = (good_run if draw.random() < 0.5 else troubled_run)(tmp_path_factory.mktemp("runs") / "run")
    for file in [*path.glob("*.json*"), *path.glob("observed/*")]:
        if draw.random() < 0.1:
            file.unlink()
        elif file.suffix == ".jsonl":
            rows = [damaged(json.loads(line), draw, share) for line in file.read_text().splitlines()]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            file.write_text(text[: draw.randrange(len(text))] if draw.random() < 0.3 else text)
        else:
            file.write_text(json.dumps(damaged(json.loads(file.read_text()), draw, share)))
    if not any((path / name).exists() for name in ("run.json", "metrics.jsonl", "strategy.json")):
        return
    run = read_run(path)
    summary = summarize(run)
    assert page([run]).endswith("</html>\n") and page([run, run])
    assert screen(run, summary, 80, 24, Glyphs()) and as_line(run, summary)
    json.dumps(as_data(run, summary))
