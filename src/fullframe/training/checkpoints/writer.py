"""Checkpoints of a run: written beside the training, whole or not at all, and checked before a byte is believed.

A checkpoint is a folder `step-N` with one safetensors file a rank and a manifest with their checksums; nothing in it
is unpickled. The folder must be visible to all ranks.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from fullframe.errors import CheckpointError, RunError
from fullframe.ranks.agreement import from_all_ranks, on_all_ranks, on_first_rank
from fullframe.ranks.waiting import waiting_for_ranks
from fullframe.techniques.evaluation_point import at_evaluation_point
from fullframe.training.checkpoints.best import Best
from fullframe.training.checkpoints.dcp_plans import Copies, copy_to_host, file_of, read_into
from fullframe.training.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from fullframe.training.checkpoints.safetensors_files import FileRecord, Shape, record_of, sync_folder, write_tensors
from fullframe.training.checkpoints.state import RunState, take_weights, weight_targets

_NAME = re.compile(r"step-(\d+)")
_PARTIAL, _DAMAGED = ".partial", ".damaged"
_BEST = "best"  # among the facts of a checkpoint that was the best when it was written
_BEAT_SECONDS = 1.0
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are what its manifest says."""

    path: Path
    manifest: Manifest


class Checkpoints:
    """Writes the checkpoints of one run; every rank makes it and calls its methods in the same order.

    `save` takes a copy of the state in host memory and returns; the copy is written while training goes on, and
    `on_written` is called, on all ranks, by the first `poll`, `save` or `wait` after that. These three raise
    CheckpointError on all ranks when it could not be written: then the checkpoints before are as they were.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        on_written: Callable[[Path], None] = lambda path: None,
        beat: Callable[[str], None] = lambda doing: None,
    ):
        if keep < 1:
            raise CheckpointError(f"{keep} checkpoints cannot be kept; keep at least 1")
        self._folder, self._keep, self._on_written, self._beat = folder, keep, on_written, beat
        # What a thread sends must not meet what the training sends.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self._writing: _Writing | None = None

    def require_storable(self, state: RunState) -> None:
        """Raises CheckpointError on all ranks when the state holds what a checkpoint cannot."""
        on_all_ranks(lambda: (state.tensors(dist.get_rank() == 0), state.facts()))

    @property
    def best(self) -> Best | None:
        """The best checkpoint so far; None where none was written as such. All ranks ask."""
        return on_first_rank(lambda: best_checkpoint(self._folder))

    def save(self, state: RunState, best: Best | None = None) -> None:
        """Begin to write `step-N`, once the checkpoint before is written; with `best` it is the best one so far."""
        self.wait()
        with at_evaluation_point(state.optimizer):
            tensors, facts = on_all_ranks(lambda: (state.tensors(dist.get_rank() == 0), state.facts()))
            copies = copy_to_host(tensors)
        self._writing = _Writing(self._folder, self._keep, state.step, facts, copies, self._group, best)

    def save_alone(self, state: RunState) -> None:
        """Write `step-N` by this rank alone, which must hold the whole state; the others need not call it.

        Returns once it is written; raises CheckpointError when it cannot be written.
        """
        if self._writing is not None:
            self._writing.watch(self._beat)
        if any(_step_of(path) == state.step for path in checkpoints_in(self._folder)):
            return
        alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        with at_evaluation_point(state.optimizer):
            tensors, facts = state.tensors(first_rank=True), state.facts()
            copies = copy_to_host(tensors, alone)
        writing = _Writing(self._folder, self._keep, state.step, facts, copies, alone)
        writing.watch(self._beat)
        writing.result()

    def poll(self) -> None:
        """Call `on_written` if the checkpoint has been written by now; does not wait for it."""
        if self._writing is not None and all(from_all_ranks(self._writing.done)):
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; `beat` is called as long as this rank itself is writing."""
        if self._writing is not None:
            self._writing.watch(self._beat)
            writing, self._writing = self._writing, None
            self._on_written(writing.result())

    def forget_after(self, step: int) -> None:
        """Set aside later checkpoints, which could not be read, so that they do not count as the newest or best."""

        def set_aside() -> None:
            for path in checkpoints_in(self._folder):
                if _step_of(path) > step:
                    _replace(path, path.with_suffix(_DAMAGED))

        on_first_rank(set_aside)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.wait()
        elif self._writing is not None:
            self._writing.watch(self._beat)  # also when training failed: finish what was begun
        dist.destroy_process_group(self._group)


