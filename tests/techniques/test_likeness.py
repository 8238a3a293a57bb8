"""When two results count as alike, and how all ranks learn that they are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from fullframe.errors import StrategyError
from fullframe.techniques.likeness import ELEMENTS, Differences, differ, elements, note, sample
from tests.rank_group import rank_group

BASE = torch.randn(60, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SPECIAL = torch.tensor([0.0, float("nan"), float("inf"), -1.0])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (BASE, BASE, False),
        (BASE, BASE + 1e-10, False),
        (BASE, BASE + 1e-6, True),
        (BASE.float(), BASE.float() + 1e-5, False),
        (BASE.float(), BASE.float() + 1e-2, True),
        (BASE.bfloat16(), BASE.bfloat16() * 1.01, False),
        (BASE.bfloat16(), BASE.bfloat16() * 1.5, True),
        (BASE, BASE.roll(1, 1), True),  # of which the sums are the same
        (BASE.bfloat16(), BASE.bfloat16() + 0.2, True),  # which waves miss
        (BASE, BASE + torch.tensor([0.0, 1.0]).repeat(35), True),  # in every other column alone
        (SPECIAL, SPECIAL.clone(), False),
        (SPECIAL, SPECIAL.nan_to_num(), True),
        (torch.zeros(3), torch.zeros(3), False),
        (torch.arange(5), torch.arange(5), False),
        (torch.arange(5), torch.arange(5) + 1, True),
        (BASE.to(torch.complex128), BASE * 1j, True),
        (BASE, BASE.float(), True),
        (torch.zeros(0), torch.zeros(0), False),
    ],
)
def test_alike_is_to_the_root_of_the_precision(first: Tensor, second: Tensor, expected: bool) -> None:
    assert bool(differ(sample({"result": [first, 1]}), sample({"result": [second, 2]}))) is expected


def test_a_sample_is_small_and_from_all_over() -> None:
    picked = elements(torch.arange(3 * 5 * 400 * 700).view(3, 5, 400, 700))
    assert ELEMENTS / 8 < picked.numel() <= ELEMENTS
    assert picked.max() > 0.9 * 3 * 5 * 400 * 700


def test_a_sample_takes_no_product_of_matrices() -> None:
    """For which cuBLAS would keep 32 MiB of a GPU for each thread, from the first look on."""
    with OpNames() as ops:
        sample(BASE)
    assert {"cos", "sum"} <= ops.names
    assert not ops.names & {"mv", "mm", "addmv", "addmm", "bmm", "dot", "vdot"}


class OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_outside_of_a_step_it_is_raised_at_once() -> None:
    note("not raised", torch.tensor(False))
    with pytest.raises(StrategyError, match="at once"):
        note("at once", torch.tensor(True))


def test_inside_it_is_counted() -> None:
    differences = Differences()
    with differences.collecting():
        for message, differs in (("a", True), ("b", False), ("c", True), ("a", True)):
            note(message, torch.tensor(differs))
    assert differences.count(torch.zeros((), dtype=torch.float64)) == 3
    with pytest.raises(StrategyError, match=r"^a \(and 1 more\)$"):
        differences.refuse()
    assert differences.count(torch.zeros(())) == 0


class OnOneRank(nn.Module):
    """Its second pass differs on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 3, 1), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += torch.distributed.get_rank()
        return self.conv(x * self.calls[0]).tanh() + x  # type: ignore[no-any-return]


def different_on_one_rank(in_backward: bool) -> tuple[str, list[bool]]:
    torch.manual_seed(0)
    options: Any = {"recompute": "blocks", "recompute_modules": ("?",), "update_in_backward": in_backward}
    strategy = ff.Strategy(data=2, **options)
    model = ff.parallelize(
        nn.Sequential(*(OnOneRank() for _ in range(3))), ff.init_mesh(), average_gradients=not in_backward
    )
    before = [p.detach().clone() for p in model.parameters()]
    step = ff.TrainStep(
        model, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), strategy
    )
    x: Any = torch.ones(2, 3, 4, 4)
    if in_backward:  # it is told in the next step, before backward
        step(x)
    with pytest.raises(StrategyError) as raised:
        step(x)
    return str(raised.value), [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_one_rank_alone_finds_all_raise(in_backward: bool) -> None:
    (first, unchanged), (second, _) = rank_group(2).run(different_on_one_rank, in_backward)
    assert first == second and "had another result when it was recomputed in backward" in first
    assert all(unchanged) is not in_backward
