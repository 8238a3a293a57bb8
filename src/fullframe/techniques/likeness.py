"""Whether what is computed twice comes out alike: of some elements of each result a few sums are compared.

Not bit for bit, as some kernels of GPUs do not repeat themselves: to the root of the dtype's precision.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullframe.errors import StrategyError
from fullframe.ranks.agreement import from_all_ranks
from fullframe.spatial.tensor import local_or_whole

ELEMENTS = 1024  # of a tensor, at most
_WAVES = 8

_open: "Differences | None" = None  # a plain global: backward on a device runs in threads of its own


class Sample(NamedTuple):
    """What is kept of one tensor: `sums` of its elements times the height of a few waves, and their 2-norm."""

    shape: torch.Size
    dtype: torch.dtype
    sums: Tensor  # (_WAVES + 1,), float64


@torch.no_grad()
def sample(result: Any) -> list[Sample]:
    """Of elements from all over each plain tensor in a tree."""
    leaves = map(local_or_whole, tree_leaves(result))
    return [_of(leaf) for leaf in leaves if type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided]


def _of(tensor: Tensor) -> Sample:
    picked = elements(tensor)
    real = torch.view_as_real(picked.resolve_conj()) if picked.is_complex() else picked
    flat = real.reshape(-1).to(torch.float64).nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)
    place = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    waves = [place.mul(0.6180339887 * number).cos() for number in range(1, _WAVES)]
    waves.append(torch.full_like(place, max(flat.numel(), 1) ** -0.5))  # the others miss what is added everywhere
    sums = (torch.stack(waves) * flat).sum(1)  # a product would have cuBLAS keep 32 MiB for each thread
    return Sample(tensor.shape, tensor.dtype, torch.cat([sums, torch.linalg.vector_norm(flat)[None]]))


def elements(tensor: Tensor) -> Tensor:
    """At most ELEMENTS of them, a view."""
    sizes, steps = list(tensor.shape), [1] * tensor.dim()
    while torch.Size(sizes).numel() > ELEMENTS:
        longest = sizes.index(max(sizes))
        steps[longest] = 2 * steps[longest] + 1  # odd ones: no pattern of 2, 4, 8 is missed
        sizes[longest] = -(-tensor.shape[longest] // steps[longest])
    return tensor.detach()[tuple(slice(None, None, step) for step in steps)]


@torch.no_grad()
def differ(first: Sequence[Sample], second: Sequence[Sample]) -> Tensor:
    """Whether one of the pairs is not alike, as a scalar on the device."""
    if [(a.shape, a.dtype) for a in first] != [(b.shape, b.dtype) for b in second]:
        return torch.tensor(True)
    found = [_differs(a, b) for a, b in zip(first, second, strict=True)]
    return torch.stack([one.to(found[0].device) for one in found]).any() if found else torch.tensor(False)


def _differs(first: Sample, second: Sample) -> Tensor:
    precision = torch.finfo(first.dtype).eps if first.dtype.is_floating_point or first.dtype.is_complex else 1e-7
    gaps = first.sums[:-1] - second.sums[:-1]
    is_near: Tensor = torch.linalg.vector_norm(gaps) <= precision**0.5 * first.sums[-1]
    return ~is_near


class Differences:
    """Differences that are found within a step, for all ranks to learn of at its end."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Tensor]] = []
        self._agreed: list[tuple[str, Tensor]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, what is noted is not raised."""
        global _open
        before, _open = _open, self
        try:
            yield
        finally:
            _open = before

    def add(self, message: str, differs: Tensor) -> None:
        """What to say where `differs` holds."""
        self._found.append((message, differs))

    def count(self, like: Tensor) -> Tensor:
        """How many there are, as a scalar beside `like`, to be added up over ranks; nothing is waited for."""
        self._agreed, self._found = self._found, []
        flags = [differs.to(like.device) for _, differs in self._agreed]
        return torch.stack(flags).sum().to(like) if flags else torch.zeros_like(like)

    def refuse(self) -> NoReturn:
        """Raise StrategyError for those that were counted, with the same words on all ranks, which call it together."""
        own = [message for message, differs in self._agreed if differs]
        different = list(dict.fromkeys(message for of_rank in from_all_ranks(own) for message in of_rank))
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise StrategyError(different[0] + more)


def note(message: str, differs: Tensor) -> None:
    """Raise StrategyError with `message` where `differs` holds: now, or at the end of the step that collects them."""
    if _open is not None:
        _open.add(message, differs)
    elif differs:
        raise StrategyError(message)
