"""`plan`, `simulate` and `calibrate` as a user runs them, and what `train` does with a plan."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullframe.cli.application import run
from fullframe.cli.comparison import Comparison, environment_beside, measured
from fullframe.cli.plan import _table
from fullframe.cli.simulate import _report
from fullframe.cli.strategy_file import first_plan, strategy_of
from fullframe.errors import RunError, StrategyError
from fullframe.planning.plan import PlanRequest, plan_in_full
from fullframe.processes.place import TASKS, launched_place, require_alone
from fullframe.ranks import device
from fullframe.recipe import load_recipe
from fullframe.simulation.devices.calibration import load_rates
from fullframe.strategy import Strategy, describe
from tests.cli.test_train import fullframe, steps_in, written
from tests.planning.test_candidates import prediction


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_plan_is_trained_and_compared_with_what_is_measured(tmp_path: Path) -> None:
    recipe, out, html = written(tmp_path), tmp_path / "plan.json", tmp_path / "plan.html"
    planned = fullframe("plan", recipe, "--gpus", "2xcpu", "--json", "--out", out, "--html", html)
    assert planned.returncode == 0, planned.stderr
    plans = json.loads(planned.stdout)
    assert plans == json.loads(out.read_text()) and plans[0]["fits"] and plans[0]["devices"] == "2xcpu"
    best = strategy_of(plans[0])
    assert "samples/s" in planned.stderr and f"best: {describe(best)}" in planned.stderr
    assert describe(best) in html.read_text() and re.search("<script[^>]* src=", html.read_text()) is None

    run_dir = tmp_path / "run"
    options = ("--steps", 3, "--run-dir", run_dir, "--strict-memory", 0.05)
    trained = fullframe("train", recipe, "--plan", out, *options)
    assert trained.returncode == 0, trained.stderr
    assert Strategy.from_json((run_dir / "strategy.json").read_text()) == best
    assert steps_in(run_dir) == [1, 2, 3]
    said = re.search(r"allocated (\S+) predicted, (\S+) GiB measured \(([+-]\d+)%\); step seconds", trained.stdout)
    assert said is not None, trained.stdout
    predicted, measured, share = map(float, said.groups())
    assert 100 * (measured / predicted - 1) == pytest.approx(share, abs=2)
    assert "beside its tensors a rank's process held" in trained.stdout
    noted = json.loads((run_dir / "run.json").read_text())["prediction"]
    for name in ("peak_bytes", "bytes"):  # seconds are timed anew where the plan was for other devices
        assert noted[name] == plans[0]["prediction"][name]
    assert noted["peak_bytes"] > 0


@pytest.mark.slow
def test_a_prediction_that_is_off_stops_all_ranks(tmp_path: Path) -> None:
    recipe, run_dir = written(tmp_path), tmp_path / "run"
    options = ("--width", 2, "--steps", 4, "--run-dir", run_dir, "--strict-memory", 1e-9)
    stopped = fullframe("train", recipe, *options)
    assert stopped.returncode == 2, stopped.stdout
    assert "--strict-memory 1e-09: " in stopped.stderr and " memory is off by" in stopped.stderr
    assert stopped.stderr.count("error:") == 1 and steps_in(run_dir) == [1, 2]


def planned_for(tmp_path: Path, recipe: Path, *words: str) -> Path:
    out = tmp_path / "plan.json"
    assert run(["plan", str(recipe), "--gpus", *words, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_planned_batch_size_is_trained_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path)
    plan = planned_for(tmp_path, recipe, "cpu", "--batch-size", "8")
    assert first_plan(plan)["batch_size"] == 8
    for name, words in (("planned", ("--plan", plan)), ("given", ("--batch-size", 8)), ("own", ())):
        trained = fullframe("train", recipe, *words, "--steps", 2, "--run-dir", tmp_path / name)
        assert trained.returncode == 0, trained.stderr
        assert ("batches of 8 in place of the recipe's 4" in trained.stdout) is (name != "own")
    losses = {
        name: [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("planned", "given", "own")
    }
    assert losses["planned"] == losses["given"] != losses["own"]
    capsys.readouterr()
    assert run(["train", str(recipe), "--plan", str(plan), "--batch-size", "4"]) == 2
    assert "the plan is for batches of 8, --batch-size says 4" in capsys.readouterr().err


def test_a_plan_is_simulated_with_its_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path)
    plan = planned_for(tmp_path, recipe, "T4", "--batch-size", "8")
    predicted = first_plan(plan)["prediction"]["peak_bytes"]
    capsys.readouterr()
    assert run(["simulate", str(recipe), "--gpus", "T4", "--strategy", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == predicted
    words = ["--strategy", str(plan), "--batch-size", "4"]
    assert run(["simulate", str(recipe), "--gpus", "T4", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] < predicted


def test_a_plan_for_gpus_that_are_not_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, path = written(tmp_path), tmp_path / "plan.json"
    plan = {"strategy": {"data": 16}, "fits": True, "devices": "2x8xA100-80GB", "batch_size": 16}
    path.write_text(json.dumps([plan]))
    words = ["train", str(recipe), "--plan", str(path), "--run-dir", str(tmp_path / "run")]
    for gpus, said in ((0, "this machine has no GPU"), (8, "needs 16 GPUs, this machine has 8")):
        monkeypatch.setattr(device, "count", lambda gpus=gpus: gpus)
        assert run(words) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    path.write_text(json.dumps([{**plan, "strategy": {"data": 2}, "batch_size": 4, "devices": "2xA100-80GB"}]))
    started: list[int] = []
    monkeypatch.setattr("fullframe.processes.launch.launch", lambda ranks, *_, **__: started.append(ranks) or 0)
    assert run([*words, "--on-cpu", "--steps", "1"]) == 0 and started == [2]


def test_when_the_time_is_over_nothing_is_said_not_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(written(tmp_path)), "--gpus", "4xT4", "--seconds", "0.001"]) == 3
    said = capsys.readouterr().out
    assert "nothing fits" not in said and "the 0.001 s of --seconds were over" in said and "give --seconds 60" in said


def test_an_error_of_the_recipe_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, changes="data=lambda: [1 / 0]")
    assert run(["plan", str(recipe), "--gpus", "T4"]) == 2
    said = capsys.readouterr().err
    assert said.count("ZeroDivisionError") == 1 and f"at {recipe}, line" in said and "nothing fits" not in said
    recipe = written(tmp_path, trouble="batch['nothing']")
    assert run(["plan", str(recipe), "--gpus", "T4"]) == 2
    printed = capsys.readouterr()
    assert f"not simulated: the step cannot be simulated: KeyError: 'nothing', at {recipe}, line" in printed.out
    assert "nothing fits" not in printed.out and "every one is refused" in printed.out
    assert len(printed.out.splitlines()) < 15 and "Traceback" not in printed.err


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullframe.cli.plan._QUIET_SECONDS", 0.0)
    assert run(["plan", str(written(tmp_path)), "--gpus", "cpu", "--memory-limit-gib", "0.01", "--json"]) == 1
    printed = capsys.readouterr()
    assert not any(plan["fits"] for plan in json.loads(printed.out))
    assert "1 simulated, 0 fit, " in printed.err
    assert "nothing fits: " in printed.err and "missing with" in printed.err


def test_a_table_has_room_on_a_terminal_of_80_columns(tmp_path: Path) -> None:
    planned = plan_in_full(PlanRequest(recipe=load_recipe(written(tmp_path)), devices="T4", precisions=["fp16"]))
    for width, names in ((80, ["free"]), (160, ["weights", "activations", "other", "free"])):
        text = io.StringIO()
        Console(file=text, width=width).print(_table(planned, planned.plans[:3], is_wide=width > 80))
        title, _, head, _, first, *_ = text.getvalue().splitlines()
        assert "1xT4: 13.69 GiB of 14.56 to be used" in title
        assert all(name in head for name in (*names, "ms/step", "samples/s", "strategy"))
        numbers = [cell.strip() for cell in first.split("│")[3:-2]]
        assert all(re.fullmatch(r"[\d,]+(\.\d+)?", number) for number in numbers) and len(numbers) >= 4


def test_depth_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "volumes.py"
    path.write_text("from tests.training.volumes import recipe")
    held = []
    for axis in ("--depth", "--width"):
        assert run(["simulate", str(path), "--gpus", "2xT4", axis, "2", "--json"]) == 0
        held.append(json.loads(capsys.readouterr().out)["bytes"]["activation"])
    assert run(["simulate", str(path), "--gpus", "2xT4", "--depth", "2"]) == 0
    assert held[0] != held[1] and held[0] == pytest.approx(held[1], rel=0.2) and "fits" in capsys.readouterr().out


def test_a_strategy_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(written(tmp_path))
    assert run(["simulate", recipe, "--gpus", "2xT4", "--width", "2", "--precision", "fp16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] <= found["reserved_bytes"] < found["device_bytes"]
    assert found["bound_by_host"] and found["host_seconds"] > 0.5 * found["step_seconds"]
    assert run(["simulate", recipe, "--gpus", "2xT4", "--width", "2", "--precision", "fp16"]) == 0
    text = capsys.readouterr().out
    assert "at the peak: " in text and "ms a step: " in text and "body" in text
    assert "\nbound by the host: it works " in text
    assert re.match(r"0\.\d+ of 14\.560 GiB: fits\n", text)


@pytest.mark.slow
def test_what_was_calibrated_is_what_a_plan_counts_with(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = fullframe("calibrate", "--processes", 2)
    assert measured.returncode == 0, measured.stderr
    path = cache / "fullframe" / "devices" / "cpu-2-ranks.json"
    assert f"wrote {path}" in measured.stdout and "all-reduce" in measured.stdout
    rates = load_rates(path)
    assert len(rates.link) == len(rates.all_reduce) == 5 and all(rate > 0 for _, rate in rates.link)
    assert run(["plan", str(written(tmp_path)), "--gpus", "2xcpu"]) == 0
    printed = capsys.readouterr().out
    assert f"rates as measured on {rates.measured_on}" in printed and "malloc keeps up to 0.6 GiB more" in printed


def test_what_a_limit_and_little_free_memory_mean_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(written(tmp_path))
    assert run(["plan", recipe, "--gpus", "T4", "--memory-limit-gib", "1000"]) == 0
    assert "--memory-limit-gib 1000 is more than the 14.56 GiB of a T4" in capsys.readouterr().out
    predicted = prediction(activation=97 * 2**20)
    for share, said in (
        (0.5, "GiB: fits\n"),
        (0.97, "GiB: fits, with less than the 6% free"),
        (1.1, "GiB: does not fit\n"),
    ):
        _report(predicted, int(predicted.device_bytes / share), sys.stdout)
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("words", [["plan", "--out", "full"], ["simulate", "--trace", "full"]])
def test_what_cannot_be_written_is_a_sentence(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("full", "full.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    assert run([words[0], str(written(tmp_path)), "--gpus", "T4", *words[1:]]) == 2
    error = f"error: cannot write full: No space left on device; name another file with {words[1]}"
    assert error in capsys.readouterr().err


WRONG = [
    (("plan", "{recipe}", "--gpus", "3xA1"), "no device 'A1'"),
    (("plan", "{recipe}", "--gpus", "T4", "--precision", "bf16"), "T4 has no bf16"),
    (("plan", "{recipe}", "--gpus", "T4", "--memory-limit-gib", "0"), "--memory-limit-gib must be greater than 0"),
    (("plan", "{recipe}", "--gpus", "T4", "--memory-limit-gib", "inf"), "--memory-limit-gib must be greater than 0"),
    (("plan", "{recipe}", "--gpus", "V100-16GB", "--precision", "tf32"), "V100-16GB has no tf32; use fp32"),
    (("simulate", "{recipe}", "--gpus", "T4", "--batch-size", "0"), "batch-size must be at least 1, got 0"),
    (("simulate", "{recipe}", "--gpus", "2xT4", "--strategy", "{plan}", "--width", "2"), "leave out the options of"),
    (("simulate", "{recipe}", "--gpus", "T4", "--strategy", "{plan}", "--batch-size", "0"), "must be at least 1"),
    (("plan", "{recipe}", "--gpus", "T4", "--out", "none/plan.json"), "cannot write none/plan.json: the folder none"),
    (("plan", "{recipe}", "--gpus", "T4", "--out", "."), "cannot write .: it is a folder; name a file with --out"),
    (("simulate", "{recipe}", "--gpus", "T4", "--trace", "."), "it is a folder; name a file with --trace"),
    (("plan", "{recipe}", "--gpus", "T4", "--html", "none/plan.html"), "name another with --html"),
    (("simulate", "{recipe}", "--gpus", "T4", "--trace", "none/trace"), "name another with --trace"),
    (("plan", "nowhere.py", "--gpus", "T4"), "there is no recipe file nowhere.py"),
    (("calibrate", "--processes", "3"), "--processes must be 1, or 2"),
    (("simulate", "{recipe}", "--gpus", "T4", "--width", "2"), "the strategy needs 2 ranks, 1xT4 has 1"),
    (("train", "{recipe}", "--plan", "nowhere.json"), "cannot read the plan nowhere.json"),
    (("train", "{recipe}", "--plan", "{plan}", "--width", "2"), "leave out the options of the mesh"),
    (("train", "{recipe}", "--plan", "{plan}", "--processes", "3"), "the plan is for 1 rank, not 3"),
    (("plan", "{recipe}", "--gpus", "T4", "--seconds", "0"), "--seconds must be greater than 0"),
    (("train", "{recipe}", "--strict-memory", "0"), "--strict-memory must be greater than 0"),
    (("train", "{recipe}", "--strict-memory", "0.1", "--steps", "1"), "compares after the second step, and --steps is"),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_use(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, plan = written(tmp_path), tmp_path / "plan.json"
    plan.write_text(Strategy().to_json())
    monkeypatch.chdir(tmp_path)
    assert run([word.format(recipe=recipe, plan=plan) for word in words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("3", "neither a list of plans nor a strategy"),
        ("{}", "neither a list of plans nor a strategy"),
        ('[{"fits": true}]', "neither a list of plans nor a strategy"),
        ('[{"strategy": {}, "fits": false}]', "holds 1 strategy, and none fits"),
        ("[]", "holds 0 strategies, and none fits"),
    ],
)
def test_a_file_that_is_no_plan(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(StrategyError, match=said):
        first_plan(path)


def test_the_first_plan_that_fits_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plans = [{"strategy": {"width": width}, "fits": width == 4} for width in (2, 4)]
    path.write_text(json.dumps(plans))
    assert strategy_of(first_plan(path)) == Strategy(width=4)
    with pytest.raises(StrategyError, match="unknown strategy field 'length'"):
        strategy_of({"strategy": {"length": 3}})


def test_pictures_need_plotly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    words = ["plan", str(written(tmp_path)), "--gpus", "cpu", "--html", str(tmp_path / "plan.html")]
    assert run(words) == 2
    assert "pip install 'fullframe[pictures]'" in capsys.readouterr().err


def compared(
    tmp_path: Path, predicted: dict[str, Any] | None, strict: float | None = None, steps: int = 2
) -> list[str]:
    """What is said of records on the CPU, two unless given, with a prediction from a plan."""
    said: list[str] = []
    plan = {"devices": "1xcpu", "prediction": predicted}
    with Comparison(written(tmp_path, trouble="raise ValueError"), Strategy(), said.append, plan, strict) as comparison:
        for seconds in (9.0, 0.5)[:steps]:
            comparison.record({"step_seconds": seconds})
    return said


@pytest.mark.parametrize("name", TASKS)
def test_a_process_beside_a_rank_of_several_tasks_is_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, value in {"RANK": "1", "WORLD_SIZE": "4", name: "4"}.items():
        monkeypatch.setenv(variable, value)
    environment = environment_beside()
    assert launched_place(environment) is None
    require_alone(environment)


def test_predicted_and_measured_side_by_side(tmp_path: Path) -> None:
    (line,) = compared(tmp_path, {"step_bytes": 2**30, "peak_bytes": 2**20, "step_seconds": 0.25})
    memory, _, seconds = line.partition("; ")
    assert re.fullmatch(r"process 1 predicted, [\d.]+ GiB measured \([+-]\d+%\)", memory)
    assert seconds == "step seconds 0.25 predicted, 0.5 s measured (+100%)"


def test_tensors_are_held_against_tensors_and_the_process_is_a_line_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    noted: list[Any] = []
    prediction = {"peak_bytes": 2**30, "step_bytes": 2**31, "step_seconds": 0.25, "terms": {"context": 2**28}}
    plan = {"devices": "1xcpu", "prediction": prediction}
    facts: dict[str, Any] = {"tracked": lambda: 2**30 + 2**28, "on_prediction": noted.append}
    with Comparison(written(tmp_path), Strategy(), said.append, plan, **facts) as comparison:
        for seconds in (9.0, 7.0, 0.4, 0.5, 0.6, 0.7):
            assert comparison.record({"step_seconds": seconds}) is None
    assert said[0].startswith("allocated 1 predicted, 1.25 GiB measured (+25%); step seconds 0.25 predicted, ")
    assert "(+100%)" in said[0] or "more in which others had the core" in said[0]
    assert "Python with what it has loaded, 0.25 GiB when it was calibrated" in said[1]
    assert noted == [prediction]


def test_strict_is_about_memory_alone(tmp_path: Path) -> None:
    here = measured()["process_bytes"]
    prediction = {"step_bytes": here, "step_seconds": 1e-9}
    assert len(compared(tmp_path, prediction, strict=0.05)) == 1
    of_evaluation = {**prediction, "device_bytes": 2 * here}
    assert len(compared(tmp_path, of_evaluation, strict=0.05)) == 1, "an evaluation needs more, and was not measured"
    said = "--strict-memory compared nothing: it needs 2 steps, this took 1 step"
    assert compared(tmp_path, prediction, strict=0.05, steps=1) == [said]
    assert compared(tmp_path, prediction, steps=1) == []
    with pytest.raises(RunError, match="process memory is off by"):
        compared(tmp_path, {**prediction, "step_bytes": here * 0.9}, strict=0.05)


def test_strict_stops_where_nothing_can_be_predicted(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="prediction memory is off"):
        compared(tmp_path, None, strict=0.05)
