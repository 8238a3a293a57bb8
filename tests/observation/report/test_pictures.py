"""Pictures are part of the page as long as it stays small."""

import base64
import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

from fullframe.observation.report.pictures import pictures, small_enough
from tests.observation.report.test_sections import shown
from tests.observation.run_writer import good_run


def noise(path: Path, width: int, height: int) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    return path


def test_small_ones_are_kept_as_they_are(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run")
    picture = noise(path / "depth.png", 40, 30)
    (found,) = re.findall(r'src="data:image/png;base64,([^"]*)"', pictures([shown(path)]))
    assert base64.b64decode(found) == picture.read_bytes()
    assert pictures([shown(good_run(tmp_path / "other"))]) == ""


def test_a_full_frame_is_made_smaller(tmp_path: Path) -> None:
    kind, data, problem = small_enough(noise(tmp_path / "frame.png", 2400, 1200), 1_000_000)
    assert (kind, problem) == ("jpeg", "") and len(data) <= 1_000_000
    assert Image.open(io.BytesIO(data)).size in ((1600, 800), (800, 400))


def test_many_full_frames_share_the_room(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run")
    for number in range(4):
        noise(path / f"{number}.png", 1800, 900)
    drawn = pictures([shown(path)])
    assert drawn.count("<img") == 4 and len(drawn) < 4_500_000


def test_what_cannot_be_shown_is_named(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run")
    (path / "broken.png").write_bytes(b"x" * 4_000_000)
    drawn = pictures([shown(path)])
    assert "broken.png" in drawn and "not readable" in drawn and "<img" not in drawn
