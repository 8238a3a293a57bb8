"""A checkpoint for which there is no room leaves the ones before as they were."""

import resource
import shutil
import signal
import subprocess

import pytest
from torch import nn

import fullframe as ff
from fullframe.errors import CheckpointError
from fullframe.training.checkpoints.manifest import read_manifest
from fullframe.training.checkpoints.writer import newest_checkpoint
from tests.training.checkpoints.states import (
    large_state,
    names_in,
    write,
)
from tests.training.tiny import recipe


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 5 MB: there is room for two checkpoints of `large_state`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5000k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk, monkeypatch):
    for step in (1, 2):
        write(large_state(step), small_disk)
    expected = r"cannot write checkpoint .*step-00000003 \(rank 0\): No space left on device: it needs 2000000 bytes, "
    expected += r"\d+ are free; make room or keep fewer checkpoints \(now 3\); step-00000002 is whole, go on from it"
    with pytest.raises(CheckpointError, match=expected):
        write(large_state(3), small_disk)
    assert names_in(small_disk) == ["step-00000001", "step-00000002"]

    # Other writers: what was free when it began is not there when it is needed.
    original = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: original(path)._replace(free=2**40))
    with pytest.raises(CheckpointError, match="No space left on device: it needs 2000000 bytes"):
        write(large_state(3), small_disk)
    assert names_in(small_disk) == ["step-00000001", "step-00000002"], "the part that was written makes room again"
    newest, problems = newest_checkpoint(small_disk)
    assert newest.manifest.step == 2 and problems == []


class Wide(nn.Module):
    """400 kB with its optimizer's state."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.Conv2d(256, 4, 3, padding=1)).double()

    def forward(self, image):
        return self.layers(image)


def test_a_run_whose_disk_is_full_stops_and_goes_on_when_there_is_room(small_disk, tmp_path):
    def fit(folder, steps, **options):
        ff.fit(
            recipe(model=Wide), ff.Strategy(), folder, steps=steps, checkpoint_every=2, keep_checkpoints=1, **options
        )

    fit(tmp_path / "whole", 5)
    fit(small_disk / "run", 2)
    with open(small_disk / "something else", "wb") as file:
        file.write(bytes(shutil.disk_usage(small_disk).free - 200_000))
    with pytest.raises(CheckpointError, match=r"No space left on device: it needs .* step-00000002 is whole, go on"):
        fit(small_disk / "run", 5, resume=True)
    (small_disk / "something else").unlink()
    fit(small_disk / "run", 5, resume=True)
    whole, parts = (
        read_manifest(folder / "checkpoints" / "step-00000005") for folder in (tmp_path / "whole", small_disk / "run")
    )
    assert whole == parts


def test_a_quota(tmp_path):
    """As seen by a process: a write that fails in the middle of a file."""
    write(large_state(1), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large: it needs 2000000 bytes, .* \(ulimit -f\)"):
            write(large_state(2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names_in(tmp_path) == ["step-00000001"]
    assert newest_checkpoint(tmp_path)[0].manifest.step == 1
