"""Training on volumes whose depth is split: the run of one process, whatever mesh it goes on with."""

import json
from pathlib import Path

import pytest

import fullframe as ff
from tests.rank_group import rank_group
from tests.training.volumes import recipe

CHAIN = {
    "data 1 x depth 2 x height 1 x width 1": ff.Strategy(depth=2, recompute="blocks", recompute_modules=("middle",)),
    "data 2 x depth 2 x height 1 x width 1": ff.Strategy(data=2, depth=2, shard_parameters=True, sync_batchnorm=True),
    "data 1 x height 2 x width 1": ff.Strategy(height=2, clip_norm=1e9),
    "data 1 x depth 2 x height 1 x width 2": ff.Strategy(depth=2, width=2, shard_optimizer=True),
    "data 1 x height 1 x width 1": ff.Strategy(),
}


def trained(strategy: ff.Strategy, run_dir: Path, steps: int, resume: bool) -> list[str]:
    said: list[str] = []
    ff.fit(recipe(), strategy, run_dir, steps=steps, resume=resume, on_message=said.append)
    return said


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_with_depth_and_without(tmp_path: Path) -> None:
    before = ""
    for steps, (mesh, strategy) in zip((2, 3, 4, 5, 6), CHAIN.items(), strict=True):
        job = strategy, tmp_path / "split", steps, bool(before)
        said = trained(*job) if strategy.ranks == 1 else rank_group(strategy.ranks).run(trained, *job)[0]
        assert not before or any(f"the checkpoint is of {before}, this run is of {mesh}: the" in line for line in said)
        assert ff.Strategy.from_json((tmp_path / "split" / "strategy.json").read_text()) == strategy
        before = mesh
    trained(ff.Strategy(), tmp_path / "alone", 6, False)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    assert len(set(losses(tmp_path / "alone"))) == 6
