"""The question every op and model is asked: are the split numbers those of one process?"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fullframe as ff
from fullframe.spatial.tensor import local_or_whole
from fullframe.spatial.views import version_of

Op = Callable[..., Any]
FLOOR = 1e-6  # of inputs of order 1: what is smaller is zero but for rounding, and has no relative error


def mesh(height: int, width: int, depth: int = 1) -> DeviceMesh:
    return ff.init_mesh(height=height, width=width, depth=depth)


def differences(
    op: Op, split: Sequence[Tensor], whole: Sequence[Tensor], height: int, width: int, floor: float = FLOOR
) -> dict[str, float]:
    """Largest relative difference of outputs and gradients of `op(*split, *whole)` on the mesh and in one process.

    `split` are cut over the mesh, `whole` are not; gradients are taken of all that are floating point.
    """
    return differences_from(one_process(op, split, whole), op, split, whole, height, width, floor)


def one_process(op: Op, split: Sequence[Tensor], whole: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients of `op(*split, *whole)` without a mesh, by name."""
    return _answers(op, split, whole, None)


def differences_from(
    here: dict[str, Tensor], op: Op, split: Sequence[Tensor], whole: Sequence[Tensor], height: int, width: int,
    floor: float = FLOOR, depth: int = 1,
) -> dict[str, float]:  # fmt: skip
    """`differences`, from what `one_process` gave: for several meshes."""
    there = on_mesh(op, split, whole, height, width, depth)
    assert here.keys() == there.keys(), (here.keys(), there.keys())
    return {name: relative(here[name], there[name], floor) for name in here}


def on_mesh(
    op: Op, split: Sequence[Tensor], whole: Sequence[Tensor], height: int, width: int, depth: int = 1
) -> dict[str, Tensor]:
    """Outputs, made whole, and gradients of `op(*split, *whole)` on the mesh, by name."""
    return _answers(op, split, whole, mesh(height, width, depth))


class InDouble(TorchFunctionMode):
    """New tensors are float64, and torch's functions take it for any other float: the weights that an op holds."""

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, _double, (args, kwargs or {}))
        return func(*args, **kwargs)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def roundings(exact: Tensor, expected: Tensor, got: Tensor, dtype: torch.dtype, floor: float = FLOOR) -> float:
    """How many times as far as `expected` is `got` from `exact`, the numbers of float64, by root mean squares.

    `expected` counts as off by a last bit of `dtype` at least. Infinite where `relative` is, or where `exact` has
    another shape.
    """
    if exact.shape != expected.shape or relative(expected, got) == float("inf"):
        return float("inf")
    finite = expected.isfinite() & exact.isfinite()
    exact, expected, got = (t[finite].double() for t in (exact, expected, got))
    last_bit = torch.finfo(dtype).eps * _rms(exact).clamp_min(floor)
    return float(_rms(got - exact) / (_rms(expected - exact) + last_bit))


def _rms(x: Tensor) -> Tensor:
    return x.norm() / max(x.numel(), 1) ** 0.5


def relative(expected: Tensor, got: Tensor, floor: float = FLOOR) -> float:
    """Largest difference over the largest value; infinite for another shape or dtype, or other infinities or NaN."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    expected, got = expected.double(), got.double()
    largest = (expected - got).abs().max()
    if largest.isfinite():  # so all numbers are
        return float(largest / expected.abs().max().clamp_min(floor))
    finite = expected.isfinite()
    if (
        not torch.equal(expected[~finite].nan_to_num(7.0), got[~finite].nan_to_num(7.0))
        or not got[finite].isfinite().all()
    ):
        return float("inf")
    expected, got = expected.where(finite, 0.0), got.where(finite, 0.0)
    return float((expected - got).abs().max() / expected.abs().max().clamp_min(floor))


def _require_equal_on_all_ranks(gradients: Sequence[Tensor]) -> None:
    """Each rank has one process's gradients, not a share of them; asked of float64."""
    mine = [gradient.nan_to_num().flatten() for gradient in gradients if gradient.dtype == torch.float64]
    if not mine:
        return
    means = torch.cat(mine)
    dist.all_reduce(means)
    for mean, gradient in zip(means.split([g.numel() for g in mine]), mine, strict=True):
        apart = relative(mean / dist.get_world_size(), gradient)
        assert apart < 1e-9, f"the ranks' gradients are {apart:.0e} apart"


def _answers(op: Op, split: Sequence[Tensor], whole: Sequence[Tensor], on: DeviceMesh | None) -> dict[str, Tensor]:
    torch.default_generator.manual_seed(0)
    if split[0].is_cuda:
        torch.cuda.manual_seed(0)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (*split, *whole)]
    given = [ff.shard(t, on) if on is not None else t for t in leaves[: len(split)]]
    before = [version_of(local_or_whole(t)) for t in given]
    outputs = [t for t in tree_leaves(op(*given, *leaves[len(split) :])) if isinstance(t, Tensor)]
    written = [n for n, t in enumerate(given) if t.requires_grad and version_of(local_or_whole(t)) != before[n]]
    assert not written, f"operands {written} were written to, which one process's autograd would not allow"
    outputs = [t.full() if isinstance(t, ff.SpatialTensor) else t for t in outputs]
    answers = {f"output {n}": t.detach() for n, t in enumerate(outputs)}
    loss = sum(
        (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).cos().view_as(t)).sum() for t in outputs if t.requires_grad
    )
    if isinstance(loss, Tensor):
        loss.backward()
    gradients = {f"gradient {n}": leaf.grad for n, leaf in enumerate(leaves) if leaf.grad is not None}
    if on is not None:
        _require_equal_on_all_ranks(list(gradients.values()))
    return answers | gradients


def unlike(
    op: Op, split: Sequence[Tensor], whole: Sequence[Tensor], height: int, width: int, tolerance: float
) -> list[str]:
    """What of `differences` differs, told in words; infinities and NaN must stand where they stand in one process."""
    here = _answers(op, split, whole, None)
    there = on_mesh(op, split, whole, height, width)
    missing = [f"{name} is in one of them alone" for name in here.keys() ^ there.keys()]
    return missing + [
        f"{name}: {fault}"
        for name in here.keys() & there.keys()
        if (fault := _unlike(here[name], there[name], tolerance))
    ]


def _unlike(expected: Tensor, got: Tensor, tolerance: float) -> str:
    facts = [(tuple(t.shape), t.dtype) for t in (expected, got)]
    if facts[0] != facts[1]:
        return f"{facts[1]} for {facts[0]}"
    expected, got = expected.to(torch.complex128), got.to(torch.complex128)
    finite = expected.isfinite() & got.isfinite()
    same = (expected == got) | (expected.isnan() & got.isnan())
    scale = expected[finite].abs().max().clamp_min(1) if finite.any() else 1
    wrong = torch.where(finite, (expected - got).abs() > tolerance * scale, ~same)
    at = [tuple(index) for index in wrong.nonzero()[:3].tolist()]
    return ", ".join(f"{got[i].real.item():.8g} for {expected[i].real.item():.8g} at {i}" for i in at)
