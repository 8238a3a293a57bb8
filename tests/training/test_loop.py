"""The loop: resumed runs go on bit for bit, files stay consistent, refusals reach all ranks."""

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch

import fullframe as ff
from fullframe.errors import CheckpointError, FullframeError, RecipeError, RunError
from fullframe.training import loop
from fullframe.training.observers import Observer
from tests.rank_group import rank_group
from tests.training.tiny import Frames, Network, Plain, evaluate, recipe


def lines(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def numbers(run_dir):
    """What must be the same to the last bit: everything but the time."""
    return [{name: value for name, value in line.items() if name != "step_seconds"} for line in lines(run_dir)]


def train(strategy, run_dir, changes=None, **options):
    """Parameters and buffers after the run, and what was said."""
    messages = []
    job = recipe(**(changes or {}))
    model = ff.fit(job, strategy, run_dir, on_message=messages.append, **options)
    return [value.clone() for value in model.state_dict().values()], messages


def train_parts(strategy, folder):
    """Ten steps at once, and five and five, under any random state of the process."""
    whole, _ = train(strategy, folder / "whole", steps=10)
    train(strategy, folder / "parts", steps=5)
    torch.manual_seed(12345)
    parts, messages = train(strategy, folder / "parts", steps=10, resume=True)
    return whole, parts, messages


STRATEGIES = [ff.Strategy(), ff.Strategy(width=2), ff.Strategy(data=2), ff.Strategy(data=2, height=2, microbatches=2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.data}x{s.height}x{s.width}")
def test_ten_steps_are_five_and_five(strategy, tmp_path):
    if strategy.ranks == 1:
        results = [train_parts(strategy, tmp_path)]
    else:
        results = rank_group(strategy.ranks).run(train_parts, strategy, tmp_path)
    for whole, parts, messages in results:
        assert "resumed after step 5" in messages
        for value, expected in zip(parts, whole, strict=True):
            assert torch.equal(value, expected)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert [line["step"] for line in numbers(tmp_path / "whole")] == list(range(1, 11))
    assert len({line["loss"] for line in numbers(tmp_path / "whole")}) == 10


def test_a_run_that_has_all_its_steps_says_so(tmp_path):
    train(ff.Strategy(), tmp_path, steps=2)
    _, messages = train(ff.Strategy(), tmp_path, steps=2, resume=True)
    assert any("has all of its 2 steps already" in said for said in messages)
    files = [tmp_path / name for name in ("run.json", "strategy.json", "metrics.jsonl")]
    before = [file.read_text() for file in files]
    train(ff.Strategy(clip_norm=1.0), tmp_path, steps=1, resume=True)
    assert [file.read_text() for file in files] == before, "what was done is not said to have been done otherwise"
    _, messages = train(ff.Strategy(), tmp_path, steps=3, resume=True)
    assert not any("already" in said for said in messages)


@pytest.mark.parametrize("strategy", [ff.Strategy(data=2), ff.Strategy(data=2, shard_parameters=True)])
def test_all_ranks_get_the_same_model(strategy, tmp_path):
    """Without an evaluation, which shares the replicas' running statistics."""
    first, second = rank_group(2).run(train, strategy, tmp_path, {"evaluate": None, "steps": 2})
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)


def train_steps(strategy, run_dir, steps):
    """Without dropout, whose masks depend on the split."""
    return train(strategy, run_dir, {"model": Network}, steps=steps)[0]


@pytest.mark.parametrize(
    "strategy", [ff.Strategy(width=2), ff.Strategy(height=2, microbatches=1)], ids=["width", "height"]
)
def test_a_split_run_is_the_run_of_one_process(strategy, tmp_path):
    alone = train_steps(ff.Strategy(), tmp_path / "alone", 6)
    for found in rank_group(2).run(train_steps, strategy, tmp_path / "split", 6):
        torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-10)
    for line, expected in zip(numbers(tmp_path / "split"), numbers(tmp_path / "alone"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-7)


def test_resume_on_another_number_of_ranks(tmp_path):
    changes = {"model": Network}
    train(ff.Strategy(), tmp_path / "alone", changes, steps=8)
    rank_group(2).run(train_steps, ff.Strategy(width=2), tmp_path / "moved", 4)
    _, messages = train(ff.Strategy(), tmp_path / "moved", changes, steps=8, resume=True)
    assert any(
        "of data 1 x height 1 x width 2, this run is of data 1 x height 1 x width 1" in message for message in messages
    )
    for line, expected in zip(lines(tmp_path / "moved"), lines(tmp_path / "alone"), strict=True):
        assert line["step"] == expected["step"] and line["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert ff.Strategy.from_json((tmp_path / "moved" / "strategy.json").read_text()) == ff.Strategy()


def test_metrics_after_a_resume_from_an_earlier_checkpoint(tmp_path):
    train(ff.Strategy(), tmp_path, steps=7, checkpoint_every=3)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [f"step-{n:08d}" for n in (3, 6, 7)]
    before = numbers(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # the crash came while a line was written
    (tmp_path / "checkpoints" / "step-00000007" / "rank-0.safetensors").write_bytes(b"damaged")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    _, messages = train(ff.Strategy(), tmp_path, steps=9, resume=True)
    assert "step-00000007 is unreadable" in messages[0] and messages[1] == "resumed after step 3"
    assert [line["step"] for line in numbers(tmp_path)] == list(range(1, 10))
    assert numbers(tmp_path)[:7] == before
    log = (tmp_path / "log.txt").read_text()
    assert all(message in log for message in messages)


def test_a_step_that_could_not_be_recorded_gets_no_checkpoint(tmp_path):
    metrics, kept = tmp_path / "metrics.jsonl", tmp_path / "kept.jsonl"

    def in_the_way(record):
        if record["step"] == 2:
            metrics.rename(kept)
            metrics.mkdir()

    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl: Is a directory"):
        train(ff.Strategy(), tmp_path, steps=5, checkpoint_every=1, on_record=in_the_way)
    metrics.rmdir()
    kept.rename(metrics)
    train(ff.Strategy(), tmp_path, steps=5, checkpoint_every=1, resume=True)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


def halved_every_step(step):
    return 0.5**step


def test_the_schedule_multiplies_the_learning_rate_and_is_resumed(tmp_path):
    rates = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    for number, schedule in enumerate((halved_every_step, lambda step: torch.tensor(0.5) ** step)):
        changes = {"schedule": schedule, "optimizer": lambda parameters: Noted(parameters, lr=2.0)}
        rates.clear()
        train(ff.Strategy(), tmp_path / str(number), changes, steps=2)
        train(ff.Strategy(), tmp_path / str(number), changes, steps=4, resume=True)
        assert rates == [1.0, 0.5, 0.25, 0.125] and all(type(rate) is float for rate in rates)
        assert [line["learning_rate"] for line in lines(tmp_path / str(number))] == rates


class Making(Plain):
    """Makes buffers when it is first called."""

    def forward(self, image):
        if not hasattr(self, "grid"):
            self.register_buffer("grid", 2 * torch.ones(1, dtype=image.dtype))
            self.register_buffer("offset", torch.zeros(1, dtype=image.dtype), persistent=False)
        return super().forward(image) * self.grid + self.offset


def buffers_of_whole(folder):
    model = ff.fit(recipe(model=Making), ff.Strategy(data=2, shard_parameters=True), folder, steps=1)
    return {name: value.item() for name, value in model.named_buffers() if name in ("grid", "offset")}, [
        *model.state_dict()
    ]


def test_the_whole_model_has_the_buffers_that_its_forward_made(tmp_path):
    for buffers, stored in rank_group(2).run(buffers_of_whole, tmp_path):
        assert buffers == {"grid": 2.0, "offset": 0.0} and "grid" in stored and "offset" not in stored


def test_a_finished_run_resumed_does_nothing(tmp_path):
    first, _ = train(ff.Strategy(), tmp_path, steps=3)
    before = (tmp_path / "metrics.jsonl").read_text()
    again, _ = train(ff.Strategy(), tmp_path, steps=3, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert all(map(torch.equal, first, again))


def refusal(strategy, run_dir, changes, options):
    try:
        ff.fit(recipe(**changes), strategy, run_dir, **options)
    except FullframeError as error:
        return type(error), str(error)
    return None, ""


def larger():
    return torch.nn.Conv2d(3, 4, 5)


def test_refusals_reach_all_ranks(tmp_path):
    width = ff.Strategy(width=2)
    run = tmp_path / "run"
    rank_group(2).run(train_steps, width, run, 2)
    cases = [
        (width, run, {}, {}, RunError, "already holds a run; go on with it by --resume"),
        (width, tmp_path / "nothing", {}, {"resume": True}, RunError, "holds no run to resume; check the path"),
        (width, run, {"model": larger}, {"resume": True}, CheckpointError, "is of another model: the model's"),
        (width, run, {"batch_size": 2}, {"resume": True}, CheckpointError, "loader had batch_size 4, this one has 2"),
        (ff.Strategy(width=3), tmp_path / "x", {}, {}, FullframeError, "does not divide the 2 ranks"),
        (ff.Strategy(), tmp_path / "x", {}, {}, FullframeError, "1 rank, this job has 2"),
        (ff.Strategy(data=2), tmp_path / "x", {"batch_size": 3}, {}, RecipeError, "no multiple of the 2 data replicas"),
    ]
    for strategy, folder, changes, options, kind, message in cases:
        for found, text in rank_group(2).run(refusal, strategy, folder, changes, options):
            assert found is not None and issubclass(found, kind), (found, message)
            assert message in text


def test_a_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot use the run directory .*: Not a directory; name another"):
        train(ff.Strategy(), tmp_path / "file" / "run", steps=1)


def test_a_run_that_failed_before_its_first_step_may_be_started_again(tmp_path):
    def broken(model, batch):
        raise KeyError("no such thing in the batch")

    with pytest.raises(KeyError):
        train(ff.Strategy(), tmp_path, {"loss": broken}, steps=1)
    train(ff.Strategy(), tmp_path, steps=1)
    assert [line["step"] for line in lines(tmp_path)] == [1]


def resumed_from_nothing(strategy, run_dir):
    return train(strategy, run_dir, steps=2, resume=True)[1]


def test_resume_without_a_checkpoint_starts_the_run_anew(tmp_path):
    strategy = ff.Strategy(data=2, width=2)
    rank_group(4).run(train_steps_with_dropout, strategy, tmp_path / "whole")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "strategy.json").write_text(strategy.to_json())
    for messages in rank_group(4).run(resumed_from_nothing, strategy, tmp_path / "begun"):
        assert messages[0] == "no checkpoint was written yet; starting from the first step"
    assert numbers(tmp_path / "begun") == numbers(tmp_path / "whole")


def train_steps_with_dropout(strategy, run_dir):
    return train(strategy, run_dir, steps=2)[1]


def measured(strategy, run_dir):
    train(
        strategy,
        run_dir,
        {"model": Network, "evaluate": evaluate, "evaluation_data": evaluation_frames, "evaluate_every": 2},
        steps=5,
    )


def evaluation_frames():
    return Frames(3, augment=False)


def test_evaluation(tmp_path):
    train(ff.Strategy(), tmp_path / "without", {"model": Network}, steps=5)
    measured(ff.Strategy(), tmp_path / "alone")
    rank_group(2).run(measured, ff.Strategy(width=2), tmp_path / "split")
    found = lines(tmp_path / "alone")
    assert [line["step"] for line in found if "accuracy" in line] == [2, 4, 5], "every two steps and after the last"
    assert [line["loss"] for line in found] == [line["loss"] for line in lines(tmp_path / "without")]
    for line, expected in zip(lines(tmp_path / "split"), found, strict=True):
        for name in set(expected) - {"step_seconds"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-7)


def evaluated(strategy):
    """What three samples give on replicas of which one reads two and the other one."""
    from fullframe.training.evaluation import evaluate as measure

    mesh = ff.init_mesh(strategy.height, strategy.width)
    torch.manual_seed(0)
    model = Network()
    model.body.eval()
    found = measure(recipe(evaluate=evaluate, evaluation_data=evaluation_frames), model, mesh)
    return found, model.training, model.body.training, model.head.training


def test_evaluation_is_spread_over_the_replicas():
    expected, *_ = evaluated(ff.Strategy())
    for strategy in (ff.Strategy(data=2), ff.Strategy(data=2, width=2)):
        for found, *modes in rank_group(strategy.ranks).run(evaluated, strategy):
            assert found == pytest.approx(expected, rel=1e-12)
            assert modes == [True, False, True], "every module's own mode comes back"


def test_evaluation_may_not_hide_the_record(tmp_path):
    changes = {"evaluate": lambda model, batch: {"loss": (0.0, 1)}, "evaluation_data": evaluation_frames}
    with pytest.raises(RecipeError, match="evaluate\\(\\) measures loss, a name that every record has"):
        train(ff.Strategy(), tmp_path, changes, steps=1)


def finish(model, run_dir):
    with open(run_dir / "finished.txt", "a") as file:
        file.write(f"{type(model).__name__} {model.training} {torch.is_grad_enabled()}\n")


def train_to_the_finish(strategy, run_dir):
    train(strategy, run_dir, {"finish": finish}, steps=1)


def alone_at_the_end(strategy, run_dir):
    """What a model of several stages gives the one rank that has it at the end, and one with the same parameters."""
    image, found, again = Frames(1, augment=False).images, [], Plain()
    changes = {"model": Plain, "finish": lambda model, run_dir: found.append(model(image))}
    again.load_state_dict(ff.fit(recipe(**changes), strategy, run_dir, steps=1).state_dict())
    return found, again(image).detach()


def test_one_rank_can_finish_with_a_model_that_was_on_stages(tmp_path):
    (found, expected), (none, _) = rank_group(2).run(alone_at_the_end, ff.Strategy(stages=2), tmp_path)
    assert not none and torch.equal(found[0], expected)


def test_finish_is_called_once(tmp_path):
    rank_group(2).run(train_to_the_finish, ff.Strategy(width=2), tmp_path)
    assert (tmp_path / "finished.txt").read_text() == "Network False False\n"


def test_a_skipped_step_is_recorded_as_null(tmp_path):
    def sometimes(model, batch):
        values = model(batch["image"])
        return values.mean() * (float("nan") if "frame 1" in batch["name"] else 1.0)

    _, messages = train(ff.Strategy(), tmp_path, {"loss": sometimes}, steps=3)
    found = lines(tmp_path)
    assert [line["skipped"] for line in found].count(True) == 1
    skipped = next(line for line in found if line["skipped"])
    assert skipped["loss"] is None and skipped["grad_norm"] is None
    assert any(f"step {skipped['step']} skipped: loss nan" in message for message in messages)


def test_the_process_group_waits_longer_than_the_watch(tmp_path, monkeypatch):
    asked = []

    def init_mesh(*sizes, timeout_seconds, **more):
        asked.append(timeout_seconds)
        return ff.init_mesh(*sizes, **more)

    monkeypatch.setattr(loop, "init_mesh", init_mesh)
    for hang_timeout in (300.0, 3600.0, 0.0):
        ff.fit(recipe(), ff.Strategy(), tmp_path / str(hang_timeout), steps=1, hang_timeout=hang_timeout)
    assert asked == [1800.0, 7200.0, 86400.0]


def test_what_reads_the_batches_ends_with_the_run(tmp_path):
    """Without the garbage collector: its workers would live on, and end seconds after they are asked to."""
    found = []

    class Looking(Observer):
        def begin(self, run):
            found.append(weakref.ref(run.session.state.loader))

    def run(name, workers):
        ff.fit(recipe(workers=workers), ff.Strategy(), tmp_path / name, steps=2, observers=[Looking()])

    run("first", 0)  # in which a process sets up what it keeps
    gc.collect()
    gc.disable()
    try:
        run("second", 2)
        assert found[1]() is None
    finally:
        gc.enable()
