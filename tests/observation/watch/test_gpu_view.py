"""GPUs as lines and as findings."""

import json
from dataclasses import asdict

from fullframe.observation.gpus import gpus
from fullframe.observation.watch.drawing import Glyphs
from fullframe.observation.watch.gpu_view import gpu_findings, gpu_lines
from tests.observation.fake_nvml import GIB, FakeNvml
from tests.observation.test_gpus import owner, rank

FOUND = gpus(
    FakeNvml([{100: 40 * GIB, 101: GIB // 2}, {101: 30 * GIB, 300: 2 * GIB}, {}]),
    {100: owner(rank(0)), 101: owner(rank(1)), 300: owner(rank(5), parent="systemd", parent_pid=1)}.get,
)


def test_lines_name_gpus_holders_and_what_is_wrong() -> None:
    lines = [line.plain.rstrip() for line in gpu_lines(FOUND, 120, 40, Glyphs())]
    assert lines[0].startswith("GPU 0  NVIDIA H100") and lines[0].endswith("41 GiB of 80 GiB, 37 % busy")
    assert lines[0].count("█") == round((120 - 62) * 41 / 80)
    assert (
        lines[1].split()[:3] == ["100", FOUND[0].processes[0].user, "40"] and "rank 0  /usr/bin/python -m" in lines[1]
    )
    assert any("wrong gpu: rank 1 (101) has a context on GPU 0" in line for line in lines)
    assert any(line.endswith("; to end it: kill 300") for line in lines)
    assert lines[-1].strip() == "nobody holds memory here"
    assert max(map(len, lines)) <= 120


def test_what_does_not_fit_is_counted() -> None:
    lines = gpu_lines(FOUND, 80, 4, Glyphs())
    assert len(lines) == 4 and lines[-1].plain == "and 7 lines more; --once shows all"


def test_troubles_are_findings() -> None:
    texts = [finding.text for finding in gpu_findings(FOUND)]
    assert texts[0].startswith("rank 1 (101) has a context on GPU 0")
    assert texts[1:] == ["GPU 1: 300 was left behind by a run whose launcher is gone and holds 2 GiB"]


def test_data_is_json() -> None:
    data = json.loads(json.dumps([asdict(gpu) for gpu in FOUND]))
    assert data[1]["processes"][1]["remedy"] == "kill 300" and data[2]["processes"] == []
