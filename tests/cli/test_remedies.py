"""After a step ran out of memory: what would fit, as commands, said once; really on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from fullframe.cli.remedies import KEPT_FREE, command_for, explain_out_of_memory, plan_limit_bytes
from fullframe.cli.train import Train
from fullframe.cli.words import TechniqueOptions
from fullframe.observation.out_of_memory.account import of_record
from fullframe.observation.run_files import read_run
from fullframe.observation.summary import summarize
from fullframe.simulation.prediction import KEPT_FREE as KEPT_BY_THE_PLAN
from fullframe.strategy import Strategy
from tests.cli.test_train import environment, fullframe
from tests.observation.run_writer import good_run, out_of_memory

GIB = 2**30
RECIPE = """
import os, torch
from torch import nn
import fullframe as ff
steps = 0

class Frames(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"image": torch.ones(3, 256, 320)}

def model():
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Conv2d(16, 1, 1))

def loss(model, batch):
    global steps
    steps += 1
    output = model(batch["image"])
    if steps == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        torch.empty(2**50, dtype=torch.uint8)  # never fits
    return output.square().mean()

def recipe():
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)
    return ff.Recipe(model=model, loss=loss, optimizer=optimizer, data=Frames, batch_size=4, steps=4)
"""


@pytest.mark.slow
def test_a_rank_runs_out_and_the_run_goes_on(tmp_path: Path) -> None:
    recipe, run_dir = tmp_path / "job.py", tmp_path / "run"
    recipe.write_text(RECIPE)
    trained = fullframe("train", recipe, "--width", 2, "--run-dir", run_dir)
    assert trained.returncode == 0, trained.stderr
    said = trained.stdout.splitlines()
    start = next(number for number, line in enumerate(said) if line.startswith("out of memory: looking for"))
    end = said.index(f"out of memory: {run_dir}/oom.html")
    lines = said[start : end + 1]
    assert len(lines) <= 10, lines
    assert lines[1] == (
        "rank 1 ran out of memory in step 3, in forward; 1,048,576 GiB were asked for; going on with 2 microbatches in "
        "place of 1"
    )
    assert lines[2] == f"  at {recipe}:23 (torch.empty(2**50, dtype=torch.uint8) # never fits)"
    assert "  live at the peak of step 2, which was followed: activation" in lines[4]
    commands = [line.strip() for line in lines if line.startswith("  fullframe train ")]
    assert 1 <= len(commands) <= 3 and "no other strategy" not in trained.stdout
    found = json.loads((run_dir / "oom.json").read_text())
    assert [f"{way['command']}" for way in found["ways"]] == [command.partition("  # ")[0] for command in commands]
    text = (run_dir / "oom.html").read_text()
    assert found["ways"][0]["words"] in text and found["ways"][0]["command"] in text
    assert (run_dir / "log.txt").read_text().count("ran out of memory in step 3") == 1
    for finding in summarize(read_run(run_dir)).findings:
        if "ran out of memory" in finding.text:
            assert (finding.level, finding.remedy) == ("warn", found["ways"][0]["command"])
            break
    else:
        raise AssertionError("`watch` and the report do not tell")
    assert "Out of memory</h2>" in (run_dir / "report.html").read_text()
    again = fullframe(*commands[0].partition("  # ")[0].split()[1:], "--steps", 5)  # as it is pasted
    assert again.returncode == 0, again.stderr
    assert "resumed after step 4" in again.stdout
    assert read_run(run_dir).out_of_memory is None, "a new launch"


def test_the_commands_are_the_runs_own_with_another_strategy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"height": 2, "max_restarts": 7, "set": ("lr=1e-3",), "auto_resume": True}
    train = Train(recipe=Path("my recipe.py"), **options, techniques=TechniqueOptions(precision="bf16"))
    run_dir = Path("runs/first")
    strategy = Strategy(data=2, width=2, precision="bf16", recompute="blocks", recompute_modules=("a", "b"))
    assert command_for(train, strategy, run_dir) == (
        "fullframe train 'my recipe.py' --set lr=1e-3 --data 2 --width 2 --run-dir runs/first --resume "
        "--max-restarts 7 --precision bf16 --recompute blocks --recompute-modules a b"
    )
    assert "--processes 1 " in command_for(train, Strategy(microbatches=4), run_dir), "or it would take all GPUs"
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"strategy": {}, "fits": True, "batch_size": 6}]))
    planned = Train(recipe=Path("recipe.py"), plan=plan, processes=4)
    assert command_for(planned, Strategy(width=4), run_dir) == (
        "fullframe train recipe.py --width 4 --batch-size 6 --run-dir runs/first --resume"
    )


@pytest.mark.parametrize(
    ("changes", "reserved_gib", "room_gib"),
    [
        # asked and held are more than was predicted, and than the device has: (13 + 4) / 10 times
        ({"allocated_bytes": 13 * GIB, "asked_bytes": 4 * GIB}, 10.0, (0.94 * 16 - 1) / 1.7),
        # less than the device has: what ran out needed that at least
        ({"allocated_bytes": 9 * GIB, "asked_bytes": GIB}, 10.0, (0.94 * 16 - 1) / 1.5),
        # predicted as it was
        ({"allocated_bytes": 15 * GIB, "asked_bytes": 5 * GIB}, 20.0, 0.94 * 16 - 1),
        # others had a part of the device
        ({"allocated_bytes": 12 * GIB, "asked_bytes": 0, "others_bytes": 4 * GIB}, 20.0, 0.94 * 12 - 1),
    ],
)
def test_what_a_plan_may_use(changes: dict[str, Any], reserved_gib: float, room_gib: float) -> None:
    found = of_record(out_of_memory(**({"limit_bytes": 16 * GIB, "others_bytes": 0} | changes)))
    assert found is not None
    predicted = {"reserved_bytes": reserved_gib * GIB, "step_bytes": (reserved_gib + 1) * GIB}
    limit = plan_limit_bytes(found, predicted)
    assert KEPT_FREE == KEPT_BY_THE_PLAN
    assert limit * (1 - KEPT_FREE) / GIB == pytest.approx(1 + room_gib)


def test_cpu_ranks_share_the_machine() -> None:
    found = of_record({"step": 1, "devices": "4xcpu", "limit_bytes": 16 * GIB, "asked_bytes": 2**50})
    assert found is not None and plan_limit_bytes(found, {}) == 4 * GIB
    predicted = {"reserved_bytes": GIB, "step_bytes": 2 * GIB}
    assert plan_limit_bytes(found, predicted) * (1 - KEPT_FREE) / GIB == pytest.approx(1 + (0.94 * 4 - 1) / 3)


def test_it_is_said_once_and_what_goes_wrong_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    run_dir = good_run(tmp_path / "run")
    train = Train(recipe=tmp_path / "missing.py", run_dir=run_dir)
    explain_out_of_memory(train, run_dir)
    assert capsys.readouterr().out == "", "nothing ran out"
    (run_dir / "oom").mkdir()
    (run_dir / "oom" / "rank1.json").write_text(json.dumps(out_of_memory()))
    explain_out_of_memory(train, run_dir, lambda: True)
    said = capsys.readouterr().out.splitlines()
    assert (
        said[1].startswith("rank 1 ran out of memory in step 201") and said[-1] == f"out of memory: {run_dir}/oom.html"
    )
    assert said[-2] == (
        f"  no other strategy to name: there was no time to look for one; fullframe plan {tmp_path}/missing.py --gpus "
        "2xV100-16GB looks for longer, and says what would help"
    )
    explain_out_of_memory(train, run_dir)
    assert capsys.readouterr().out == ""
    (run_dir / "oom" / "rank1.json").write_text(json.dumps(out_of_memory(phase="evaluation", attempt=1)))
    explain_out_of_memory(train, run_dir)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("rank 1 ran out of memory in the evaluation after step 201"), "and nothing is planned"
    assert "smaller frames in recipe.evaluation_data" in said[-2]
    assert "microbatches and recompute change nothing" in (run_dir / "oom.html").read_text()
    (run_dir / "oom.html").unlink()
    (run_dir / "oom.html").mkdir()
    (run_dir / "oom" / "rank0.json").write_text(json.dumps(out_of_memory(step=202, rank=0, attempt=1)))
    explain_out_of_memory(train, run_dir, lambda: True)
    assert "warning: the page on memory was not written: IsADirectoryError" in capsys.readouterr().out
