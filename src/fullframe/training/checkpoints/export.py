"""A run's weights as one safetensors file, from its newest readable checkpoint; needs no ranks and not the recipe."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fullframe import __version__
from fullframe.errors import CheckpointError, RunError
from fullframe.training.checkpoints.manifest import key_in_file
from fullframe.training.checkpoints.safetensors_files import sync_folder, write_tensors
from fullframe.training.checkpoints.state import weights_in
from fullframe.training.checkpoints.writer import Checkpoint, checkpoint_of

_LAST = "these are the last values; evaluations are of the moving averages, which --average (average=True) takes"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `export` wrote."""

    path: Path
    step: int  # after which the weights are
    tensors: int
    size_bytes: int
    problems: list[str]  # what is wrong with newer checkpoints, and that others than these weights were evaluated


def export(
    run_dir: Path, out: Path, *, step: int | None = None, best: bool = False, average: bool = False,
    overwrite: bool = False,
) -> Exported:  # fmt: skip
    """Write the model's state dict, under its own names, to `out`; whole tensors, however they were sharded.

    They are those of the newest readable checkpoint, of the one after `step`, or of the `best` by `recipe.best`. With
    `average` the parameters are their moving averages; buffers are the model's. Raises RunError when `run_dir` holds
    no such checkpoint or `out` is there already (unless `overwrite`), CheckpointError when none is readable, lacks an
    average, or `out` cannot be written.
    """
    if out.is_dir():
        raise RunError(f"cannot write {out}: it is a folder; name a file")
    if out.exists() and not overwrite:
        raise RunError(f"{out} is there already; name another file, or replace it by --overwrite (overwrite=True)")
    checkpoint, problems = checkpoint_of(run_dir, step=step, best=best)
    sources = weights_in(checkpoint.manifest, average)
    if not average and any(name.startswith("average/") for name in checkpoint.manifest.tensors):
        problems = [*problems, _LAST]
    shapes = {name: checkpoint.manifest.tensors[source] for name, source in sources.items()}
    partial = out.with_name(out.name + ".partial")
    try:
        with whole_tensors(checkpoint) as read:
            about = {"format": "pt", "step": str(checkpoint.manifest.step), "fullframe": __version__}
            record = write_tensors(partial, shapes, lambda name: read(sources[name]), about)
        os.replace(partial, out)
        sync_folder(out.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; name another file") from error
    return Exported(
        path=out,
        step=checkpoint.manifest.step,
        tensors=len(shapes),
        size_bytes=record.size_bytes,
        problems=problems,
    )


@contextlib.contextmanager
def whole_tensors(checkpoint: Checkpoint) -> Iterator[Callable[[str], Tensor]]:
    """Inside `with`, a function that reads a stored tensor by its name, put together from its chunks."""
    with contextlib.ExitStack() as files:
        opened: dict[str, Any] = {
            name: files.enter_context(safe_open(checkpoint.path / name, framework="pt"))
            for name in checkpoint.manifest.files
        }

        def read(name: str) -> Tensor:
            stored = checkpoint.manifest.tensors[name]
            whole = torch.empty(stored.sizes, dtype=stored.dtype, device="cpu")
            for chunk in stored.chunks:
                box = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
                whole[box] = opened[chunk.file].get_tensor(key_in_file(name, stored, chunk))
            return whole

        yield read
