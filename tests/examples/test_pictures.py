"""The pictures with which `make train` ends are drawn."""

import json
import runpy
from pathlib import Path
from typing import Any

import torch

PICTURES = Path(__file__).parents[2] / "examples" / "stereo_depth" / "pictures.py"
PNG = b"\x89PNG"


def test_curves_and_depth(tmp_path: Path) -> None:
    draw: dict[str, Any] = runpy.run_path(str(PICTURES))
    records: list[dict[str, Any]] = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    records += [{"step": 4, "loss": None, "end_point_error": 2.0, "end_point_error_seen": 1.0}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(map(json.dumps, records)))
    measured = torch.rand(8, 20)
    measured[0, 0] = torch.inf
    draw["draw_curves"](metrics, tmp_path / "curves.png")
    draw["draw_depth"](torch.rand(3, 8, 20), measured, torch.rand(8, 20), slice(5, 9), tmp_path / "depth.png")
    for name in ("curves.png", "depth.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
