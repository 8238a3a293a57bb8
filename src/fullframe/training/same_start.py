"""Whether all ranks were started alike: machines are started one by one, by hand or by scripts, and train as one.

What differs would not be seen later: a batch of another size or another precision gives mixed numbers that all ranks
hold alike. It is compared before the first step, and named.
"""

import hashlib
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from fullframe.errors import RunError
from fullframe.ranks.agreement import from_all_ranks, on_all_ranks, on_first_rank
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy

_RECIPE = ("batch_size", "seed", "evaluate_every", "best", "unsupported", "find_unused_parameters")
_SEEING_SECONDS = 60.0  # a network's file system may remember for so long that a file is not there
_POLL_SECONDS = 0.1


def require_same_options(
    recipe: Recipe, strategy: Strategy, options: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Raises RunError on all ranks, naming what they were started with differently; all ranks call it.

    `options` are compared by their names, beside what recipe and strategy say; of `about` the text of the recipe's
    file and the values that it was given, which a function `recipe(lr)` leaves nowhere else.
    """
    mine = {**asdict(strategy), **{name: getattr(recipe, name) for name in _RECIPE}, **options}
    mine["recipe.evaluate"] = "given" if recipe.evaluate else "not given"
    mine["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
    mine["what the recipe is called with (--set)"] = list(about.get("values", ()))
    mine["the text of the recipe's file"] = _digest(about.get("recipe"))
    if different := differences(mine):
        raise RunError(f"the ranks were not started alike: {different}. Start all of them with the same")


def differences(mine: Mapping[str, Any]) -> str:
    """What of these values, by their names, is not the same on all ranks, in words; all ranks call it."""
    everyone = from_all_ranks({name: repr(value) for name, value in mine.items()})
    first, different = everyone[0], []
    for name in {name: None for found in everyone for name in found}:
        rank = next((rank for rank, found in enumerate(everyone) if found.get(name) != first.get(name)), 0)
        if rank:
            different.append(f"{name} is {first.get(name)} on rank 0, {everyone[rank].get(name)} on rank {rank}")
    return "; ".join(different)


def require_shared(path: Path) -> None:
    """Raises RunError on all ranks unless all of them see the directory that is `path` to rank 0; all ranks call it."""
    if dist.get_world_size() == 1:
        return

    def make() -> str:
        name = f"seen-{uuid4().hex}"
        (path / name).touch()
        return name

    def look() -> None:
        deadline = time.monotonic() + _SEEING_SECONDS
        while not (path / name).exists():
            if time.monotonic() > deadline:
                raise RunError(
                    f"rank {dist.get_rank()}, on {socket.gethostname()}, does not see in {path.absolute()} what rank 0 "
                    "writes there; the run directory must lie on a file system that all machines share, and have the "
                    "same path on each"
                )
            time.sleep(_POLL_SECONDS)

    name = on_first_rank(make)
    try:
        on_all_ranks(look)
    finally:
        if dist.get_rank() == 0:
            (path / name).unlink(missing_ok=True)


def _digest(file: Any) -> str:
    """Of the file's text; "" where there is none to be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    except (OSError, TypeError, ValueError):
        return ""
