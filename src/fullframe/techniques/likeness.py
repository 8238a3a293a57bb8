"""Whether what is computed twice comes out alike: a few elements of each result, compared on the device.

Not bit for bit, as some kernels of GPUs do not repeat themselves: to the root of the dtype's precision.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullframe.errors import StrategyError
from fullframe.ranks.agreement import from_all_ranks
from fullframe.spatial.tensor import local_or_whole

ELEMENTS = 1024  # of a tensor, at most

_open: "Differences | None" = None  # a plain global: backward on a device runs in threads of its own


@torch.no_grad()
def sample(result: Any) -> list[Tensor]:
    """Elements from all over each plain tensor in a tree, copied."""
    leaves = map(local_or_whole, tree_leaves(result))
    return [_picked(leaf) for leaf in leaves if type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided]


def _picked(tensor: Tensor) -> Tensor:
    sizes, steps = list(tensor.shape), [1] * tensor.dim()
    while torch.Size(sizes).numel() > ELEMENTS:
        longest = sizes.index(max(sizes))
        steps[longest] = 2 * steps[longest] + 1  # odd ones: no pattern of 2, 4, 8 is missed
        sizes[longest] = -(-tensor.shape[longest] // steps[longest])
    return tensor.detach()[tuple(slice(None, None, step) for step in steps)].clone()


@torch.no_grad()
def differ(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Whether one of two samples' pairs is not the same, as a scalar on the device."""
    if [(a.shape, a.dtype) for a in first] != [(b.shape, b.dtype) for b in second]:
        return torch.tensor(True)
    found = [_differs(a, b) for a, b in zip(first, second, strict=True) if a.numel()]
    return torch.stack([one.to(found[0].device) for one in found]).any() if found else torch.tensor(False)


def _differs(first: Tensor, second: Tensor) -> Tensor:
    precision = torch.finfo(first.dtype).eps if first.is_floating_point() or first.is_complex() else 1e-7
    a, b = _real(first), _real(second)
    gaps = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    size = torch.linalg.vector_norm(a.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    is_near: Tensor = torch.linalg.vector_norm(gaps) <= precision**0.5 * size
    return ~is_near


def _real(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.to(torch.float64)


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
