"""Whether an op on split tensors gives plain torch's numbers to the letter: also dtype, infinities, memory format.

The runner of the CORNERS in `tests/spatial/rules/test_*.py`.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, Op

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ODD = (1, 2, 13, 11)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Case(NamedTuple):
    """An op, the tensors that are split and those that are not; `grad` False where torch has no gradient."""

    op: Op
    split: Sequence[Tensor]
    whole: Sequence[Tensor] = ()
    grad: bool = True


def faults(case: Case, height: int, width: int) -> list[str]:
    """In what the split program differs from plain torch: nothing, if all is well."""
    expected, got = _answers(case, None), _answers(case, mesh(height, width))
    if expected.keys() != got.keys():
        return [f"{sorted(expected)} became {sorted(got)}"]
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in (*case.split, *case.whole)):
        exact = _answers(case._replace(split=_doubled(case.split), whole=_doubled(case.whole)), None)
        got = {name: _nearer(got[name], expected[name], exact[name]) for name in expected}
    # What is float32 may have been rounded to the 16 bit of another operand, by torch itself.
    tolerance = max(TOLERANCE.get(t.dtype, 0.0) for t in (*case.split, *case.whole))
    return [f"{name}: {fault}" for name in expected if (fault := _fault(expected[name], got[name], tolerance))]


def _doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def _nearer(got: Any, expected: Any, exact: Any) -> Any:
    """`expected` where `got` is no farther from the exact value: two programs in 16 bit round differently."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return got
    distance, allowed = (got.double() - exact).abs(), (expected.double() - exact).abs().max()
    return torch.where(distance <= allowed, expected, got)


def _fault(expected: Any, got: Any, tolerance: float) -> str:
    if not isinstance(expected, Tensor):
        return "" if expected == got else f"{expected} became {got}"
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return f"{tuple(expected.shape)} {expected.dtype} became {tuple(got.shape)} {got.dtype}"
    if not expected.is_floating_point():
        return "" if torch.equal(expected, got) else f"{int((expected != got).sum())} values differ"
    tolerance = max(TOLERANCE[expected.dtype], tolerance)
    finite = expected[expected.isfinite()].double().abs()
    scale = float(finite.max().clamp_min(1e-6)) if finite.numel() else 1.0
    close = torch.isclose(got.double(), expected.double(), rtol=0, atol=tolerance * scale, equal_nan=True)
    wrong = (~close).nonzero().tolist()
    if not wrong:
        return ""
    first = tuple(wrong[0])
    return f"{len(wrong)} of {expected.numel()} differ, first at {first}: {expected[first]} became {got[first]}"


def _answers(case: Case, on: DeviceMesh | None) -> dict[str, Any]:
    torch.default_generator.manual_seed(0)
    tensors = [t.clone() for t in (*case.split, *case.whole)]
    leaves = [t.requires_grad_(case.grad and t.is_floating_point()) for t in tensors]
    given = [ff.shard(t, on) if on is not None else t for t in leaves[: len(case.split)]]
    outputs = [t for t in tree_leaves(case.op(*given, *leaves[len(case.split) :])) if isinstance(t, Tensor)]
    answers: dict[str, Any] = {}
    loss = []
    for n, t in enumerate(outputs):
        whole = t.full() if isinstance(t, ff.SpatialTensor) else t
        local = t.local if isinstance(t, ff.SpatialTensor) else t
        answers[f"output {n}"] = whole.detach()
        if t.dim() in FORMATS and whole.shape[1] > 1 and min(t.shape[2:]) >= 8:
            answers[f"channels last {n}"] = local.is_contiguous(memory_format=FORMATS[t.dim()])
        if whole.requires_grad:
            ramp = _ramp(whole.numel()).to(whole.dtype)
            loss.append((whole * ramp.view_as(whole)).sum())
    if loss:
        torch.stack([term.double() for term in loss]).sum().backward()
    gradients = {n: leaf.grad for n, leaf in enumerate(leaves) if leaf.grad is not None}
    if on is not None and gradients:
        gradients = dict(zip(gradients, _means(list(gradients.values())), strict=True))
    answers |= {f"gradient {n}": gradient for n, gradient in gradients.items()}
    return answers | {f"left in {n}": t for n, t in enumerate(leaves) if not t.requires_grad and n >= len(case.split)}


def _ramp(count: int) -> Tensor:
    """Gradients of few bits, none of them zero: a sum of them over three ranks is exact in 16 bit too."""
    return ((4 * torch.linspace(-1, 1, count, dtype=torch.float64).mul(40).cos()).round() + 0.5) / 4


def _means(gradients: list[Tensor]) -> list[Tensor]:
    """Over the ranks, as gradients of parameters are averaged; without the infinities of a sum in 16 bit."""
    wide = torch.cat([gradient.double().flatten() for gradient in gradients])
    dist.all_reduce(wide)
    means = (wide / dist.get_world_size()).split([gradient.numel() for gradient in gradients])
    return [mean.view(g.shape).to(g.dtype) for mean, g in zip(means, gradients, strict=True)]


class Corners(dict[str, Case]):
    """Cases by name; no name twice."""

    def add(self, name: str, op: Op, split: Sequence[Tensor], whole: Sequence[Tensor] = ()) -> None:
        assert name not in self, name
        self[name] = Case(op, split, whole)


def corners_as_in_torch(module: str) -> Callable[[tuple[int, int]], None]:
    """A test of all `CORNERS` of a test module on each of the meshes, whatever torch warns of."""

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("mesh", MESHES, ids=str)
    def test(mesh: tuple[int, int]) -> None:
        require_no_faults(module, *mesh)

    return test


def require_no_faults(module: str, height: int, width: int) -> None:
    """All `CORNERS` of a test module, on one mesh."""
    for found in rank_group(height * width).run(_all_faults, module, height, width):
        assert not found, found


def _all_faults(module: str, height: int, width: int) -> dict[str, list[str]]:
    found = {name: faults(case, height, width) for name, case in import_module(module).CORNERS.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def noise(*shape: int, dtype: torch.dtype = F64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator, dtype=F64) * scale).to(dtype)


def spoiled(*shape: int, value: float) -> Tensor:
    """Noise with `value` in one pixel of the first channel and one of the last."""
    x = noise(*shape)
    flat = x.view(-1, *shape[-2:])
    flat[0, shape[-2] // 3, shape[-1] // 2] = value
    flat[-1, shape[-2] - 1, 1] = value
    return x


def eight_bit(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def last(x: Tensor) -> Tensor:
    """`x` in channels-last memory."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def autocast(op: Op) -> Op:
    def inside(*tensors: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return op(*tensors)

    return inside


def of_complex(op: Op) -> Op:
    """`op` of complex numbers, whose parts are seen apart."""
    return lambda x, w: torch.view_as_real(op(torch.complex(x, x.flip(1)), torch.complex(w, w.flip(1))))


def merged(op: Op) -> Op:
    """`op` on (N, C, H, K * W), of a split (N, K, C, H, W)."""
    return lambda x, *rest: op(x.permute(0, 2, 3, 1, 4).flatten(3), *rest)


def deep(op: Op) -> Op:
    """`op` on (N, 1, C, H, W), of (N, C, H, W)."""
    return lambda x, *rest: op(x[:, None], *rest)


def flat(op: Op) -> Op:
    """`op` on the first row of each image."""
    return lambda x, *rest: op(x[:, :, 0], *rest)
