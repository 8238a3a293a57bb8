"""Checkpoints of a run: one file each, written whole or not at all, checked before a byte of it is believed.

A file is what `torch.save` writes, so plain torch reads it; `model` in it is the unwrapped model's state_dict. The
run directory must be visible to all ranks.
"""

import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullframe.errors import CheckpointError
from fullframe.training.agreement import from_all_ranks, on_first_rank
from fullframe.training.loader import ShardedLoader

FORMAT = 1
_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass(kw_only=True)
class RunState:
    """Everything a run needs to go on bit for bit; random states follow from seed and step."""

    model: nn.Module  # the user's, unwrapped
    optimizer: torch.optim.Optimizer
    loader: ShardedLoader
    step: int = 0  # optimizer steps done

    def state_dict(self) -> dict[str, Any]:
        """The state as one dict."""
        return {
            "format": FORMAT,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises CheckpointError when it is of another model, optimizer, order of samples or format.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint format {state.get('format')!r} is unknown; this version reads {FORMAT}")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer: {error}; resume with the recipe that wrote it"
            ) from error
        self.loader.load_state_dict(state["loader"])
        self.step = state["step"]


def save_checkpoint(state: RunState, folder: Path, keep: int) -> Path:
    """Write `step-N.pt` and drop all but the newest `keep`; returns once it is on the disk. All ranks call it.

    Raises CheckpointError on all ranks when it cannot be written.
    """
    path = folder / f"step-{state.step:08d}.pt"
    contents = state.state_dict()

    def write() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_whole(contents, path)
            for old in checkpoints_in(folder)[:-keep]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            raise CheckpointError(f"cannot write checkpoint {path}: {error}") from error

    on_first_rank(write)
    return path


def load_newest_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest checkpoint that every rank can read, None where there is none, and what is wrong with newer ones.

    Raises CheckpointError on all ranks when there are checkpoints and none is readable.
    """
    problems: list[str] = []
    for path in reversed(on_first_rank(lambda: checkpoints_in(folder))):
        state, problem = _read(path)
        found = [(rank, what) for rank, what in enumerate(from_all_ranks(problem)) if what]
        if not found:
            return state, problems
        rank, what = found[0]
        problems.append(f"{path} is unreadable (rank {rank}: {what})")
    if problems:
        raise CheckpointError(
            "; ".join(problems) + "; no older checkpoint is left: start anew in another run directory"
        )
    return None, []


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))


def _write_whole(contents: dict[str, Any], path: Path) -> None:
    """A reader, or a crash at any moment, finds the old file or the new one, never a part of it."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(contents, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The contents and "", or None and what is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare the checksums that torch.save wrote
        if damaged is not None:
            return None, f"wrong checksum of {damaged}"
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"format", "step", "model", "optimizer", "loader"} - set(state)
        return (None, f"lacks {', '.join(sorted(missing))}") if missing else (state, "")
    except Exception as error:  # damage shows as almost any exception; it becomes a CheckpointError on all ranks
        return None, f"{type(error).__name__}: {error}"
