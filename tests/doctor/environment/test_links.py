"""Bandwidth between ranks."""

import json
from pathlib import Path

from fullframe.doctor.environment.links import judged_links, measure_links, said_of_links
from tests.rank_group import rank_group


def test_every_pair_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    rank_group(2).run(measure_links, file)
    rates = json.loads(file.read_text())
    assert list(rates) == ["0-1"] and 1e6 < rates["0-1"] < 1e12


def test_the_slow_pair_is_named() -> None:
    rates = {"0-1": 10e9, "0-2": 10e9, "1-2": 2e9}
    (found,) = judged_links(rates)
    assert found.message == "2 GB/s between ranks 1 and 2, 10 GB/s between most of 3 pairs"
    assert list(judged_links({**rates, "1-2": 6e9})) == list(judged_links({"0-1": 1.0})) == []
    assert said_of_links({"0-1": 1e9}, "gloo") == ["gloo, ranks 0-1: 1 GB/s"]
