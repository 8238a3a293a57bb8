"""What a run looks like at a glance, and what is found to need a look."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fullframe.observation.run_files import read_run
from fullframe.observation.summary import Finding, compared, leak_sentence, slowest_of, smoothed, summarize
from tests.observation.run_writer import (
    LEAK,
    MIB,
    STARTED,
    WAYS,
    facts,
    good_run,
    observations,
    out_of_memory,
    records,
    troubled_run,
    write_run,
)


def texts(findings: tuple[Finding, ...], level: str) -> list[str]:
    return [finding.text for finding in findings if finding.level == level]


def test_a_good_run_needs_no_look(tmp_path: Path) -> None:
    summary = summarize(read_run(good_run(tmp_path / "run")))
    assert (summary.level, summary.findings) == ("good", ())
    assert (summary.step, summary.steps, summary.skipped, summary.slowest) == (300, 300, 0, None)
    assert summary.lasted_seconds == 123
    assert summary.step_seconds == pytest.approx(0.43 + 0.004, abs=0.02), "a step, and reading its batch"
    assert summary.images_per_second == pytest.approx(4 / summary.step_seconds)
    assert summary.peak is not None and summary.peak[0] == 1, "rank 1 holds one per cent more"
    assert summary.peak[1].peak_bytes == max(row.peak_bytes or 0 for row in read_run(tmp_path / "run").observed[1])


def test_troubles_are_found_each_once_the_worst_first(tmp_path: Path) -> None:
    summary = summarize(read_run(troubled_run(tmp_path / "run")))
    assert summary.level == "bad" and summary.slowest is not None
    assert summary.slowest[0] == 2 and summary.slowest[1] == pytest.approx(0.3)
    bad, warn = texts(summary.findings, "bad"), texts(summary.findings, "warn")
    assert bad == [
        "the run failed after step 300: RunError: 3 steps in a row were skipped",
        LEAK["text"],
    ]
    assert warn == [
        "3 steps of 200 skipped: the loss or a gradient was not finite",
        "rank 3 holds 3.1 GiB of 3.1 GiB, and 3 more nearly as much: little is left",
        "rank 2 works 30% longer on a step than the others, who wait for it",
        "the ranks were started again 2 times",
    ]
    assert texts(summary.findings, "info") == ["2026-03-14 09:27:01 warning: rank 3 died (SIGKILL)"]
    assert [finding.level for finding in summary.findings] == ["bad"] * 2 + ["warn"] * 4 + ["info"]


@pytest.mark.parametrize(
    ("changes", "now", "level", "said"),
    [
        ({"state": "stopped", "reason": "by SIGTERM"}, 0.0, "info", "the run was stopped after step 300: by SIGTERM"),
        ({"reason": "stopped early: ..."}, 0.0, "info", "the run finished after step 300: stopped early: ..."),
        ({"state": "running", "pid": 2**22 + 1, "ended": None}, 0.0, "bad", "the run died after step 300: process"),
        ({"state": "running", "ended": None}, 600.0, "warn", "nothing was written for 10 min 00 s"),
        ({"state": "failed", "reason": "Error: a\n  b"}, 0.0, "bad", "the run failed after step 300: Error: a b"),
        ({"state": "done"}, 0.0, "info", "run.json does not say how it stands, so it is not known"),
        ({"restarts": 1}, 0.0, "warn", "the ranks were started again once"),
    ],
)
def test_the_state_of_a_run_is_said(tmp_path: Path, changes, now, level, said) -> None:
    path = good_run(tmp_path / "run", **changes)
    written = read_run(path).written
    assert written is not None
    summary = summarize(read_run(path), written + now)
    assert next(iter(texts(summary.findings, level))).startswith(said)


def _at(path: Path, step: int) -> str:
    """When the first rank was done with the step."""
    rows = map(json.loads, (path / "observed" / "rank0.jsonl").read_text().splitlines())
    time = next(row["time"] for row in rows if row["step"] == step)
    return datetime.fromtimestamp(time, UTC).isoformat()


def test_a_live_run_knows_how_long_it_will_take(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run", state="running", ended=None)
    run = facts(state="running", ended=None, steps=500, step=300)
    summary = summarize(read_run(write_run(path, run=run)), STARTED.timestamp() + 130)
    assert (summary.lasted_seconds, summary.findings) == (130, ())
    assert summary.seconds_left == pytest.approx(200 * 0.41), "by the clock of what was observed"
    early = facts(state="running", ended=None, steps=500, step=300, started=_at(path, 295))
    assert summarize(read_run(write_run(path, run=early)), STARTED.timestamp()).lasted_seconds == 0, "a clock put back"
    # Resumed: what lies before is of another session, two hours earlier.
    resumed = facts(state="running", ended=None, steps=500, step=300, started=_at(path, 295))
    for file in (path / "observed").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        of_both = [row | {"time": row["time"] - 7200 * (row["step"] < 295)} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in of_both))
    summary = summarize(read_run(write_run(path, run=resumed)), STARTED.timestamp() + 130)
    assert summary.seconds_left == pytest.approx(200 * 0.41)


def test_the_numbers_at_a_glance_are_the_newest_the_best_and_the_largest(tmp_path: Path) -> None:
    metrics = [{"step": n, "loss": loss, "skipped": False} for n, loss in ((1, 3.0), (2, 1.0), (3, 2.0))]
    rows = {rank: observations(rank, [1, 2, 3], 1.0 + 0.05 * rank, 4096 * (2 - rank)) for rank in (0, 1)}
    rows[0][1]["gpu_percent"], rows[0][2]["gpu_percent"] = 10.0, None  # the driver was not asked in the last step
    rows[1][2] |= {"others_bytes": 42 * MIB}
    rows[0][2] |= {"others_bytes": 80 * MIB}
    summary = summarize(read_run(write_run(tmp_path / "run", metrics=metrics, observed=rows)))
    assert (summary.loss, summary.first_loss, summary.best_loss) == (2.0, 3.0, 1.0)
    assert (summary.limit_bytes, summary.ranks[0].gpu_percent) == (8192 * MIB, 10.0)
    assert [(rank.rank, rank.step, rank.host_bytes) for rank in summary.ranks] == [(0, 3, 900 * MIB), (1, 3, 901 * MIB)]
    assert summary.step_seconds == sum(summary.ranks[1].seconds.values()), "the slower one, where no step was timed"
    assert texts(summary.findings, "warn") == ["other processes hold 42 MiB of rank 1's GPU"], "80 of 8192 is little"
    assert texts(summary.findings, "info") == ["there is no run.json, so it is not known whether the run goes on"]
    assert (summary.level, summary.seconds_left) == ("warn", None)


def test_a_loss_that_rises_or_breaks_is_told(tmp_path: Path) -> None:
    rising = [{"step": n, "loss": 1 + 0.1 * n, "step_seconds": 0.1} for n in range(1, 41)]
    summary = summarize(read_run(write_run(tmp_path / "rising", metrics=rising)))
    assert texts(summary.findings, "warn") == ["the loss is higher than at the start: 4.8 after 1.3"]
    skipped = [record | {"skipped": record["step"] < 4} for record in records(20)]
    summary = summarize(read_run(write_run(tmp_path / "skipped", metrics=skipped)))
    assert texts(summary.findings, "bad") == ["3 steps of 20 skipped: the loss or a gradient was not finite"]
    broken = [*records(30), {"step": 31, "loss": None, "skipped": False}]
    assert texts(summarize(read_run(write_run(tmp_path / "nan", metrics=broken))).findings, "bad") == [
        "the last loss is not finite"
    ]


def test_waiting_for_data_and_slower_steps_are_told(tmp_path: Path) -> None:
    metrics = [{"step": n, "loss": 1 / n, "step_seconds": 0.1 if n < 150 else 0.2} for n in range(1, 201)]
    rows = observations(0, range(1, 201))
    for row in rows:
        row["seconds"]["data"] = 0.2
    run = read_run(write_run(tmp_path / "run", metrics=metrics, observed={0: rows}))
    assert texts(summarize(run).findings, "warn") == [
        "rank 0 waits for data 33% of a step",
        "steps became slower: 0.2 s after 0.1 s",
    ]
    assert summarize(run).ranks[0].without_core_seconds is None, "it was not measured"


def test_a_wait_is_no_more_than_the_step_that_it_was_in(tmp_path: Path) -> None:
    rows = observations(0, range(1, 4))
    kinds = ("data", "forward", "backward")  # another of them is long in each step
    for long, row in zip(kinds, rows, strict=True):
        row["seconds"] = {kind: 0.8 if kind == long else 0.1 for kind in kinds}
        row["without_core_seconds"] = 0.7
    run = read_run(write_run(tmp_path / "run", metrics=records(3), observed={0: rows}))
    assert "rank 0 waits for a core 70% of a step: others have them" in texts(summarize(run).findings, "warn")


def test_a_rank_that_has_no_core_is_told_and_the_prediction_is_held_against_the_rest(tmp_path: Path) -> None:
    metrics = [{"step": n, "loss": 1 / n, "step_seconds": 0.4} for n in range(1, 41)]
    seen = {rank: observations(rank, range(1, 41)) for rank in (0, 1)}
    for rank, stood in ((0, 0.1), (1, 0.2)):
        for row in seen[rank]:
            row["without_core_seconds"] = stood if row["step"] % 3 else 0.0
    predicted = facts(prediction={"peak_bytes": None, "step_seconds": 0.15})
    run = read_run(write_run(tmp_path / "run", metrics=metrics, observed=seen, run=predicted))
    summary = summarize(run)
    share = 0.2 / sum(summary.ranks[1].seconds.values())
    assert texts(summary.findings, "warn") == [f"rank 1 waits for a core {share:.0%} of a step: others have them"]
    (step,) = compared(run, summary)
    assert (round(step.measured, 9), step.beside) == (0.3, 0.1)
    assert texts(summary.findings, "info") == [
        "step time: 150 ms predicted, 300 ms measured (+100%) and 100 ms more without a core"
    ]


def test_a_prediction_that_is_off_is_told_and_one_that_holds_is_not(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run")
    run = read_run(path)
    assert [name for name, *_ in compared(run, summarize(run))] == ["peak memory", "step time"]
    wrong = facts(prediction={"peak_bytes": 1500 * MIB, "step_seconds": 0.2})
    found = texts(summarize(read_run(write_run(path, run=wrong))).findings, "info")
    assert [text.split(":")[0] for text in found] == ["peak memory", "step time"]
    assert "1.46 GiB predicted, 2.9" in found[0] and "200 ms predicted, 43" in found[1]


def test_an_out_of_memory_and_unreadable_lines_are_told(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run")
    (path / "oom.json").write_text(json.dumps(out_of_memory(step=301, strategy={})))
    with open(path / "metrics.jsonl", "a") as file:
        file.write("\x00\x00\n")
    summary = summarize(read_run(path))
    text = "rank 1 ran out of memory in step 301, in forward; 0.586 GiB were asked for"
    assert texts(summary.findings, "bad") == [text]
    assert texts(summary.findings, "info") == ["1 line of the run's files could not be read and left out"]


def test_an_out_of_memory_that_the_run_survived_is_a_warning(tmp_path: Path) -> None:
    path = good_run(tmp_path / "run")
    (path / "oom.json").write_text(json.dumps(out_of_memory(ways=WAYS)))
    with open(path / "log.txt", "a") as file:
        file.write("2026-03-14 09:28 rank 1 ran out of memory in step 201\n2026-03-14 09:28 out of memory: oom.html\n")
    (found,) = summarize(read_run(path)).findings
    assert found.level == "warn" and found.remedy == WAYS[0]["command"]
    assert found.text.endswith("asked for; going on with 2 microbatches in place of 1")
    (path / "oom.json").write_text(json.dumps(out_of_memory(step=300, strategy={})))
    assert summarize(read_run(path)).level == "warn", "the step was done in the end"
    (path / "run.json").write_text(json.dumps(facts(state="failed")))
    assert len(texts(summarize(read_run(path)).findings, "bad")) == 2, "it failed, and ran out"


def test_the_slowest_rank_is_the_one_that_works_most_not_the_one_that_waits(tmp_path: Path) -> None:
    rows = {rank: observations(rank, [1, 2, 3], 1.5 if rank == 1 else 1.0) for rank in range(3)}
    for rank in (0, 2):  # what the others wait for is rank 1: their steps take as long as its
        for row in rows[rank]:
            row["seconds"]["exchange"] += 2.0
    ranks = summarize(read_run(write_run(tmp_path / "run", metrics=records(3), observed=rows))).ranks
    slowest = slowest_of(ranks)
    assert slowest is not None and slowest[0] == 1
    assert slowest_of(ranks[:1]) is None and slowest_of(()) is None


def test_smoothing_does_not_lag_and_skips_what_is_not_finite() -> None:
    line = [float(n) for n in range(100)]
    assert smoothed(line) == pytest.approx(line), "a straight line stays where it is"
    line[50] = math.nan
    assert all(map(math.isfinite, smoothed(line)))
    assert smoothed([]) == []


def test_a_leak_without_a_sentence_still_has_its_place() -> None:
    assert f"leak: {leak_sentence(LEAK)}" == LEAK["text"]
    assert leak_sentence({"leak": "list", "path": "job.py", "line": 7}) == "list (job.py:7)"


def test_a_time_without_a_zone_is_this_machines(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", run=facts(started="2026-03-14T09:26:00", ended="2026-03-14T09:27:00")))
    assert summarize(run).lasted_seconds == 60
