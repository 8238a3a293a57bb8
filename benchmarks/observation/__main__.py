"""`python -m benchmarks.observation [--pairs N] [--json]`: steps with and without observers, in turns."""

import gc
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from torch.utils.data import Dataset

import fullframe as ff
from benchmarks import machine, reader, show
from benchmarks.networks import convnext_tiny
from fullframe.observation.leaks.observer import LeakObserver
from fullframe.observation.memory.timeline import Timeline
from fullframe.ranks.mesh import init_mesh
from fullframe.training.observers import Observed, Observers
from fullframe.training.session import assemble

SHAPE = (2, 3, 128, 256)
_FOLLOWED = 2  # step of the observers that is traced, as one of every thousand is


class Frames(Dataset[dict[str, Any]]):
    """Samples of ones."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.ones(SHAPE[1:])}


def loss(model: Any, batch: Any) -> Any:
    """Some scalar."""
    return model(batch["image"]).last_hidden_state.square().mean()


def measured(pairs: int, progress: Console) -> dict[str, Any]:
    """`pairs` steps without observers and as many with them, in random turns; processor and wall seconds."""
    recipe = ff.Recipe(model=convnext_tiny, loss=loss, optimizer=torch.optim.AdamW, data=Frames, batch_size=SHAPE[0])
    mesh = init_mesh()
    session = assemble(recipe, ff.Strategy(), mesh)
    observers = Observers([Timeline(), LeakObserver()])
    with tempfile.TemporaryDirectory() as folder:
        run = Observed(
            recipe=recipe,
            session=session,
            strategy=ff.Strategy(),
            mesh=mesh,
            run_dir=Path(folder),
            rank=0,
            say=lambda text: progress.print(text),
            append=lambda record: None,
        )
        with observers.looking_on(run):
            plain, watched, own = _turns(session, observers, pairs, progress)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
    followed = watched.pop(_FOLLOWED - 1)
    del own[_FOLLOWED - 1], plain[_FOLLOWED - 1]
    return {
        "machine": machine(),
        "shape": list(SHAPE),
        "pairs": pairs,
        "own_share": statistics.fmean(own) / statistics.fmean(cpu for cpu, _ in plain),
        "processor_share": _share(plain, watched, 0),
        "wall_share": _share(plain, watched, 1),
        "processor_error": _error(plain, watched, 0),
        "wall_error": _error(plain, watched, 1),
        "processor_seconds": statistics.median(cpu for cpu, _ in plain),
        "followed_step_share": followed[0] / statistics.median(cpu for cpu, _ in plain) - 1,
        "bytes_a_step": size / len(watched),
    }


def _turns(
    session: Any, observers: Observers, pairs: int, progress: Console
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[float]]:
    batch = next(iter(session.state.loader))
    plain: list[tuple[float, float]] = []
    watched: list[tuple[float, float]] = []
    for _ in range(3):
        session.step(batch)
    gc.collect()  # one of all objects takes half a step, and would fall to one kind or the other by chance
    generator = random.Random(0)
    own: list[float] = []
    for number in range(1, pairs + 1):
        for looks in generator.sample((True, False), 2):
            session.step.phases.active = looks
            began = time.thread_time(), time.perf_counter()
            if looks:
                observers.before_step(number)
                observers.batch_read(number, batch)
            before = time.thread_time() - began[0]
            record = session.step(batch)
            if looks:
                ended = time.thread_time()
                observers.step_taken(number)
                observers.after_step(number, {"step": number, "loss": record.loss})
                own.append(before + time.thread_time() - ended)
            took = time.thread_time() - began[0], time.perf_counter() - began[1]
            (watched if looks else plain).append(took)
        progress.print(f"pair {number}: {plain[-1][0]:.3f} s without, {watched[-1][0]:.3f} with", highlight=False)
    return plain, watched, own


def _share(plain: list[tuple[float, float]], watched: list[tuple[float, float]], clock: int) -> float:
    """How much more the sum of the watched steps took than as many plain ones."""
    without = statistics.fmean(times[clock] for times in plain)
    return statistics.fmean(times[clock] for times in watched) / without - 1


def _error(plain: list[tuple[float, float]], watched: list[tuple[float, float]], clock: int) -> float:
    """The standard error of that share: of the mean difference of neighbours."""
    differences = [more[clock] - less[clock] for more, less in zip(watched, plain, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return spread / statistics.fmean(times[clock] for times in plain)


def print_table(found: dict[str, Any], console: Console) -> None:
    """The findings for a reader."""
    console.print(found["machine"], highlight=False)
    console.print(
        f"ConvNeXt-tiny at {tuple(found['shape'])}, {found['pairs']} steps without and with observers in turns: "
        f"the observers' own work is {found['own_share']:.2%} of a step; "
        f"{found['processor_share']:+.2%} +- {found['processor_error']:.2%} processor time, {found['wall_share']:+.2%} "
        f"+- {found['wall_error']:.2%} by the wall (standard errors); a step that is "
        f"followed (one of a thousand): {found['followed_step_share']:+.0%}; {found['bytes_a_step']:.0f} bytes of "
        "observed/ a step, until it is thinned",
        highlight=False,
    )


def main(pairs: int = 60, json: bool = False) -> None:
    """Measure and print.

    Args:
        pairs: Steps of each kind.
        json: Print one JSON object on stdout.
    """
    torch.set_num_threads(1)
    show(measured(pairs, Console(stderr=True) if json else reader()), print_table, json)


if __name__ == "__main__":
    tyro.cli(main)
