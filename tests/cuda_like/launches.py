"""How many kernels each rule launches on an inner rank, beside torch's own function: counted on the CUDA-like device.

python -m tests.cuda_like.launches           # what differs from the table
python -m tests.cuda_like.launches --write   # write the table anew
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.gradients import manage
from fullframe.spatial.tensor import wrap
from tests.cuda_like.cases import operands
from tests.cuda_like.device import Counts, TestsOnDevice, counted, register, to_device
from tests.spatial.cases import Case, all_cases

TABLE = Path(__file__).with_suffix(".json")
MASKS = ("a mask as an index", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "bincount")
RANK, RANKS = 1, 4  # along the width, so that there is a neighbour on either side


class Launches(NamedTuple):
    """Kernels of one case."""

    plain_forward: int
    plain_backward: int
    forward: int
    backward: int


def launches(names: Iterable[str]) -> dict[str, Launches | None]:
    """Of each case; None where other ranks' values decide a shape or an error: one rank alone does not know them."""
    cases, found = all_cases(), dict[str, Launches | None]()
    plain = {name: asked(cases[name], None) for name in names}
    with fake_job(RANK, RANKS):
        mesh = ff.init_mesh(width=RANKS)
        for name, runs in plain.items():
            try:
                alone = None if decided_by_a_mask(runs) else kernels(asked(cases[name], mesh))
            except (RuntimeError, IndexError):  # of what came from nowhere; what the table has must run
                alone = None
            found[name] = None if alone is None else Launches(*kernels(runs), *alone)
    return found


def decided_by_a_mask(runs: tuple[Counts, Counts]) -> bool:
    """Whether the case, of which these are the plain runs, has shapes that hang on a mask."""
    return any(why in MASKS for run in runs for why, _ in run.waits)


def kernels(runs: tuple[Counts, Counts]) -> tuple[int, int]:
    """How many, forward and backward."""
    forward, backward = runs
    return forward.kernels.total(), backward.kernels.total()


def asked(case: Case, mesh: DeviceMesh | None) -> tuple[Counts, Counts]:
    """Forward and backward, from and to what lies on this rank: without the cutting and the putting together."""
    torch.manual_seed(0)
    split, whole = operands(case)
    given = [_here(t if mesh is None else ff.shard(t, mesh, check=False)) for t in split]
    parameters = [nn.Parameter(to_device(t)) for t in whole]
    for parameter in parameters if mesh is not None else ():
        manage(parameter, None)  # as of a model, whose gradients DDP averages
    with TestsOnDevice(), counted() as forward:
        results = [t for t in tree_leaves(case.op(*given, *parameters)) if isinstance(t, Tensor)]
    ends = [t.local if isinstance(t, ff.SpatialTensor) else t for t in results]
    ends = [t for t in ends if t.requires_grad]
    seeds = [torch.ones_like(t) for t in ends]
    with counted() as backward:
        if ends:
            torch.autograd.backward(ends, seeds)
    return forward, backward


def _here(t: Tensor) -> Tensor:
    """The tensor, or this rank's part of it, on the device; no leaf, whose gradient would be looked at."""
    local = to_device(t.local if isinstance(t, ff.SpatialTensor) else t).requires_grad_()
    seen = local.view_as(local)
    return wrap(seen, t.spec) if isinstance(t, ff.SpatialTensor) else seen


def table() -> dict[str, Launches]:
    """What each case may launch."""
    return {name: Launches(*counts) for name, counts in json.loads(TABLE.read_text()).items()}


def main(write: bool) -> None:
    """Print or write the table."""
    register()
    found = {name: counts for name, counts in launches(all_cases()).items() if counts is not None}
    if write:
        lines = (f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in sorted(found.items()))
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    known = table()
    for name, counts in found.items():
        if known.get(name) != counts:
            print(f"{name}: {known.get(name)} -> {counts}")


if __name__ == "__main__":
    main("--write" in sys.argv)