class _Writing:
    """One checkpoint that a thread writes."""

    def __init__(
        self, folder: Path, keep: int, step: int, facts: Any, copies: Copies, group: dist.ProcessGroup,
        best: Best | None = None,
    ):  # fmt: skip
        self._folder, self._keep, self._step = folder, keep, step
        self._facts = facts if best is None else facts | {_BEST: asdict(best)}
        self._copies, self._group = copies, group
        self._path = folder / f"step-{step:08d}"
        self._partial = self._path.with_suffix(_PARTIAL)
        self._replaced = folder / f"step-0{step:08d}"  # a checkpoint's name, too: it counts until the new one does
        self._error: BaseException | None = None
        self._busy = False  # with this rank's own file
        # A daemon: a process that has to end does not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def watch(self, beat: Callable[[str], None]) -> None:
        """Wait for the thread. A rank that only waits for others does not call `beat`, or a hang would go unnoticed."""
        while self._thread.is_alive():
            if self._busy:
                beat(f"writing {self._path}")
            with waiting_for_ranks():
                self._thread.join(_BEAT_SECONDS)

    def result(self) -> Path:
        """The path of the checkpoint once it is done; raises what kept it from being written."""
        if self._error is not None:
            raise self._error
        return self._path

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def _write(self) -> None:
        shapes = {name: Shape(t.dtype, tuple(t.shape)) for name, t in self._copies.tensors.items()}
        needed_bytes = sum(from_all_ranks(sum(shape.size_bytes for shape in shapes.values()), self._group))
        on_first_rank(lambda: self._begin(needed_bytes), self._group)
        outcome: FileRecord | OSError
        self._busy = True
        try:
            path = self._partial / file_of(dist.get_rank(self._group))
            outcome = write_tensors(path, shapes, self._copies.tensors.pop)
            sync_folder(self._partial)
        except Exception as error:  # the other ranks wait for the outcome, whatever it is
            outcome = _as_os_error(error)
        self._busy = False
        outcomes = from_all_ranks(outcome, self._group)
        on_first_rank(lambda: self._commit(outcomes, needed_bytes), self._group)

    def _begin(self, needed_bytes: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(f"*{_PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)
            if needed_bytes > shutil.disk_usage(self._folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._partial.mkdir()
        except OSError as error:
            raise self._failed(0, error, needed_bytes) from error

    def _commit(self, outcomes: list[FileRecord | OSError], needed_bytes: int) -> None:
        try:
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, OSError):
                    raise self._failed(rank, outcome, needed_bytes)
            self._publish({file_of(rank): o for rank, o in enumerate(outcomes) if isinstance(o, FileRecord)})
        except Exception as error:  # the other ranks wait for the outcome, whatever it is
            shutil.rmtree(self._partial, ignore_errors=True)  # its bytes are needed
            if isinstance(error, CheckpointError):
                raise
            raise self._failed(0, _as_os_error(error), needed_bytes) from error
        with contextlib.suppress(OSError):  # what cannot be removed now is removed next time
            self._prune()

    def _publish(self, files: dict[str, FileRecord]) -> None:
        """Write the manifest and give the folder its name, each once what it names is on the disk."""
        manifest = Manifest(step=self._step, facts=self._facts, tensors=self._copies.stored, files=files)
        with open(self._partial / MANIFEST, "w") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._partial)
        if self._path.exists():
            _replace(self._path, self._replaced)
        os.rename(self._partial, self._path)
        sync_folder(self._folder)

    def _prune(self) -> None:
        """Remove all but the newest and the best."""
        if self._replaced.exists():
            _remove(self._replaced)
        best = best_checkpoint(self._folder)
        for old in checkpoints_in(self._folder)[: -self._keep]:
            if best is not None and _step_of(old) == best.step:
                continue
            _remove(old)
        for damaged in self._folder.glob(f"step-*{_DAMAGED}"):
            if _step_of(damaged) <= self._step:
                shutil.rmtree(damaged, ignore_errors=True)

    def _failed(self, rank: int, error: OSError, needed_bytes: int) -> CheckpointError:
        what = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            free_bytes = shutil.disk_usage(self._folder if self._folder.exists() else self._folder.parent).free
            what += f": it needs {needed_bytes} bytes, {free_bytes} are free; make room or keep fewer checkpoints"
            what += f" (now {self._keep})"
        elif error.errno == errno.EFBIG:
            what += f": it needs {needed_bytes} bytes, more than a file may have; raise that limit (ulimit -f)"
        elif error.errno == errno.ENOENT:
            what += "; the run directory must be visible to all ranks"
        before = checkpoints_in(self._folder)
        rest = f"; {before[-1].name} is whole, go on from it with --resume" if before else ""
        return CheckpointError(f"cannot write checkpoint {self._path} (rank {rank}): {what}{rest}")


def load(checkpoint: Checkpoint, state: RunState) -> list[str]:
    """Put a checkpoint's contents into `state`; all ranks call it. Returns what the user should know.

    Raises CheckpointError on all ranks when it is of another model, optimizer or order of samples.
    """
    manifest = checkpoint.manifest
    targets = on_all_ranks(lambda: state.targets(manifest))
    state.require_place(manifest)
    read_into(targets, checkpoint.path, manifest)
    return on_all_ranks(lambda: state.go_on(manifest, targets))


def load_weights(checkpoint: Checkpoint, model: nn.Module, averaged: bool) -> None:
    """Put a checkpoint's weights into `model`, however it is sharded; all ranks call it.

    With `averaged` the parameters are their moving averages. Raises CheckpointError on all ranks when it is of another
    model, or holds no averages.
    """
    manifest = checkpoint.manifest
    targets = on_all_ranks(lambda: weight_targets(model, manifest, averaged))
    read_into(targets, checkpoint.path, manifest)
    on_all_ranks(lambda: take_weights(model, manifest, targets, averaged))


def checkpoint_of(run_dir: Path, *, step: int | None, best: bool) -> tuple[Checkpoint, list[str]]:
    """A run's newest readable checkpoint, the one after `step` or the `best`, and what is wrong with newer ones.

    Raises on all ranks: RunError when there is none such, CheckpointError when none of them is readable.
    """
    folder = run_dir / "checkpoints"
    if best:
        if step is not None:
            raise RunError("step and best are both given; take one of them")
        found = on_first_rank(lambda: best_checkpoint(folder))
        if found is None:
            raise RunError(f"{run_dir} says of no checkpoint that it is the best; name a measure by recipe.best")
        step = found.step
    checkpoint, problems = newest_checkpoint(folder, step)
    if checkpoint is not None:
        return checkpoint, problems
    steps = ", ".join(on_first_rank(lambda: [str(_step_of(path)) for path in checkpoints_in(folder)]))
    if steps:
        raise RunError(f"{run_dir} holds no checkpoint after step {step}, but after {steps}")
    raise RunError(f"{run_dir} holds no checkpoint; give the --run-dir of a run that has written one")


def newest_checkpoint(folder: Path, step: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that every rank can read, None where there is none, and what is wrong with newer ones.

    With `step` the one after that step alone. Raises CheckpointError on all ranks when there are checkpoints and none
    is readable.
    """
    problems: list[str] = []
    found = on_first_rank(lambda: checkpoints_in(folder))
    for path in reversed([path for path in found if step in (None, _step_of(path))]):
        manifest, problem = on_first_rank(partial(_manifest_of, path))
        if manifest is not None:
            troubles = enumerate(from_all_ranks(_damage(path, manifest)))
            problem = next((f"rank {rank}: {trouble}" for rank, trouble in troubles if trouble), "")
            if not problem:
                return Checkpoint(path, manifest), problems
        problems.append(f"{path} is unreadable ({problem})")
    if problems:
        left = "no older checkpoint is left: start anew in another run directory"
        raise CheckpointError("; ".join([*problems, left if step is None else "take another step's"]))
    return None, []


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step_of)


def best_checkpoint(folder: Path) -> Best | None:
    """The best checkpoint of a run: the newest that was better than all before; None where none was."""
    manifests = (_manifest_of(path)[0] for path in reversed(checkpoints_in(folder)))
    return next((Best(**found.facts[_BEST]) for found in manifests if found and _BEST in found.facts), None)


def _manifest_of(path: Path) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint and "", or None and what is wrong with it."""
    try:
        return read_manifest(path), ""
    except FileNotFoundError:
        return None, f"it has no {MANIFEST}"
    except (OSError, CheckpointError) as error:
        return None, str(error)


def _damage(path: Path, manifest: Manifest) -> str:
    """What this rank finds wrong with a checkpoint's files: it checks all sizes and its share of checksums."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for number, (name, record) in enumerate(sorted(manifest.files.items())):
        try:
            with open(path / name, "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != record.size_bytes:
                return f"{name} has {size_bytes} of {record.size_bytes} bytes"
            if number % ranks == rank and record_of(path / name) != record:
                return f"wrong checksum of {name}"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    return ""


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _replace(path: Path, by: Path) -> None:
    shutil.rmtree(by, ignore_errors=True)
    os.rename(path, by)


def _remove(path: Path) -> None:
    """A folder is renamed first, so that half of one does not look like a checkpoint."""
    _replace(path, path.with_suffix(_PARTIAL))
    shutil.rmtree(path.with_suffix(_PARTIAL), ignore_errors=True)
