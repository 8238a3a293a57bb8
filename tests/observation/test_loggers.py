"""What was logged is read back from what TensorBoard, Weights & Biases (offline) and MLflow (files) wrote."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullframe.errors import FullframeError
from fullframe.observation.loggers import LOGGERS, Loggers, require_loggers
from fullframe.processes.stop_signals import Stopped
from fullframe.strategy import Strategy
from fullframe.training.observers import Observers
from tests.observation.run_writer import records

NAMES = ("tensorboard", "wandb", "mlflow")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def observed(path: Path, said: list[str], rank: int = 0) -> Any:
    path.mkdir(exist_ok=True)
    return SimpleNamespace(run_dir=path, rank=rank, say=said.append, strategy=Strategy(width=2))


def logged(path: Path, rows: list[dict[str, Any]], *names: Any, error: BaseException | None = None) -> list[str]:
    """What was said while these rows were logged, as `fit` has it done."""
    said = list[str]()
    observers = Observers([Loggers(names)])
    try:
        with observers.looking_on(observed(path, said)):
            for row in rows:
                observers.after_step(row["step"], row)
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    return said


def of_tensorboard(path: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    found = events.Scalars(name)
    assert len({event.step for event in found}) == len(found), "a step is there once"
    return {event.step: event.value for event in found}


def of_mlflow(path: Path) -> tuple[Any, dict[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fullframe")
    (run,) = client.search_runs([experiment.experiment_id])
    return run, {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}


def of_wandb(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows and the exit codes of all files, oldest first. The format is LevelDB's log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, codes = [], []
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        for data in chunks(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
            elif record.HasField("exit"):
                codes.append(record.exit.exit_code)
    return rows, codes


def chunks(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format: blocks of 32 KiB, each piece with checksum, length and kind before it."""
    place, joined = 7, b""  # after the file's own mark
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        joined += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield joined
            joined = b""


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    rows = records(30)
    rows[4] |= {"loss": None, "skipped": True}
    assert logged(tmp_path / "run", rows, "tensorboard") == []
    losses = of_tensorboard(tmp_path / "run", "loss")
    assert losses == {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in rows if row["loss"] is not None}
    assert of_tensorboard(tmp_path / "run", "skipped")[5] == 1.0
    assert list(of_tensorboard(tmp_path / "run", "end_point_error")) == [25]


def test_a_resumed_run_takes_the_place_of_its_later_steps(tmp_path: Path) -> None:
    first, second = records(30), records(20, start=21, seed=9)
    logged(tmp_path / "run", first, *NAMES)
    assert logged(tmp_path / "run", second, *NAMES) == []
    wanted = {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in [*first[:20], *second]}
    assert of_tensorboard(tmp_path / "run", "loss") == wanted
    run, losses = of_mlflow(tmp_path / "run")
    assert set(losses) == set(range(1, 41)) and losses[40] == second[-1]["loss"], "one run, not two"
    assert run.info.status == "FINISHED" and run.data.params["width"] == "2"
    rows, codes = of_wandb(tmp_path / "run")
    assert [row["_step"] for row in rows] == [*range(1, 31), *range(21, 41)] and codes == [0, 0]
    assert [row["loss"] for row in rows] == [row["loss"] for row in [*first, *second]]
    names = {file.name for file in (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")}
    assert len(names) == 1, "both are of one run"


@pytest.mark.parametrize(("error", "status", "code"), [(ValueError("broken"), "FAILED", 1), (Stopped(15), "KILLED", 0)])
def test_how_the_run_ended_is_logged(tmp_path: Path, error: BaseException, status: str, code: int) -> None:
    assert logged(tmp_path / "run", records(3), "wandb", "mlflow", error=error) == []
    assert of_mlflow(tmp_path / "run")[0].info.status == status
    rows, codes = of_wandb(tmp_path / "run")
    assert len(rows) == 3 and codes == [code]


def test_other_ranks_log_nothing(tmp_path: Path) -> None:
    loggers = Loggers(NAMES)
    loggers.begin(observed(tmp_path / "run", [], rank=1))
    loggers.after_step(1, {"step": 1, "loss": 2.0})
    loggers.end()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_logger_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    written = list[int]()

    class Good:
        def __init__(self, run: Any, known: Any):
            pass

        def write(self, step: int, values: Any) -> None:
            written.append(step)

        def close(self, status: str) -> None:
            written.append(-1)

    class Failing(Good):
        def write(self, step: int, values: Any) -> None:
            if step == 2:
                raise OSError("the server is gone")

    monkeypatch.setitem(LOGGERS, "wandb", (Failing, "wandb"))
    monkeypatch.setitem(LOGGERS, "tensorboard", (Good, "tensorboard"))
    said = logged(tmp_path / "run", records(4), "wandb", "tensorboard")
    assert said == ["warning: wandb is left out from here: OSError: the server is gone"]
    assert written == [1, 2, 3, 4, -1]


def test_numbers_only_and_finite_ones_only_are_logged(tmp_path: Path) -> None:
    logged(tmp_path / "run", [{"step": 1, "loss": math.nan, "note": "x", "error": 2}], "mlflow")
    run, losses = of_mlflow(tmp_path / "run")
    assert losses == {} and run.data.metrics == {"error": 2.0}


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_loggers(NAMES)
    monkeypatch.setitem(LOGGERS, "wandb", (LOGGERS["wandb"][0], "wandb_that_is_not_there"))
    with pytest.raises(FullframeError, match=r"--log wandb needs a package; pip install 'fullframe\[wandb\]'"):
        require_loggers(["tensorboard", "wandb"])
