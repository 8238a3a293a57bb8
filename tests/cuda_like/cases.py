"""The cases of all rules on the CUDA-like device: what they give there, and what they ask of it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from tests.cuda_like.device import Counts, TestsOnDevice, counted, to_device, to_host
from tests.spatial.cases import Case


class Ran(NamedTuple):
    """What a case gave, and what it asked of the device, forward and backward."""

    outputs: list[Tensor]  # whole, and on the host
    gradients: list[Tensor | None]  # of all operands
    forward: Counts
    backward: Counts


def operands(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """What `case` is given, drawn alike everywhere, at its smallest size: split tensors and whole ones."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(*lead, *case.smallest) for lead in case.split], case.whole
    split, whole = ([torch.randn(s, generator=generator, dtype=torch.float64) for s in kind] for kind in shapes)
    return split, whole


def ran(case: Case, place: Callable[[Tensor], Tensor], cut: Callable[[Tensor], Tensor]) -> Ran:
    """The case on operands that `place` has put somewhere and of which `cut` splits the first ones."""
    torch.manual_seed(0)
    split, whole = operands(case)
    leaves = [place(t.requires_grad_()) for t in (*split, *whole)]
    given = [cut(t) for t in leaves[: len(split)]]
    with counted() as forward:
        results = [t for t in tree_leaves(case.op(*given, *leaves[len(split) :])) if isinstance(t, Tensor)]
    outputs = [t.full() if isinstance(t, ff.SpatialTensor) else t for t in results]
    ends = [t for t in outputs if t.requires_grad]
    seeds = [place(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).cos().view(t.shape)) for t in ends]
    with counted() as backward:
        if ends:
            torch.autograd.backward(ends, seeds)
    gradients = [None if t.grad is None else to_host(t.grad) for t in leaves]
    return Ran([to_host(t) for t in outputs], gradients, forward, backward)


def on_device(case: Case, cut: Callable[[Tensor], Tensor] = lambda t: t) -> Ran:
    """The case on the device, plain or split by `cut`."""
    with TestsOnDevice():
        return ran(case, to_device, cut)


def on_host(case: Case) -> Ran:
    """The case as one process has it on the CPU."""
    return ran(case, lambda t: t, lambda t: t)
