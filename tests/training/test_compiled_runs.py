"""`fullframe train --compile`: a recipe by command line, compiled by inductor, again from the cache on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
import torch
import fullframe as ff
from tests.training.test_compiled import Model
from tests.training.test_compiled import loss

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(number)
        return {"image": torch.rand(2, 14, 22, generator=draw), "weight": torch.rand(1, 14, 22, generator=draw)}

def recipe():
    return ff.Recipe(
        model=Model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), data=Samples, batch_size=2
    )
"""

SAID: dict[tuple[str, ...], tuple[str, str, object]] = {
    (): ("layers.0", "3 of 3 blocks are compiled (1 programs, made in", True),
    ("all",): ("the model", "1 of 1 blocks are compiled (1 programs, made in", "all"),
}


def trained(folder: Path, name: str, *options: object) -> tuple[list[float], str]:
    """The losses of 3 steps, and what is printed."""
    (folder / "job.py").write_text(RECIPE)
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    kept |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    command = ["train", folder / "job.py", "--steps", 3, "--run-dir", folder / name, "--hang-timeout", 20, *options]
    done = subprocess.run(
        [sys.executable, "-m", "fullframe.cli", *map(str, command)],
        capture_output=True,
        text=True,
        env=kept,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("width", "which"), [(1, ()), (2, ()), (2, ("all",))])
def test_a_run_with_compiled_blocks(tmp_path: Path, width: int, which: tuple[str, ...]) -> None:
    split = ("--width", width)
    first, summary, read_back = SAID[which]
    expected, _ = trained(tmp_path, "as it is", *split)
    kept: list[list[str]] = []
    for name in ("first", "second"):
        losses, text = trained(tmp_path, name, *split, "--compile", *which)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert text.count(f"compiled {first} in") == 1, "progress: one program for equal blocks, said once"
        assert summary in text
        assert json.loads((tmp_path / name / "strategy.json").read_text())["compile"] == read_back
        kept.append(sorted(path.name for path in (tmp_path / "cache").rglob("*.py")))
    assert kept[0] and kept[0] == kept[1], "the second run compiles nothing anew"
