"""What AOTAutograd computes wrongly is found while a block runs; that it still does so is a test, too."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function

from fullframe.model.compiled.aot_faults import WithoutAOTFaults
from fullframe.ranks.recording import NotCapturable

Function = Callable[[Tensor], tuple[Tensor, ...]]


def into_windows(x: Tensor) -> tuple[Tensor, ...]:
    x = x * 2
    x.unfold(0, 1, 2).zero_()
    return (x,)


def a_view_and_the_same_detached(x: Tensor) -> tuple[Tensor, ...]:
    turned = (x * 2).mT
    return turned, turned.detach()


def around_a_dropout(x: Tensor) -> tuple[Tensor, ...]:
    sums = torch.zeros(3)
    nn.Dropout(0.5).eval()(sums).add_(1.0)
    return (x * sums,)


def is_wrong(function: Function) -> bool:
    x = torch.arange(9.0).view(3, 3).requires_grad_()
    found = aot_function(function, fw_compiler=lambda module, _: module)(x * 1)
    return any(not torch.equal(a, b) for a, b in zip(found, function(x), strict=True))


@pytest.mark.parametrize(
    ("function", "why", "mended"),
    [
        (into_windows, "writes to windows", "3"),
        (a_view_and_the_same_detached, "returns a view", "3"),
        (around_a_dropout, "", "2.14"),
    ],
)
def test_it_is_wrong_and_is_set_right_or_refused(function: Function, why: str, mended: str) -> None:
    """Where a later torch is not wrong, what is done about it may go with the support of those before."""
    assert is_wrong(function) == (torch.__version__ < mended)

    def guarded(x: Tensor) -> tuple[Tensor, ...]:
        with WithoutAOTFaults() as faults:
            result = function(x)
        faults.check(result)
        return result

    if not why:
        assert not is_wrong(guarded)
        return
    with pytest.raises(NotCapturable, match=why):
        is_wrong(guarded)


def test_what_is_right_passes() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with WithoutAOTFaults() as faults:
        y = x * 2
        y.unfold(0, 2, 2).zero_()
        windows = y.unfold(0, 2, 1) * 1
        assert F.dropout(input=y, training=False) is y
        assert F.dropout(y, 0.5, True) is not y
        assert F.alpha_dropout(y) is y
        with pytest.raises(ValueError, match="probability"):
            F.dropout(y, 1.5, False)
    faults.check((y, y.detach(), windows))
