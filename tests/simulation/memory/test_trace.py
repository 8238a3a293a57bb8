"""What a trace sees and what its account makes of it, on real tensors whose lives can be counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.simulation.clock.roofline import StepClock
from fullframe.simulation.devices.table import device_named
from fullframe.simulation.fake.world import fake_job
from fullframe.simulation.memory.account import account
from fullframe.simulation.memory.trace import Tracer


def tracer(names: dict[nn.Module, str] | None = None, scratch_bytes: int = 0) -> Tracer:
    def scratch(func: object, args: object, out: object) -> int:
        return scratch_bytes if func is torch.ops.aten.exp.default else 0

    return Tracer(names or {}, {}, lambda func, args, kwargs: func(*args, **kwargs), scratch)


def lives(traced: Tracer) -> list[tuple[int, int, int | None]]:
    """(bytes, born, died) of each storage, by birth."""
    blocks = {block.born: block for block in traced.trace.events}
    return [(block.bytes, born, block.died) for born, block in sorted(blocks.items())]


class _Doubled(torch.autograd.Function):
    """Gives its gradient to `keep`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Callable[[Tensor], object]) -> Tensor:
        ctx.keep = keep
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        own = gradient * 2
        ctx.keep(own)
        return own, None


@pytest.mark.parametrize(("is_kept", "is_viewed", "most"), [(False, False, 2), (True, False, 3), (False, True, 3)])
def test_two_gradients_are_added_up_in_the_first_unless_somebody_else_has_it(
    is_kept: bool, is_viewed: bool, most: int
) -> None:
    kept: list[Tensor] = []
    keep = kept.append if is_kept else (lambda own: kept.append(own.flatten()[:1])) if is_viewed else (lambda own: None)
    x = torch.ones(5, 5, requires_grad=True)
    with tracer() as traced:
        y = x.relu()
        total = _Doubled.apply(y, lambda own: None).sum() + _Doubled.apply(y, keep).sum()  # type: ignore[no-untyped-call]
        before = len(traced.trace.events)
        total.backward()
    assert x.grad is not None and x.grad.tolist() == [[4.0] * 5] * 5
    held = highest = 0
    for number, block in enumerate(traced.trace.events[before:], before):
        if block.bytes == 100 and block.born >= before:
            held += 1 if block.born == number else -1
            highest = max(highest, held)
    assert highest == most


class Heard(StepClock):
    """Keeps what it is told of messages."""

    def reset(self) -> None:
        super().reset()
        self.messages: list[tuple[object, ...]] = []

    def communicate(self, *message: object) -> None:
        self.messages.append(message)


def test_a_message_is_told_to_the_clock_with_its_communicator() -> None:
    clock = Heard(device_named("T4"))
    with fake_job(0, 4):
        pair = dist.new_group([0, 1])
        with Tracer({}, {pair.group_name: "width"}, lambda f, args, kwargs: f(*args, **kwargs), lambda *_: 0, clock):
            dist.all_reduce(torch.ones(3), group=pair)
            dist.all_reduce(torch.ones(5))
        assert dist.group.WORLD is not None
        assert clock.messages == [
            ("allreduce", 12, 2, "width", pair.group_name),
            ("allreduce", 20, 4, "job", dist.group.WORLD.group_name),
        ]


def test_who_multiplies_matrices_takes_a_workspace_once_and_keeps_it() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    with Tracer({}, {}, lambda f, args, kwargs: f(*args, **kwargs), lambda *_: 0, workspace=1000) as traced:
        assert torch.relu(x).sum() == 6 and traced.workspaces == 0
        ((x @ weight).sum() + (x @ weight).sum()).backward()
        assert traced.workspaces == 1000
    taken = [block for block in traced.trace.events if block.mark == "workspace"]
    assert [(block.bytes, block.phase, block.died) for block in taken] == [(1000, "build", None)]


def test_a_storage_lives_until_its_last_view_is_gone() -> None:
    with tracer() as traced:
        a = torch.zeros(100)
        view = a.view(10, 10)[2:]
        b = view + 1  # 80 numbers
        del a
        c = b * 2
        del view, b
        d = c.add_(1)  # in place: nothing new
        del c, d
    assert lives(traced) == [(400, 0, 3), (320, 1, 4), (320, 2, 5)]


def test_what_a_kernel_takes_for_itself_comes_and_goes_with_it() -> None:
    with tracer(scratch_bytes=1000) as traced:
        x = torch.zeros(10)
        y = x.exp()
    assert y.sum() == 10
    assert lives(traced)[:3] == [(40, 0, None), (40, 1, None), (1000, 2, 3)]
    assert traced.trace.events[2].mark == "workspace"


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.exp() * 3).sum()


def test_the_account_of_a_step() -> None:
    """Kept for backward: exp's result. At the peak also the gradient of the product and the one that it becomes."""
    weight, model = torch.ones(50, requires_grad=True), Exponential()
    with tracer({model: "model"}) as traced:
        traced.mark("parameter", weight)
        weight.register_post_accumulate_grad_hook(lambda p: traced.mark("gradient", p.grad))
        traced.outside = "forward"
        loss = model(weight)
        loss.backward()
        del loss
        traced.end_step()
    found = account(traced.trace)
    scalars = 4 + 4  # the loss, and the gradient it starts from, which is made before backward begins
    assert found.bytes == {"parameter": 200, "activation": 200 + scalars, "temporary": 200, "gradient": 200}
    assert found.peak_bytes == 800 + scalars
    assert (found.moment.step, found.moment.phase, found.moment.module) == (1, "backward", "model")
    assert found.modules == {"model": 200 + 4, "": 4}
    assert [tensor.bytes for tensor in found.largest] == [200, 200, 200, 200, 4, 4]


def two_steps(repeated: bool) -> Tracer:
    """SGD with momentum on real numbers; the second step taken, or copied from the first."""
    weight = torch.ones(50, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with tracer() as traced:
        traced.mark("parameter", weight)
        weight.register_post_accumulate_grad_hook(lambda p: traced.mark("gradient", p.grad))
        traced.outside = "forward"
        optimizer.zero_grad()
        start = len(traced.trace.events)
        (weight.exp() * 2).sum().backward()
        optimizer.step()
        traced.end_step()
        end = len(traced.trace.events)
        optimizer.zero_grad()
        if repeated:
            traced.repeat(start, end)
            traced.end_step()
        else:
            (weight.exp() * 2).sum().backward()
            optimizer.step()
            traced.end_step()
    return traced


def test_what_an_optimizer_makes_and_keeps() -> None:
    trace = two_steps(repeated=False).trace
    kept = [block for block in trace.events if block.died is None and block.bytes == 200]
    assert [block.mark for block in kept] == ["parameter", None, "gradient"], "the momentum is the one without a mark"
    assert account(trace).bytes["optimizer"] == 200


def test_a_copied_step_is_the_one_that_would_have_been_taken() -> None:
    taken, copied = two_steps(repeated=False), two_steps(repeated=True)
    assert lives(copied) == lives(taken)
    assert copied.trace.backwards == taken.trace.backwards and len(taken.trace.backwards) == 2
    assert copied.trace.step_ends == taken.trace.step_ends
    assert account(copied.trace) == account(taken.trace)
