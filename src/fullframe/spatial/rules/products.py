"""Products of vectors and matrices that are contractions, sums or joins in another dress."""

import string
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.matmul import added, contract
from fullframe.spatial.rules.registry import rule


@rule(torch.tensordot)
def _tensordot(func: Any, a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Summed over pairs of dims, the last of `a` with the first of `b` where only their number is given."""
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = list(range(a.dim() - dims, a.dim())), list(range(dims))
    of_a, of_b = ([dims_] if isinstance(dims_, int) else list(dims_) for dims_ in dims)
    letters = iter(string.ascii_letters)
    term_a = [next(letters) for _ in range(a.dim())]
    term_b = [next(letters) for _ in range(b.dim())]
    for in_a, in_b in zip(of_a, of_b, strict=True):
        term_b[in_b] = term_a[in_a]
    summed = {term_a[d] for d in of_a}
    result = "".join(letter for letter in (*term_a, *term_b) if letter not in summed)
    terms = ["".join(term_a), "".join(term_b)]
    return contract([a, b], terms, result, lambda x, y: torch.tensordot(x, y, (of_a, of_b)))


@rule(torch.inner, Tensor.inner)
def _inner(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """Summed over the last dims of both; the product where one is a number."""
    return a * b if a.dim() == 0 or b.dim() == 0 else torch.tensordot(a, b, ([-1], [-1]))


@rule(torch.dot, Tensor.dot, torch.vdot, Tensor.vdot)
def _dot(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """The sum of the products of two vectors, the first conjugated for `vdot`."""
    return ((a.conj() if func in (torch.vdot, Tensor.vdot) and a.is_complex() else a) * b).sum()


@rule(torch.linalg.vecdot)
def _vecdot(func: Any, a: Tensor, b: Tensor, *, dim: int = -1) -> Tensor:
    """The sum along a dim of the products of the first, conjugated, and the second."""
    return ((a.conj() if a.is_complex() else a) * b).sum(dim)


@rule(torch.outer, Tensor.outer, torch.ger, Tensor.ger)
def _outer(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """Every element of one vector times every element of the other."""
    return a.unsqueeze(1) * b


_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "addr": torch.outer,
    "addmv": torch.mv,
    "addbmm": partial(torch.einsum, "bmk,bkn->mn"),
}


@rule(torch.addr, Tensor.addr, torch.addmv, Tensor.addmv, torch.addbmm, Tensor.addbmm)
def _added(func: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`beta * input + alpha * product`: of vectors, of a matrix and a vector, or of matrices and summed over them."""
    return added(input, _PRODUCTS[func.__name__](a, b), beta, alpha)


@rule(torch.linalg.multi_dot, torch.chain_matmul)
def _chain(func: Any, *matrices: Any) -> Tensor:
    """The matrices multiplied in torch's order, that of the fewest multiplications: where it is NaN hangs on it."""
    given: list[Tensor] = list(matrices if isinstance(matrices[0], Tensor) else matrices[0])
    row, column = given[0].dim() == 1, given[-1].dim() == 1
    given[0] = given[0].unsqueeze(0) if row else given[0]
    given[-1] = given[-1].unsqueeze(1) if column else given[-1]
    sizes = (*(t.shape[0] for t in given), given[-1].shape[1])
    a, b, c, d = sizes if len(given) == 3 else (0, 0, 0, 0)
    if a * c * (b + d) == b * d * (a + c) and len(given) == 3:  # torch begins on the left, but in longer chains
        product = (given[0] @ given[1]) @ given[2]
    else:
        product = _multiplied(given, sizes)
    product = product.squeeze(1) if column else product
    return product.squeeze(0) if row else product


def _multiplied(matrices: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
    count = len(matrices)
    if count == 1:
        return matrices[0]
    at = _last_product(sizes)[1]
    return _multiplied(matrices[:at], sizes[: at + 1]) @ _multiplied(matrices[at:], sizes[at:])


@lru_cache
def _last_product(sizes: tuple[int, ...]) -> tuple[int, int]:
    """The multiplications of a chain of matrices, and how many stand on the left of the last product."""
    count = len(sizes) - 1
    if count == 1:
        return 0, 0
    return min(
        (_cost(sizes[: at + 1]) + _cost(sizes[at:]) + sizes[0] * sizes[at] * sizes[-1], at) for at in range(1, count)
    )


def _cost(sizes: tuple[int, ...]) -> int:
    return _last_product(sizes)[0]


@rule(torch.kron, Tensor.kron)
def _kron(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """Each element of the first times the whole second, in blocks."""
    count = max(a.dim(), b.dim())
    a, b = (t.reshape(*(1,) * (count - t.dim()), *t.shape) for t in (a, b))
    blocks = _interleaved(a, 1) * _interleaved(b, 0)
    return blocks.reshape([m * n for m, n in zip(a.shape, b.shape, strict=True)])


def _interleaved(t: Tensor, place: int) -> Tensor:
    """A dim of size 1 behind (1) or before (0) each of the dims."""
    for dim in reversed(range(t.dim())):
        t = t.unsqueeze(dim + place)
    return t


@rule(torch.block_diag)
def _block_diag(func: Any, *tensors: Any) -> Tensor:
    """The tensors as blocks on the diagonal of zeros."""
    given: Sequence[Tensor] = tensors if isinstance(tensors[0], Tensor) else tensors[0]
    blocks: Sequence[Tensor] = [t.reshape(1, -1) if t.dim() < 2 else t for t in given]
    width, before, rows = sum(t.shape[1] for t in blocks), 0, []
    for block in blocks:
        rows.append(F.pad(block, (before, width - before - block.shape[1])))
        before += block.shape[1]
    return torch.cat(rows, 0)
