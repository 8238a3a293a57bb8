"""A run survives: processes are really killed, stopped, hung and told to end; the numbers are those of a calm run."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import fullframe as ff
from fullframe.recipe import load_recipe
from fullframe.spatial.rules.convolution import JOINED_BYTES
from tests.rank_group import JOINED_BYTES_ON_CPU, rank_group

ROOT = Path(__file__).parents[2]
RECIPE = """
import os, signal, time
from pathlib import Path
import torch
from tests.training import tiny

class Heavy(tiny.Network):
    def __init__(self):
        super().__init__(dropout=0.2)
        self.register_buffer("ballast", torch.zeros({ballast_bytes}, dtype=torch.uint8))  # writing it takes a while

steps = 0

def loss(model, batch):
    global steps
    steps += 1
    time.sleep({pause})
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    {trouble}
    return tiny.loss(model, batch)

def recipe():
    return tiny.recipe(model=Heavy, loss=loss, data=lambda: tiny.Frames(60), workers={workers})
"""


def written(
    folder: Path, *, pause: float = 0.0, trouble: str = "pass", workers: int = 0, ballast_bytes: int = 0
) -> Path:
    path = folder / "job.py"
    path.write_text(RECIPE.format(pause=pause, trouble=trouble, workers=workers, ballast_bytes=ballast_bytes))
    return path


class Victim:
    """`fullframe train` in processes of its own."""

    def __init__(self, recipe: Path, run_dir: Path, *options: object, python: tuple[str, ...] = ()):
        self.run_dir = run_dir
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        command = [sys.executable, *python, "-m", "fullframe.cli", "train", recipe, "--run-dir", run_dir, *options]
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=kept | {"PYTHONPATH": f"{ROOT}:{ROOT}/src", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def step(self) -> int:
        """The last step recorded."""
        return max((line["step"] for line in lines(self.run_dir)), default=0)

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run now."""
        found = {}
        for process in psutil.Process(self.process.pid).children():
            try:
                found[int(process.environ()["RANK"])] = process
            except (psutil.Error, KeyError):  # one that has just ended, or not begun
                continue
        return found

    def wait_until(self, condition: Callable[[], bool], pause: float = 0.02) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert self.process.poll() is None, f"the run ended: {self.process.stdout.read()}"
            assert time.monotonic() < deadline, "nothing happens"
            time.sleep(pause)

    def end(self) -> tuple[int, str]:
        """The exit code and all output."""
        output, _ = self.process.communicate(timeout=600)
        return self.process.returncode, output

    def __enter__(self) -> "Victim":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def lines(run_dir: Path) -> list[dict]:
    found = []
    if (run_dir / "metrics.jsonl").exists():
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # it is being written
                break
    return found


def numbers(run_dir: Path) -> list[dict]:
    """Everything that must be the same to the last bit."""
    return [{name: value for name, value in line.items() if name != "step_seconds"} for line in lines(run_dir)]


