"""Linear, matmul, einsum: one contraction with named dims.

Where a contracted dim is split, each rank contributes a partial sum. Where one mesh axis splits different dims of two
operands, one is gathered, and again in backward: the second, so that queries stay split, and keys and values come
whole; but the first where it is cut in a dim that is summed over (values before transposed attention), or is fewer
elements that a mask picked (a detector's coefficients of masks).
"""

import math
import string
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.placement import Placement, Placements
from fullframe.ranks.collectives import all_sum
from fullframe.ranks.mesh import axes_in
from fullframe.spatial.operands import aligned, alike, placements_of
from fullframe.spatial.redistribute import gather_axes, sliced
from fullframe.spatial.refetch import Loan, borrow, fetching_again
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap

Cuts = dict[str, tuple[str, Placement]]  # mesh axis -> the letter of the dim that it cuts, and how


class Shared(NamedTuple):
    """Local operands of one op, `cuts` that they share, what was gathered for it."""

    locals: list[Tensor]
    cuts: Cuts
    loans: list[Loan]
    spec: Spec  # of one of the operands

    def axes_of(self, letter: str) -> list[str]:
        """The mesh axes that cut a dim."""
        return [axis for axis, (own, _) in self.cuts.items() if own == letter]

    def places(self, letter: str, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Where the rows of a dim that this rank has stand in the whole tensor."""
        numbers = torch.arange(size, dtype=dtype, device=self.locals[0].device)
        placements = tuple(self.cuts[axis][1].at(0) for axis in self.axes_of(letter))
        return sliced(numbers, self.spec.with_((size,), placements))


def shared(operands: list[Tensor], terms: list[str]) -> Shared:
    """Operands, whose dims are named by the letters of `terms`, with each mesh axis cutting one letter at most.

    The first operand that is cut over an axis decides; another that is cut otherwise is gathered along it. A letter
    has one size, or 1 where it broadcasts.
    """
    cuts: Cuts = {}
    ready: list[Tensor] = []
    loans: list[Loan] = []
    for operand, term in zip(operands, terms, strict=True):
        taken = {letter for letter, _ in cuts.values()}  # two operands do not share out the factors of one dim
        axes = {name for axis in cuts for name in axes_in(axis)}
        clashing = [
            p.axis for p in placements_of(operand)
            if (not _same(*cuts[p.axis], term[p.dim], p) if p.axis in cuts
                else term[p.dim] in taken or not axes.isdisjoint(axes_in(p.axis)))
        ]  # fmt: skip
        if clashing:
            assert isinstance(operand, SpatialTensor)
            loan, whole = borrow(local_of(operand), operand.spec, clashing)
            loans.append(loan)
            operand = wrap(loan.whole, whole)
        for p in placements_of(operand):
            cuts.setdefault(p.axis, (term[p.dim], p))
        ready.append(operand)
    spec = next(o.spec for o in operands if isinstance(o, SpatialTensor))
    locals_ = [aligned(o, _cut_like(o, term, cuts, spec)) for o, term in zip(ready, terms, strict=True)]
    return Shared(locals_, cuts, loans, spec)


def whole_in(t: Tensor, *dims: int) -> Tensor:
    """`t` made whole along the mesh axes that cut one of the dims, which count from the end: -1, -2."""
    if not isinstance(t, SpatialTensor):
        return t
    axes = [p.axis for p in t.spec.placements if p.dim - t.dim() in dims]
    return wrap(*gather_axes(local_of(t), t.spec, axes)) if axes else t


def result_spec(spec: Spec, result: str, sizes: dict[str, int], cuts: Cuts) -> Spec:
    """The spec of a result whose dims are named by the letters of `result`."""
    kept = tuple(p.at(result.index(letter)) for letter, p in cuts.values() if letter in result)
    return spec.with_([sizes[letter] for letter in result], kept)


def contract(operands: list[Tensor], terms: list[str], result: str, call: Any) -> Tensor:
    """`call` on the local operands, whose dims are named by the letters of `terms`, the result's by `result`.

    The exchange and the sums over ranks follow from the letters. What was gathered is not kept for backward.
    """
    sizes: dict[str, int] = {}
    for operand, term in zip(operands, terms, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            sizes[letter] = size if size != 1 else sizes.get(letter, 1)  # a dim of no rows is none that broadcasts
    split = [number for number, operand in enumerate(operands) if isinstance(operand, SpatialTensor)]
    if len(split) < 2:
        locals_, cuts, loans, spec = shared(operands, terms)
    else:
        turns = _turns(operands, terms, result, sizes, split)
        in_turn, cuts, loans, spec = shared([operands[i] for i in turns], [terms[i] for i in turns])
        locals_ = [in_turn[turns.index(i)] for i in range(len(operands))]
    out: Tensor = fetching_again(loans, lambda: call(*locals_))
    summed = [axis for axis, (letter, _) in cuts.items() if letter not in result]
    if summed:
        out = all_sum(out, spec.spatial.group(summed))
    return wrap(out, result_spec(spec, result, sizes, cuts))


def _turns(operands: list[Tensor], terms: list[str], result: str, sizes: dict[str, int], split: list[int]) -> list[int]:
    """The operands in the order in which they decide what an axis cuts; what is cut otherwise is gathered.

    Last come fewer elements that a mask picked, and what is cut in a dim that is summed over, where to gather it sends
    less than to gather the other operand and to add up the whole results.
    """
    made = math.prod(sizes[letter] for letter in result)

    def waits(i: int) -> bool:
        own = placements_of(operands[i])
        summed = any(terms[i][p.dim] not in result for p in own)
        picked = any(p.order is not None for p in own)
        return (summed or picked) and any(
            operands[i].numel() < operands[j].numel() + made * summed
            and _stays(placements_of(operands[j]), terms[j], result, summed)
            and any(_clash(terms[i], p, terms[j], q) for p in own for q in placements_of(operands[j]))
            for j in split
        )

    return sorted(range(len(operands)), key=lambda i: i in split and waits(i))


def _stays(placements: Placements, term: str, result: str, picked: bool) -> bool:
    """Whether all that cuts an operand cuts the result too, in rows of their order or as a mask `picked` them."""
    return all(term[p.dim] in result and (picked or p.order is None) for p in placements)


def _clash(term: str, p: Placement, other: str, q: Placement) -> bool:
    """Whether an axis cuts two operands in different dims."""
    return term[p.dim] != other[q.dim] and not set(axes_in(p.axis)).isdisjoint(axes_in(q.axis))


def _same(chosen: str, placement: Placement, letter: str, p: Placement) -> bool:
    return chosen == letter and alike(placement.at(p.dim), p)


def _cut_like(operand: Tensor, term: str, cuts: Cuts, spec: Spec) -> Spec:
    """The spec an operand must have: cut in every dim whose letter is cut somewhere."""
    placements = tuple(
        p.at(term.index(letter))
        for letter, p in cuts.values()
        if letter in term and operand.shape[term.index(letter)] != 1
    )
    return spec.with_(tuple(operand.shape), placements)


@rule(F.linear)
def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., C) by a weight (K, C), which is made whole; of split channels partial sums are added up."""
    if not isinstance(input, SpatialTensor):
        raise Unsupported("the weight is split, not the input")
    if type(weight) is SpatialTensor or type(bias) is SpatialTensor:  # made of an image
        return func(input, whole(weight), whole(bias))  # type: ignore[no-any-return]
    spec = input.spec
    last = len(spec.shape) - 1
    if not spec.is_split(last):
        return wrap(F.linear(local_of(input), weight, bias), spec.resized(last, weight.shape[0]))
    letters = string.ascii_lowercase[: last + 1]
    out = contract([input, weight], [letters, "z" + letters[-1]], letters[:-1] + "z", lambda x, w: F.linear(x, w))
    return out if bias is None else out + bias


@rule(F.bilinear)
def _bilinear(func: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., C) and (..., D) by a weight (K, C, D), each rank its own rows; split channels are gathered."""
    rows, weight, bias = [whole_in(t, -1) for t in (input1, input2)], whole(weight), whole(bias)
    if not any(isinstance(t, SpatialTensor) for t in rows):
        return func(*rows, weight, bias)  # type: ignore[no-any-return]
    batch = string.ascii_lowercase[: input1.dim() - 1]
    terms = [batch + "x", batch + "y", "zxy"]
    return contract([*rows, weight], terms, batch + "z", lambda *parts: func(*parts, bias))


@rule(
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
    torch.mv,
    Tensor.mv,
    torch.linalg.matmul,
)
def _matmul(func: Any, a: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
    """(..., M, K) by (..., K, N), and vectors, as torch broadcasts them."""
    (b,) = (*others, *named.values())  # torch calls it other, mat2 or vec
    if func is Tensor.__rmatmul__:
        a, b = b, a
    batch = max(a.dim(), b.dim(), 2) - 2
    letters = string.ascii_lowercase[:batch]
    a_term = (letters[batch - max(a.dim() - 2, 0) :] if batch else "") + ("mk" if a.dim() > 1 else "k")
    b_term = (letters[batch - max(b.dim() - 2, 0) :] if batch else "") + ("kn" if b.dim() > 1 else "k")
    result = letters + ("m" if a.dim() > 1 else "") + ("n" if b.dim() > 1 else "")
    return contract([a, b], [a_term, b_term], result, torch.matmul)


@rule(torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
def _add_matmul(func: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * input + alpha * (a @ b)`."""
    return added(input, torch.matmul(a, b), beta, alpha)


def added(input: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """`beta * input + alpha * product`, where torch does not read what it multiplies by 0."""
    if not product.is_floating_point() and not product.is_complex():
        beta, alpha = int(beta), int(alpha)  # as torch reads them
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (input if beta == 1 else input * beta)


@rule(torch.einsum)
def _einsum(func: Any, equation: Any, *operands: Any) -> Tensor:
    """Any equation with letters and dots; refuses sublists, and a letter twice in one term."""
    if not isinstance(equation, str):
        raise Unsupported("the form with sublists is not split", "Write the equation as a string.")
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    dots = max((t.dim() - len(term.replace("...", "")) for t, term in zip(tensors, terms, strict=True)
                if "..." in term), default=0)  # fmt: skip
    unused = [c for c in string.ascii_letters if c not in equation][:dots]
    if "->" not in equation:
        names = sorted(set(left) - set(".,"))
        right = ("..." if dots else "") + "".join(n for n in names if left.count(n) == 1)
    full = []
    for tensor, term in zip(tensors, terms, strict=True):
        own = tensor.dim() - len(term.replace("...", ""))
        full.append(term.replace("...", "".join(unused[dots - own :])))
    result = right.replace("...", "".join(unused))
    for term in full:
        if len(set(term)) != len(term):
            raise Unsupported(f"einsum term '{term}' repeats a letter")
    written = ",".join(full) + "->" + result

    def product(*parts: Tensor) -> Tensor:
        made = torch.einsum(written, *parts)
        # Short integers come out as 64 bits where several are added, and as they are where a rank has but one.
        return made if made.is_floating_point() or made.is_complex() else made.long()

    return contract(tensors, full, result, product)
