"""Calibrate, with measurements that take no time: what it prints, and writes for plans to find."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fullframe.cli.calibrate import Calibrate
from fullframe.errors import DeviceError, RunError
from fullframe.simulation.devices.calibration import load_rates
from tests.simulation.devices.test_calibration import rates

PROGRAM = """
import sys
from pathlib import Path
from fullframe.cli.calibrate import Calibrate
from fullframe.simulation.devices import calibration
from tests.simulation.devices.test_calibration import rates
calibration.measure = lambda name, device: rates(device=f"{name} {device}", link=((1024.0, 2048e6),))
sys.exit(Calibrate(out=Path(sys.argv[1]), json=True).run())
"""


def test_what_is_measured_is_printed_and_written(tmp_path: Path) -> None:
    path, root = tmp_path / "new" / "rates.json", Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, path], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = load_rates(path)
    assert json.loads(ended.stdout) == json.loads(found.to_json())
    assert found.host is not None and found.host.source == "measured on here, 2026-01-01"
    assert found == rates(device="cpu-1-ranks cpu", link=((1024.0, 2048e6),), host=found.host)
    assert "launch: 1.0 microseconds" in ended.stderr and "link: 0 us for 1 KiB" in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"wrote {path}"


def test_where_nothing_could_be_written_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="name another file with --out"):
        Calibrate(out=tmp_path / "file" / "rates.json").run()


def test_more_than_two_ranks_are_refused() -> None:
    with pytest.raises(DeviceError, match="--processes must be 1, or 2"):
        Calibrate(processes=3).run()
