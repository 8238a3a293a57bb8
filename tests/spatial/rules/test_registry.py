"""The table of rules, and which functions write."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules import catalog, registry  # noqa: F401  the table is full
from fullframe.spatial.rules.registry import NAMED, RULES, UNCHECKED, getter, rule, rule_of, setters, writes


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


def test_an_op_is_found_by_its_name_whenever_its_library_is_loaded() -> None:
    rules, named, unchecked = dict(RULES), dict(NAMED), set(UNCHECKED)
    try:
        decorated = rule("of_a_test::twice")(lambda func, x: x)
        with pytest.raises(ValueError, match="of_a_test::twice has a rule already"):
            rule("of_a_test::twice")(lambda func, x: x)
        library = torch.library.Library("of_a_test", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.define("thrice(Tensor x) -> Tensor")
        ops = torch.ops.of_a_test
        assert rule_of(ops.twice) is decorated and rule_of(ops.twice.default) is decorated
        assert ops.twice in UNCHECKED
        assert rule_of(ops.thrice) is None and rule_of(own) is None
    finally:
        for table, before in ((RULES, rules), (NAMED, named)):
            table.clear()
            table.update(before)
        UNCHECKED.intersection_update(unchecked)


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
