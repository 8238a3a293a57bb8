"""What hangs on an unused result alone gets no gradient, as in one process; a compiled backward would give zeros."""

from typing import Any

import torch
from torch import Tensor

from fullframe.model.compiled.fates import fates, with_fates


class AllAtOnce(torch.autograd.Function):
    """As a compiled block: (a * x, a * x + b), whose backward gives zeros for a result that is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a)
        return a * x, a * x + b

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        x, a = ctx.saved_tensors
        return (first + second) * a, (first + second) * x, second


def leaves() -> list[Tensor]:
    return [torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 5.0)]


def plain(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * x, a * x + b


def test_which_results_depend_on_what() -> None:
    x, a, b = leaves()
    assert fates([x, a, b], plain(x, a, b)) == ({0, 1}, {0, 1}, {1})
    assert fates([x, a, b], (a * x * b, a + x + b)) is None
    assert fates([x, a, b], (a * x * b, (a * b).detach())) is None


def test_gradients_are_those_of_each_op_by_itself() -> None:
    by = fates(inputs := leaves(), plain(*inputs))
    assert by is not None
    for used in ((0,), (1,), (0, 1)):
        expected, found = leaves(), leaves()
        for results in (plain(*expected), with_fates(AllAtOnce.apply, found, by)):
            sum(results[n] for n in used).backward()  # type: ignore[union-attr]
        assert [t.grad for t in found] == [t.grad for t in expected], used


def test_each_backward_pass_is_looked_at_by_itself() -> None:
    found = leaves()
    by = fates(found, plain(*found))
    assert by is not None
    first, second = with_fates(AllAtOnce.apply, found, by)
    second.backward(retain_graph=True)
    found[2].grad = None
    first.backward()
    assert found[2].grad is None and found[0].grad is not None
