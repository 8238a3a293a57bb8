"""Where gradients lie: what a user has put into `.grad` stays there, and gets the job's gradient."""

import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.model import gradient_memory
from fullframe.model.gradient_memory import Placed
from tests.exactness import mesh, relative
from tests.rank_group import rank_group


def test_what_torch_has_made_is_nobodys_until_someone_holds_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    placed = Placed()
    weight.grad = torch.zeros(3)
    made = weakref.ref(weight.grad)
    placed.remember([weight])
    placed.note([weight])
    weight.grad = torch.ones(3)  # as DDP does
    placed.give_back()
    assert weight.grad is not made()
    held = weight.grad
    placed.note([weight])
    weight.grad = torch.full((3,), 2.0)
    placed.give_back()
    assert weight.grad is held and held.sum() == 6
    weight.grad = own = torch.zeros(3)
    placed.note([weight])
    weight.grad = torch.ones(3)
    placed.give_back()
    assert weight.grad is own and own.sum() == 3


def test_a_view_is_seen_beside_gradients_that_someone_holds_in_the_same_memory() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    placed = Placed()
    parameters[0].grad, parameters[1].grad = torch.zeros(6).split(3)
    placed.remember(parameters)
    held = parameters[0].grad
    placed.note(parameters)
    placed.give_back()
    view = parameters[1].grad.view(3, 1)  # type: ignore[union-attr]
    placed.note(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    placed.give_back()
    assert parameters[0].grad is held
    assert view.sum() == 3


def _fail(*of_hook: Any) -> None:
    raise ArithmeticError


def _something_between(model: nn.Module, net: nn.Sequential, image: Tensor, what: str) -> None:
    """A forward pass without a graph, or a pass that ends by an error, forward or backward."""
    failing = {"forward": net[1].register_forward_hook, "backward": net[1].register_full_backward_hook}
    hook = failing[what](_fail) if what in failing else None
    with suppress(ArithmeticError), torch.set_grad_enabled(hook is not None):
        loss = model(image).square().mean()
        if hook is not None:
            loss.backward()
    if hook is not None:
        hook.remove()
        model.zero_grad(set_to_none=False)  # of the layers that backward has come to


def _in_one_tensor(width: int | None, held: str, between: str) -> list[Tensor]:
    """All gradients after each of four steps, of which every second has two backward passes.

    They are pieces of one tensor, or what torch has made in the first pass and is `held` from then on, or views of it
    are. The first layer is trained again after a step in which it is frozen.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)).double()
    model = net if width is None else ff.parallelize(net, mesh(1, width))
    gradients = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    pieces = gradients.split([p.numel() for p in net.parameters()])
    for parameter, piece in zip(net.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    if held:
        model.zero_grad()
    found = []
    for step in range(4):
        if between:
            image = torch.ones(1, 2, 6, 9, dtype=torch.float64)
            _something_between(model, net, image if width is None else ff.shard(image, mesh(1, width)), between)
        net[0].requires_grad_(step != 2)
        for piece in pieces:
            piece.zero_()
        for number in range(1 + step % 2):
            image = torch.randn(1, 2, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step + number))
            model(image if width is None else ff.shard(image, mesh(1, width))).square().mean().backward()
            if held and step == 0:
                pieces = [parameter.grad for parameter in net.parameters()]
                if held == "by views":
                    pieces = [piece.view(-1) for piece in pieces]
        found += [piece.clone() for piece in pieces]
        with torch.no_grad():
            for parameter, piece in zip(net.parameters(), pieces, strict=True):
                parameter -= piece.view_as(parameter)
    return found


@pytest.mark.parametrize("between", ["", "evaluation", "forward", "backward"])
@pytest.mark.parametrize("held", ["", "themselves", "by views"])
def test_gradients_that_are_pieces_of_one_tensor_or_are_held(held: str, between: str) -> None:
    expected = _in_one_tensor(None, held, between)
    for found in rank_group(2).run(_in_one_tensor, 2, held, between):
        assert max(map(relative, expected, found)) < 1e-12


def _kept(width: int | None, what: str) -> list[Tensor]:
    """What is kept of gradients, and all gradients, after a step that follows `what`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 1)).double()
    model = net if width is None else ff.parallelize(net, mesh(1, width))
    image = torch.randn(1, 2, 6, 9, dtype=torch.float64)
    image = image if width is None else ff.shard(image, mesh(1, width))
    kept: list[Any] = []
    if what == "made anew in an evaluation after an error":
        _something_between(model, net, image, "backward")
        with torch.no_grad():
            model.eval()(image)
        model.train()
        kept = [parameter.grad for parameter in net[2].parameters()]
        model.zero_grad()
    else:
        for _ in range(2):
            model(image).square().mean().backward()
    if what == "exchanged":
        net[0].bias.grad, net[2].bias.grad = net[2].bias.grad, net[0].bias.grad
    if what == "with other memory":
        net[0].weight.grad.data = net[0].weight.grad * 0.5
        kept = [net[0].weight.grad.detach()]
    if "error" not in what:
        model.zero_grad(set_to_none=False)
    model(image).square().mean().backward()
    return [tensor.clone() for tensor in (*kept, *(p.grad for p in net.parameters()))]


@pytest.mark.parametrize("what", ["made anew in an evaluation after an error", "exchanged", "with other memory"])
def test_what_is_kept_of_gradients_after(what: str) -> None:
    expected = _kept(None, what)
    for found in rank_group(2).run(_kept, 2, what):
        assert max(map(relative, expected, found)) < 1e-12


def test_a_message_holds_one_dtype_and_ends_where_it_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_memory, "_CHUNK_NUMBERS", 5)
    sizes = [(3, torch.float32), (3, torch.float32), (1, torch.float32), (2, torch.float64), (2, torch.float64)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    found = list(gradient_memory.chunks(parameters))
    assert [[len(p) for p in chunk] for chunk in found] == [[3, 3], [1], [2, 2]]
    assert [p for chunk in found for p in chunk] == parameters