def calm(recipe: Path, strategy: ff.Strategy, run_dir: Path, steps: int, resume: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(JOINED_BYTES, "cpu", JOINED_BYTES_ON_CPU)  # as the ranks of a launcher
        ff.fit(load_recipe(recipe), strategy, run_dir, steps=steps, resume=resume)


@pytest.mark.further
@pytest.mark.timeout(3600)  # with --kills 20
def test_ranks_killed_at_random_moments(tmp_path, request, seed):
    """In a step, while a checkpoint is written, while the ranks start; `--kills 20` is the whole of it, on 4 ranks."""
    kills = request.config.getoption("--kills")
    draw = random.Random(seed)
    width, data = 2, 1 if kills <= 3 else 2
    others = draw.choices(["step", "checkpoint", "start"], [3, 2, 1], k=kills)
    moments = ["checkpoint", "step", "start", *others][:kills]
    steps = 5 * kills + 8
    recipe = written(tmp_path, pause=0.03, ballast_bytes=32 << 20)
    options = ("--data", data, "--width", width, "--steps", steps, "--checkpoint-every", 4, "--max-restarts", kills)
    dead: list[tuple[int, str, int]] = []
    with Victim(recipe, tmp_path / "run", *options) as victim:
        for number, moment in enumerate(moments):
            victim.wait_until(lambda: len(victim.ranks()) == data * width)
            ranks = victim.ranks()
            if moment == "step":
                target = victim.step + draw.randint(1, 8)
                victim.wait_until(lambda target=target: victim.step >= target)
                time.sleep(draw.uniform(0, 0.05))
            elif moment == "checkpoint":
                victim.wait_until(lambda: any((tmp_path / "run" / "checkpoints").glob("*.partial")), pause=0.001)
                time.sleep(draw.uniform(0, 0.03))
            else:
                time.sleep(draw.uniform(0, 4))
            rank = number % 2 if kills <= 3 else draw.randrange(data * width)
            ranks[rank].kill()
            dead.append((rank, moment, victim.step))
            victim.wait_until(lambda rank=ranks[rank]: not rank.is_running())
        code, output = victim.end()
    print(f"killed (rank, moment, last step recorded): {dead}")
    assert code == 0, output
    assert output.count("all ranks start again from the last checkpoint") == kills, output
    (tmp_path / "calm").mkdir()
    strategy, calm_dir = ff.Strategy(data=data, width=width), tmp_path / "calm" / "run"
    rank_group(data * width).run(calm, written(tmp_path / "calm"), strategy, calm_dir, steps, timeout_seconds=600)
    assert numbers(tmp_path / "run") == numbers(calm_dir)
    assert [line["step"] for line in numbers(tmp_path / "run")] == list(range(1, steps + 1))


@pytest.mark.further
def test_told_to_stop_then_abandoned_then_under_torchrun(tmp_path):
    """One run in three launches, each the same command: what a scheduler does that queues it again and again."""
    recipe, run_dir = written(tmp_path, pause=0.1, workers=1), tmp_path / "run"
    options = ("--width", 2, "--steps", 24, "--checkpoint-every", 100, "--auto-resume")
    with Victim(recipe, run_dir, *options) as victim:
        victim.wait_until(lambda: victim.step >= 3)
        everyone = [psutil.Process(victim.process.pid), *psutil.Process(victim.process.pid).children(recursive=True)]
        training = [process for process in everyone if "simulate" not in process.cmdline()]  # the prediction's
        assert len(training) == 5, "the launcher, two ranks, and a loader's worker of each"
        for process in everyone:  # as Slurm does
            process.terminate()
        code, output = victim.end()
    assert code == 0, output
    (stopped,) = (line for line in output.splitlines() if line.startswith("stopped after step "))
    assert stopped == f"stopped after step {victim.step} by SIGTERM; go on with --resume"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{victim.step:08d}"]

    with Victim(recipe, run_dir, *options) as victim:
        before = victim.step
        victim.wait_until(lambda: victim.step >= before + 3)
        rest = psutil.Process(victim.process.pid).children(recursive=True)
        victim.process.kill()
        _, alive = psutil.wait_procs(rest, timeout=30)
        assert not alive, "ranks and their workers outlive the launcher"

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    with Victim(recipe, run_dir, *options, python=torchrun) as victim:
        before = victim.step
        victim.wait_until(lambda: len(victim.ranks()) == 2 and victim.step == before + 1)
        victim.ranks()[0].kill()
        code, output = victim.end()
    assert code == 0, output
    assert "started again: a rank had failed" in (run_dir / "log.txt").read_text()

    (tmp_path / "calm").mkdir()
    rank_group(2).run(calm, written(tmp_path / "calm"), ff.Strategy(width=2), tmp_path / "calm" / "run", 24)
    assert numbers(run_dir) == numbers(tmp_path / "calm" / "run")


HANGS_AND_RUNS_OUT = """
    if (rank, attempt, steps) == (1, 0, 4):
        time.sleep(1000)
    if (rank, attempt, steps) == (1, 1, 4):  # step 6, after the checkpoint of step 2
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


@pytest.mark.further
def test_a_rank_hangs_and_a_rank_runs_out_of_memory(tmp_path):
    recipe, run_dir = written(tmp_path, trouble=HANGS_AND_RUNS_OUT.strip()), tmp_path / "run"
    options = ("--width", 2, "--steps", 8, "--checkpoint-every", 2, "--hang-timeout", 8, "--max-restarts", 1)
    with Victim(recipe, run_dir, *options) as victim:
        code, output = victim.end()
    assert code == 0, output
    log = (run_dir / "log.txt").read_text()
    line = next(n for n, text in enumerate(recipe.read_text().splitlines(), start=1) if "sleep(1000)" in text)
    assert "the job hangs, no rank got on for 8 s" in log
    assert f"rank 1 does not reach the others: step 4, {recipe}, line {line}, in loss" in log
    assert "rank 0 waits for that: step 4, " in log, log
    assert "module body.0 (Conv2d)" in log
    assert f'File "{recipe}", line {line} in loss' in (run_dir / "stacks" / "rank-1-before.txt").read_text()
    problem = "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert f"out of memory in step 6 ({problem}): going on with 2 microbatches; batch norm now takes its" in log
    assert log.count(": going on with 2 microbatches") == 1 and "resumed after step 5" in log
    assert ff.Strategy.from_json((run_dir / "strategy.json").read_text()) == ff.Strategy(width=2, microbatches=2)

    calmly = written(tmp_path)
    rank_group(2).run(calm, calmly, ff.Strategy(width=2), tmp_path / "calm", 5)
    rank_group(2).run(calm, calmly, ff.Strategy(width=2, microbatches=2), tmp_path / "calm", 8, True)
    assert numbers(run_dir) == numbers(tmp_path / "calm")
