"""The table of rules, and which functions write."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules import registry
from fullframe.spatial.rules.registry import RULES, UNCHECKED, getter, rule, setters, writes


def own() -> None: ...


def other() -> None: ...


def test_a_rule_is_found_by_its_function_and_a_second_one_is_refused() -> None:
    before = dict(RULES)
    try:
        decorated = rule(own, own)(lambda func: 1)
        assert RULES[own] is decorated
        assert own in UNCHECKED  # not torch's: it is never run on meta tensors
        with pytest.raises(ValueError, match="has a rule already"):
            rule(other, own)(lambda func: 2)
        assert RULES[own] is decorated
        assert torch.relu in RULES and torch.relu not in UNCHECKED
    finally:
        RULES.clear()
        RULES.update(before)
        UNCHECKED.difference_update((own, other))
    assert registry.general, "the dispatch has put itself in"


def test_properties_by_the_functions_that_torch_passes() -> None:
    seen = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(1).as_subclass(Watched)
    _ = x.grad
    x.grad = None
    del x.grad
    assert seen == [getter("grad"), *setters("grad")]


@pytest.mark.parametrize("func", [Tensor.add_, Tensor.__iadd__, Tensor.__setitem__, torch.relu_])
def test_functions_that_write(func: object) -> None:
    assert writes(func, {})


@pytest.mark.parametrize("func", [Tensor.add, Tensor.__add__, Tensor.__getitem__, torch.relu, operator.add, F.relu])
def test_functions_that_do_not(func: object) -> None:
    assert not writes(func, {}) and writes(F.relu, {"inplace": True})
