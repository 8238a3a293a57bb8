"""A call that was checked is not checked again, and one that differs in anything that matters is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullframe.errors import UnsupportedOp
from fullframe.spatial import dispatch
from fullframe.spatial.approved import known_call
from fullframe.spatial.gradients import manage
from fullframe.spatial.rules import catalog  # noqa: F401  the rules
from fullframe.spatial.rules.registry import RULES, Unsupported
from fullframe.spatial.tensor import SpatialTensor, wrap
from tests.spatial.fake import on_width, spatial, spec


@pytest.fixture
def x() -> Iterator[Any]:
    with spatial(1, 2) as on:
        local = torch.arange(2.0 * 3 * 4 * 4).view(2, 3, 4, 4)
        yield wrap(local, spec(on, (2, 3, 4, 8), on_width((0, 4, 8), 3)))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are checked."""
    seen: list[Any] = []
    ask = dispatch.expected_of
    monkeypatch.setattr(dispatch, "expected_of", lambda key, func, *rest: (seen.append(func), ask(key, func, *rest))[1])
    return seen


def facts(value: Tensor) -> tuple[Any, ...]:
    local = value.local if isinstance(value, SpatialTensor) else value
    return value.shape, value.stride(), value.dtype, local.tolist()


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "of a view": lambda x: x.permute(0, 2, 3, 1).softmax(-1),
    "sum": lambda x: x.sum(1, keepdim=True),
    "a list": lambda x: torch.cat([x, x], dim=1),
    "another operand": lambda x: torch.where(x > 3, x, x),
    "parameters": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (3,)),
    "a size of torch": lambda x: F.interpolate(x, size=torch.Size([2 * n for n in x.shape[2:]])),
    "several results": lambda x: x.topk(2, dim=1).values,
    "a slice of channels": lambda x: x.narrow(1, 1, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_gives_the_same_without_a_check(name: str, x: Tensor, checks: list[Any]) -> None:
    first = facts(CALLS[name](x))
    assert checks
    checks.clear()
    assert facts(CALLS[name](x)) == first
    assert not checks


def test_other_strides_dtypes_options_and_modes_are_checked(x: Any, checks: list[Any]) -> None:
    last = wrap(x.local.contiguous(memory_format=torch.channels_last), x.spec)
    calls: list[Callable[[], Tensor]] = [
        lambda: x.sum(1), lambda: x.sum((1,)), lambda: x.sum(1, True), lambda: last.sum(1), lambda: x.double().sum(1),
        lambda: wrap(x.local.clone().requires_grad_(), x.spec).sum(1), lambda: torch.sum(x, 1),
    ]  # fmt: skip
    for call in calls:
        call()
        assert checks, call
        checks.clear()
    with torch.no_grad():
        x.sum(1)
    assert checks.pop()
    with torch.autocast("cpu", torch.bfloat16):
        x.sum(1)
    assert checks


def test_a_write_to_a_result_reaches_its_base_at_every_call(x: Any) -> None:
    for value in (1.0, 2.0, 3.0):
        x.permute(0, 2, 3, 1).fill_(value)
        assert x.local.eq(value).all()
        x.flatten(1).clone().zero_()
        assert x.local.eq(value).all()


def test_out_is_written_at_every_call(x: Any) -> None:
    for _ in range(3):
        out = torch.zeros_like(x)
        assert torch.cumsum(x, 1, out=out) is out
        assert torch.equal(out.local, x.local.cumsum(1))


def test_a_gradient_that_must_be_averaged_is_looked_at_every_time(x: Any, checks: list[Any]) -> None:
    kernel = nn.Parameter(torch.ones(2, 3, 1, 1))
    for count in range(2):
        F.conv2d(x, kernel * 1.0)  # no parameter: each call makes another
        assert len(checks) == count + 1
    checks.clear()
    manage(kernel, None)
    F.conv2d(x, kernel)
    F.conv2d(x, kernel)
    assert len(checks) == 1


def test_what_torch_refuses_is_refused_every_time(x: Any) -> None:
    for _ in range(2):
        with pytest.raises(IndexError):
            x.sum(4)


def test_what_a_rule_refuses_by_its_values_is_refused_after_an_approved_call(
    x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(function: Any, x: Any, dim: int) -> Any:
        if x.local.max() > 1000:
            raise Unsupported("it has large numbers")
        return wrap(x.local * 2, x.spec)

    monkeypatch.setitem(RULES, torch.cumsum, rule)
    large = wrap(x.local * 1000, x.spec)
    for _ in range(2):
        assert torch.equal(torch.cumsum(x, 1).local, x.local * 2)
        with pytest.raises(UnsupportedOp, match="it has large numbers"):
            torch.cumsum(large, 1)


def test_calls_that_are_not_told(x: Any) -> None:
    assert known_call(torch.sum, (x, 1), {}) is not None
    for args in ((1, x), (x, slice(1)), (x, object())):  # not split first, and what is no part of a key
        assert known_call(torch.sum, args, {}) is None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a frozen weight": lambda layer: layer.weight.requires_grad_(False),
    "a frozen bias": lambda layer: layer.bias.requires_grad_(False),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "a weight that nobody averages": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach())),
}
OF_A_CONVOLUTION: dict[str, Callable[[Any], Any]] = {
    "channels last": lambda layer: layer.to(memory_format=torch.channels_last),
    "a longer kernel": lambda layer: setattr(layer.weight, "data", torch.ones(3, 3, 4, 1)),
    "another padding": lambda layer: setattr(layer, "padding", (1, 0)),
    "another stride": lambda layer: setattr(layer, "stride", (2, 1)),
}
OF_A_NORM: dict[str, Callable[[Any], Any]] = {
    "double statistics": lambda layer: setattr(layer, "running_var", torch.ones(3, dtype=torch.float64)),
    "another eps": lambda layer: setattr(layer, "eps", 1e-3),
}


@pytest.mark.parametrize("name", [*CHANGES, *OF_A_CONVOLUTION, *OF_A_NORM])
def test_a_module_s_call_is_checked_where_anything_of_it_changed(name: str, x: Any, checks: list[Any]) -> None:
    for layer, own in ((nn.Conv2d(3, 3, (3, 1)), OF_A_CONVOLUTION), (nn.BatchNorm2d(3).eval(), OF_A_NORM)):
        change = {**CHANGES, **own}.get(name)
        if change is None:
            continue
        for parameter in layer.parameters():
            manage(parameter, None)
        for asked in (True, False):
            layer(x)
            assert bool(checks) is asked
            checks.clear()
        change(layer)
        try:
            found = facts(layer(x))
        except RuntimeError:  # as torch has it
            with pytest.raises(RuntimeError):
                layer(x.local)
            found = None
        assert checks, type(layer)
        checks.clear()
        assert found is None or found[-1] == layer(x.local).tolist()
