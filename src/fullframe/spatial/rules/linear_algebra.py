"""Linear algebra of small matrices (..., H, W, k, k): each rank those of its own pixels, nothing is sent but errors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.ranks.collectives import all_sum_no_grad, device_of_facts
from fullframe.spatial.operands import aligned, has_values, united
from fullframe.spatial.rules.registry import TooSmall, Unsupported, rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_l = torch.linalg
_WHOLE = "it works on whole matrices"


def _named(owners: Sequence[Any], names: str) -> list[Any]:
    found = [getattr(owner, name, None) for owner in owners for name in names.split()]
    return [function for function in found if function is not None]


_MATRIX = _named(
    [_l],
    """
    inv inv_ex det slogdet cholesky cholesky_ex eigh eigvalsh eig eigvals svd svdvals qr lu lu_factor lu_factor_ex
    ldl_factor ldl_factor_ex matrix_exp matrix_power pinv matrix_rank cond
    """,
) + _named(
    [torch, Tensor],
    """
    inverse det slogdet logdet cholesky cholesky_inverse svd qr matrix_exp matrix_power pinverse geqrf
    """,
)


@rule(*dict.fromkeys(_MATRIX))
def _of_matrices(func: Any, A: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """A function of matrices (..., k, k) split in their leading dims; refuses split matrices and tensor tolerances."""
    spec = A.spec
    if any(isinstance(t, Tensor) for t in (*args, *kwargs.values())):
        raise Unsupported("a tolerance or an option is a tensor")
    spec.require_whole(_WHOLE, -1, -2)
    local = local_of(A)
    batch = spec.with_(spec.shape[:-2], spec.placements)
    has_no_q = "r" in (*args, *kwargs.values())  # of qr
    return _results(lambda: func(local, *args, **kwargs), batch, local.device, optional=has_no_q)


_BY_ONE = (_l.solve, _l.solve_triangular)  # of which each right side has but one result
_SYSTEM = _named([_l], "solve solve_ex solve_triangular") + _named([torch, Tensor], "cholesky_solve triangular_solve")


@rule(*dict.fromkeys(_SYSTEM))
def _of_systems(func: Any, A: Tensor, B: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Linear systems (..., k, k) and (..., k, n), or (..., k) of vectors, split in their leading dims.

    By one whole matrix also where the n right sides are split: each is solved by itself.
    """
    equations = -2 if kwargs.get("left", True) else -1
    if func in _BY_ONE and not isinstance(A, SpatialTensor) and A.dim() == 2 <= B.dim():
        assert isinstance(B, SpatialTensor)
        if not B.spec.is_split(equations):
            return wrap(func(aligned(A, B.spec.with_(A.shape, ())), local_of(B), *args, **kwargs), B.spec)
    vectors = func in (_l.solve, _l.solve_ex) and (B.dim() == 1 or tuple(B.shape) == tuple(A.shape[:-1]))
    spec, parts = _cut_alike([(A, 2), (B, 1 if vectors else 2)])
    return _results(lambda: func(*parts, *args, **kwargs), spec, parts[0].device)


