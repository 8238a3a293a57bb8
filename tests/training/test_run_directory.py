"""The files of a run."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fullframe as ff
from fullframe.errors import RunError
from fullframe.strategy import Strategy
from fullframe.training.run_directory import (
    RunDirectory,
    check_run_directory,
    last_step,
    opened,
    strategy_of_restart,
    write_strategy,
)
from tests.training import tiny


def test_records_are_lines_of_json_and_only_one_rank_writes(tmp_path: Path) -> None:
    run, other = RunDirectory(tmp_path, writes=True), RunDirectory(tmp_path, writes=False)
    for writer in (run, other):
        writer.append({"step": 1, "loss": 0.5, "grad_norm": math.nan})
        writer.log("hello")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 0.5, "grad_norm": None}]
    assert (tmp_path / "log.txt").read_text().endswith(" hello\n")


def test_what_cannot_be_written_is_left_to_be_agreed_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "missing", writes=True)
    run.append({"step": 1})
    assert "cannot write" in run.trouble and "--resume" in run.trouble
    first = run.trouble
    run.log("again")
    assert run.trouble == first


def test_a_directory_that_is_removed_under_way_is_said_to_be_gone(tmp_path: Path) -> None:
    def removing(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return tiny.loss(model, batch)

    with pytest.raises(RunError, match=r"No such file or directory; the run directory is gone; put it back"):
        ff.fit(tiny.recipe(loss=removing), ff.Strategy(), tmp_path / "run", steps=4)


def test_later_steps_and_a_broken_line_are_forgotten(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, writes=True)
    run.forget_after(1)  # where there is no file yet
    for step in (1, 2, 3):
        run.append({"step": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert last_step(tmp_path) == 3
    RunDirectory(tmp_path, writes=False).forget_after(1)
    assert last_step(tmp_path) == 3
    run.forget_after(2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    run.append({"after_step": 2, "leak": "tensors"})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2}')  # cut off right before its end, so that the next line would follow in the same
    run.forget_after(2)
    assert list(run.records()) == [{"step": 1}, {"step": 2}, {"after_step": 2, "leak": "tensors"}]
    assert last_step(tmp_path / "nowhere") == 0


def test_of_a_long_file_the_end_alone_is_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, writes=True)
    for step in range(1, 40):
        run.append({"step": step, "padding": "x" * 4000 * (1 + step % 40)})
    assert last_step(tmp_path) == 39
    whole = (tmp_path / "metrics.jsonl").read_bytes().replace(b'"step": 2,', b'"step": 2;')  # is not looked at
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    run.append({"after_step": 39, "leak": "tensors"})
    run.forget_after(35)
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    assert kept.count(b"\n") == 35 and whole.startswith(kept) and last_step(tmp_path) == 35
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    run.forget_after(35)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode, "there is nothing to forget"
    run.forget_after(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"" and not list(tmp_path.glob("*.partial"))


def test_the_last_record_is_replaced(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, writes=True)
    assert run.last_record() == {}
    for record in ({"step": 1, "loss": 2.0}, {"step": 2, "loss": 3.0}, {"leak": "tensors", "step": 2}):
        run.append(record)
    assert run.last_record() == {"step": 2, "loss": 3.0}
    run.put_in_place({"step": 2, "loss": 3.0, "score": math.nan})
    assert list(run.records()) == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 3.0, "score": None},
        {"leak": "tensors", "step": 2},
    ]


def test_a_run_is_gone_on_with_exactly_when_asked(tmp_path: Path) -> None:
    check_run_directory(tmp_path, False)
    check_run_directory(tmp_path, "auto")
    with pytest.raises(RunError, match="holds no run to resume"):
        check_run_directory(tmp_path, True)
    write_strategy(tmp_path, Strategy())
    check_run_directory(tmp_path, True)  # it ended before its first step
    check_run_directory(tmp_path, False)
    (tmp_path / "checkpoints").mkdir()
    check_run_directory(tmp_path, True)
    check_run_directory(tmp_path, "auto")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot use the run directory .*file: Not a directory; name another"):
        check_run_directory(tmp_path / "file", "auto")
    with pytest.raises(RunError, match="already holds a run"):
        check_run_directory(tmp_path, False)


def test_a_restart_takes_the_microbatches_that_the_run_had_come_to(tmp_path: Path) -> None:
    strategy = Strategy(width=2, microbatches=2)
    assert strategy_of_restart(tmp_path, strategy, 16) == strategy
    write_strategy(tmp_path, Strategy(microbatches=8))
    assert strategy_of_restart(tmp_path, strategy, 16) == Strategy(width=2, microbatches=8)
    (tmp_path / "strategy.json").write_text('{"width": 0}')
    assert strategy_of_restart(tmp_path, strategy, 16) == strategy
    assert not list(tmp_path.glob("*.partial"))


def test_microbatches_hold_no_more_samples_on_fewer_replicas(tmp_path: Path) -> None:
    for before, data, batch_size, slices in ((2, 1, 8, 2), (1, 2, 8, 1), (3, 2, 12, 2), (4, 1, 12, 4), (2, 1, 2, 2)):
        write_strategy(tmp_path, Strategy(data=before))
        assert strategy_of_restart(tmp_path, Strategy(data=data), batch_size).microbatches == slices


def test_what_a_run_is_told_otherwise_when_it_goes_on_is_said(tmp_path: Path) -> None:
    said: list[str] = []

    def go_on(steps: int, strategy: Strategy, values: list[str] | None) -> None:
        about = {} if values is None else {"values": values}
        ff.fit(tiny.recipe(), strategy, tmp_path, steps=steps, resume="auto", on_message=said.append, about=about)

    go_on(1, Strategy(clip_norm=0.5), ["lr=1e-3", "a=2"])
    go_on(2, Strategy(clip_norm=0.5), ["a=2", "lr=1e-3"])
    go_on(3, Strategy(microbatches=2), [])
    go_on(4, Strategy(microbatches=2), None)
    assert [message for message in said if "otherwise" in message] == [
        "warning: the run goes on otherwise than it was started: microbatches was 1 and is 2, clip_norm was 0.5 and is "
        "None, --set was a=2 lr=1e-3 and is None"
    ]


def test_records_that_are_lost_are_said_to_be(tmp_path: Path) -> None:
    said: list[str] = []
    for steps in (3, 4, 5):
        ff.fit(tiny.recipe(), Strategy(), tmp_path, steps=steps, resume="auto", on_message=said.append)
        if steps == 3:  # a copy that was made while the run wrote
            (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    lost = "warning: metrics.jsonl ends with step 1; what was recorded of the steps since is lost"
    assert [message for message in said if "metrics" in message] == [lost]


def test_a_run_of_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    ff.init_mesh()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run.json").write_text('{"recipe": "a/first.py"}')
    for recipe in ("b/first.py", "first.py", ""):  # the folder may have moved, or one stands elsewhere
        with opened(tmp_path, Strategy(), "auto", recipe=recipe) as (_, goes_on):
            assert goes_on
    for resume in (True, "auto"):
        with (
            pytest.raises(RunError, match=r"holds a run of a/first.py, not of a/other.py"),
            opened(tmp_path, Strategy(), resume, recipe="a/other.py"),
        ):
            raise AssertionError
