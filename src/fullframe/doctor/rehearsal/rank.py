"""One rank of a rehearsal: runs a recipe's steps or a user's script, and notes how it ends."""

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullframe.doctor.probes.notes import End, Failure, Notebook, file_of_rank, read_notes
from fullframe.doctor.probes.training import Enough, Probes
from fullframe.doctor.rehearsal.recipe_steps import WHOLE, rehearse
from fullframe.errors import DivergenceError, FullframeError
from fullframe.processes.exit_reasons import is_machines_fault
from fullframe.recipe import Recipe, load_recipe, values_of
from fullframe.simulation.fake.blame import users_frames
from fullframe.strategy import Strategy

_OTHERS_SECONDS = 15.0  # until the other ranks have noted their end


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a rank is asked to do; it travels as JSON."""

    program: str
    folder: str
    ranks: int
    steps: int
    strategy: str | None = None  # of a recipe, as JSON; None for a script
    arguments: tuple[str, ...] = ()  # of a script
    values: tuple[str, ...] = ()  # NAME=VALUE, that a recipe is called with
    batch_size: int | None = None
    small: bool = True
    whole: bool = True

    def to_json(self) -> str:
        """All fields."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """What `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "arguments": tuple(fields["arguments"]), "values": tuple(fields["values"])})


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank says where it stands when it gets SIGUSR2."""
    return folder / f"rank{rank}.stack"


def run_rank(
    request: Request,
    recipe_of: Callable[[Recipe], Recipe],
    measure: Callable[[], dict[str, float]],
) -> None:
    """Run this rank's part and leave the process; its notes say how it ended."""
    rank, folder = int(os.environ["RANK"]), Path(request.folder)
    notebook = Notebook(file_of_rank(folder / WHOLE, rank))
    os.dup2(2, 1)  # what a program prints is no finding
    with open(stack_file(folder, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=False)
        try:
            notebook.note(End(reason=_run(request, rank, notebook, recipe_of, measure)))
        except BaseException as error:
            notebook.note(_failure(error))
        _wait_for_others(folder / WHOLE, request.ranks)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that wait for other ranks would keep the process


def _run(
    request: Request,
    rank: int,
    notebook: Notebook,
    recipe_of: Callable[[Recipe], Recipe],
    measure: Callable[[], dict[str, float]],
) -> str:
    if request.strategy is not None:
        recipe = recipe_of(load_recipe(request.program, values_of(request.values)))
        strategy = Strategy.from_json(request.strategy)
        rehearse(recipe, strategy, Path(request.folder), small=request.small, whole=request.whole, measure=measure)
        return "enough"
    probes = Probes(notebook.note, rank=rank, started=request.ranks, steps=request.steps)
    sys.argv = [request.program, *request.arguments]
    sys.path[0] = str(Path(request.program).resolve().parent)
    try:
        with probes.attached(), _replica_of_meshes(probes):
            runpy.run_path(request.program, run_name="__main__")
    except Enough:
        return "enough"
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    return "through"


@contextlib.contextmanager
def _replica_of_meshes(probes: Probes) -> Iterator[None]:
    """Ranks of a mesh's replica read the same samples; a script makes its mesh while it runs."""
    from fullframe.ranks import mesh as meshes
    from fullframe.simulation.fake.replaced import replaced

    original = meshes.init_mesh

    def init_mesh(*args: Any, **kwargs: Any) -> Any:
        mesh = original(*args, **kwargs)
        probes.replica = lambda: mesh.get_local_rank("data")
        return mesh

    with replaced(meshes, "init_mesh", init_mesh):
        yield


def _failure(error: BaseException) -> Failure:
    every = [f for f in traceback.extract_tb(error.__traceback__) if "/fullframe/doctor/" not in f.filename]
    ours = isinstance(error, FullframeError)  # which says by itself what is to be done
    frames = (users_frames(error) or ([] if ours else every))[-3:]
    at = frames[-1:]
    consequence = isinstance(error, DivergenceError) and error.consequence
    lines = "".join(traceback.format_list(frames)).rstrip()
    return Failure(
        kind=type(error).__name__,
        text=str(error) or repr(error),
        trace=lines,
        path=at[0].filename if at else None,
        line=at[0].lineno if at else None,
        consequence=consequence or is_machines_fault(error),
    )


def _wait_for_others(folder: Path, ranks: int) -> None:
    """A rank that goes while another still reads what it was sent would take that with it."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    while time.monotonic() < deadline:
        if all(notes.one(End) or notes.one(Failure) for notes in read_notes(folder, ranks)):
            return
        time.sleep(0.1)