@rule(_l.lstsq)
def _lstsq(func: Any, A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Least squares of (..., m, n) and (..., m, k), or (..., m), split in their leading dims.

    There are residuals only where every matrix of every rank has them.
    """
    vectors = B.dim() == A.dim() - 1 and tuple(B.shape) == tuple(A.shape[:-1])
    spec, parts = _cut_alike([(A, 2), (B, 1 if vectors else 2)])
    for p in spec.placements:
        if p.extents.has_empty:
            raise TooSmall([p.axis])
    found = _results(lambda: tuple(func(*parts, rcond, driver=driver)), spec, parts[0].device, optional=True)
    return torch.return_types.linalg_lstsq(found)  # type: ignore[attr-defined]


def _cut_alike(given: Sequence[tuple[Tensor, int]]) -> tuple[Spec, list[Tensor]]:
    """The spec of the leading dims of tensors, each with so many dims behind them, and the tensors' local parts."""
    lead = tuple(torch.broadcast_shapes(*(tuple(t.shape[: t.dim() - core]) for t, core in given)))
    cuts = []
    for t, core in given:
        if isinstance(t, SpatialTensor):
            t.spec.require_whole(_WHOLE, *range(t.dim() - core, t.dim()))
            cuts.append([p.at(p.dim + len(lead) + core - t.dim()) for p in t.spec.placements])
    spec = next(t.spec for t, _ in given if isinstance(t, SpatialTensor)).with_(lead, united(cuts))
    return spec, [aligned(t, spec.with_((*lead, *t.shape[t.dim() - core :]), spec.placements)) for t, core in given]


def _results(call: Callable[[], Any], batch: Spec, device: torch.device, optional: bool = False) -> Any:
    """What the call gives, split in the leading dims as `batch` is; its error, where a rank has one, on all ranks.

    `optional`: of what has no elements (0,) on some rank there are none at all.
    """
    batch.require_filled()
    error: Exception | None = None
    found: Any = None
    try:
        found = call()
    except torch.linalg.LinAlgError as failed:
        error = failed
    first = found if isinstance(found, Tensor) else found[0] if found is not None else None
    if not isinstance(first, FakeTensor):
        group = batch.group
        failures = torch.tensor(int(error is not None), device=device_of_facts(group, device))
        if int(all_sum_no_grad(failures, group)):
            raise error or torch.linalg.LinAlgError("a matrix of another rank has no such result, see its error")

    def shelled(local: Tensor) -> Tensor:
        lead = batch.shape
        return wrap(local, batch.with_((*lead, *local.shape[len(lead) :]), batch.placements))

    if isinstance(found, Tensor):
        return shelled(found)
    gone: list[Any] = [False] * len(found)
    if optional:
        none_here = [int(t.shape == (0,)) for t in found]
        missing = torch.tensor(none_here, device=device_of_facts(batch.group, device))
        missing = all_sum_no_grad(missing, batch.group)
        gone = missing.tolist() if has_values(missing) else none_here
    parts = [t.new_empty(0) if none else shelled(t) for t, none in zip(found, gone, strict=True)]
    return tuple(parts) if type(found) is tuple else type(found)(parts)


@rule(_l.matrix_norm)
def _matrix_norm(
    func: Any, A: SpatialTensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Over two dims: sums and largest sums of split ones too; refuses singular values of split matrices."""
    rows, columns = (d % A.dim() for d in dim)
    if ord == "fro":
        return _l.vector_norm(A, 2, (rows, columns), keepdim, dtype=dtype)  # type: ignore[no-any-return]
    if ord in ("nuc", 2, -2):
        A.spec.require_whole(f"the {ord} norm needs the singular values of whole matrices", rows, columns)
        A.spec.require_filled()
        turned = A.movedim((rows, columns), (-2, -1))
        assert isinstance(turned, SpatialTensor)
        local = func(local_of(turned), ord, (-2, -1), False, dtype=dtype)
        norm = wrap(local, turned.spec.with_(turned.shape[:-2], turned.spec.placements))
        for d in sorted((rows, columns)) if keepdim else ():
            norm = norm.unsqueeze(d)
        return norm
    summed, compared = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = _l.vector_norm(A, 1, summed, True, dtype=dtype)
    best = torch.amax(sums, compared, True) if ord > 0 else torch.amin(sums, compared, True)
    return best if keepdim else best.squeeze((rows, columns))


@rule(_l.norm)
def _norm(
    func: Any, A: SpatialTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Of vectors over one dim or all, of matrices over two."""
    vectors = ord is None or isinstance(dim, int) or (dim is None and A.dim() == 1) or (dim and len(dim) == 1)
    if vectors:
        return _l.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
    over = (0, 1) if dim is None else dim
    return _l.matrix_norm(A, ord, over, keepdim, dtype=dtype)  # type: ignore[no-any-return]
