"""Under CUDA's autocast policy every rule gives torch's dtypes, and multiplies in the dtype that torch multiplies in.

A GPU multiplies fp32 in TF32 where it is told to, and 16 bit always in its fast units: a rule that hands a product to
the kernels in another dtype than torch does is either slow or not as precise as in one process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.simulation.fake.autocast import cuda_autocast
from fullframe.simulation.fake.replaced import replaced
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.rules import narrow_bf16
from tests.rank_group import rank_group
from tests.spatial.cases import Case, all_cases

PRODUCTS = frozenset({
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "convolution_backward",
    "mm", "mv",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
})  # fmt: skip
# Shapes there hang on what all ranks have.
DECIDED_BY_VALUES = (
    "masks: ",
    "counting: ",
    "covariance: weights",
    "quantiles: of what a mask",
    "quantiles: where one rank",
    "convolution: conv by what a mask picks",
    "transposed_convolution: conv_transpose by what a mask picks",
    "matmul: linear by what a mask picks",
)
# Strict, with the reason.
KNOWN = {
    "products: addr": "an outer product is a pointwise one, in 16 bit too",
}


class Products(TorchDispatchMode):
    """The dtypes in which anything is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname == "recv_":  # what comes from nowhere: places that are there
            args[0][0].zero_()
        if func._opname in PRODUCTS:
            self.dtypes.add(next(t.dtype for t in args if isinstance(t, Tensor)))
        return func(*args, **(kwargs or {}))


class Policy(NamedTuple):
    """What a case shows of it."""

    results: tuple[str, ...]
    gradients: tuple[str, ...]
    forward: tuple[str, ...]  # products
    backward: tuple[str, ...]


def _policy(case: Case, given: torch.dtype, cut: Callable[[Tensor], Tensor]) -> Policy | str:
    generator = torch.Generator().manual_seed(1)
    shapes = [(*lead, *case.smallest) for lead in case.split]
    split = [torch.randn(s, generator=generator).to(given).requires_grad_() for s in shapes]
    whole = [torch.randn(s, generator=generator).requires_grad_() for s in case.whole]  # parameters stay in fp32
    try:
        with Products() as forward, torch.autocast("cpu", torch.bfloat16):
            results = [t for t in tree_leaves(case.op(*map(cut, split), *whole)) if isinstance(t, Tensor)]
            ends = [t.full() if isinstance(t, ff.SpatialTensor) else t for t in results]
        ends = [t for t in ends if t.requires_grad]
        with Products() as backward:
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception as error:
        return type(error).__name__
    gradients = tuple(str(t.grad.dtype) if t.grad is not None else "none" for t in (*split, *whole))
    dtypes = tuple(str(t.dtype) for t in results)
    return Policy(dtypes, gradients, *(tuple(sorted(map(str, seen.dtypes))) for seen in (forward, backward)))


def _differing(given: torch.dtype) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """Of this rank's share of the cases, as one rank of a job whose messages go nowhere."""
    found, compared = {}, 0
    cases = {name: case for name, case in all_cases().items() if not name.startswith(DECIDED_BY_VALUES)}
    mine = sorted(cases)[dist.get_rank() :: dist.get_world_size()]
    with fake_job(1, 2), cuda_autocast(), replaced(narrow_bf16, "HAS_AVX512", False):
        on = ff.init_mesh(width=2)
        for name in mine:
            plain = _policy(cases[name], given, lambda t: t)
            if isinstance(plain, str):  # no kernel for this dtype
                continue
            compared += 1
            split = _policy(cases[name], given, lambda t: ff.shard(t, on, check=False))
            if split != plain:
                found[name] = plain, split
    return compared, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_dtypes_and_products_are_torchs() -> None:
    met = set()
    for given in (torch.float32, torch.bfloat16):
        for compared, found in rank_group(2).run(_differing, given, timeout_seconds=800):
            assert compared > 150
            assert {name: pair for name, pair in found.items() if name not in KNOWN} == {}, given
            met |= found.keys()
    assert KNOWN.keys() - met == set(), "mended: take it out of KNOWN"
