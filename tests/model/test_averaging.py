"""Models that change while they are trained: other heads, dtypes, backward that ends by an error, lent parameters."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import GradientError
from fullframe.model.averaging import Averaging
from tests.exactness import mesh, relative
from tests.rank_group import rank_group

STEPS = 4
Change = Callable[[nn.Module, int], None]


class Net(nn.Module):
    """A map, and a head of pooled values that never meets a split tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, stride=2, padding=1))
        self.mask = nn.Conv2d(4, 2, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.mask(x), self.head(x.mean((2, 3)))


def _other_heads(net: Any, step: int) -> None:
    if step == 2:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        net.mask, net.head = nn.Conv2d(4, 2, 1).double(), nn.Linear(4, 3).double()


def _doubled(net: Any, step: int) -> None:
    if step == 0:
        net.double()


def _there_and_back(net: Any, step: int) -> None:
    """Nothing of it is seen in a forward pass, but the parameters' ends of the graph are others."""
    if step == 1:
        net.float().double()
    if step == 3:
        net.head.float().double()


def _there_and_back_and_frozen(net: Any, step: int) -> None:
    """DDP is made anew in the very call that first meets a frozen part."""
    if step == 1:
        net.float().double()
    if step == 2:
        net.body[0].requires_grad_(False)


def _there_and_back_and_longer(net: Any, step: int) -> None:
    """DDP is made anew in the very call that first meets a layer, which is taken out in the next."""
    if step == 1:
        net.float().double()
    if step == 2:
        torch.manual_seed(7)
        net.body.append(nn.Conv2d(4, 4, 1).double())
    if step == 3:
        del net.body[-1]


def _an_error(net: Any, step: int) -> None:
    if step == 2:
        raised = count()

        def fail(module: nn.Module, given: Any, gradient: Any) -> None:
            if next(raised) == 0:
                raise ArithmeticError

        net.body[2].register_full_backward_hook(fail)


def _frozen_and_an_error(net: Any, step: int) -> None:
    """In the very pass in which the ranks would learn of it."""
    if step == 2:
        net.body[0].requires_grad_(False)
    _an_error(net, step)


def _unfrozen_inside(net: Any, step: int) -> None:
    if step == 0:
        net.body.requires_grad_(False)
        calls = count()
        net.body.register_forward_pre_hook(lambda body, given: body.requires_grad_(next(calls) >= 2) and None)


CHANGES: dict[str, Change] = {
    "heads": _other_heads,
    "dtype": _doubled,
    "there and back": _there_and_back,
    "there and back and frozen": _there_and_back_and_frozen,
    "there and back and longer": _there_and_back_and_longer,
    "an error": _an_error,
    "an error and parts": _an_error,
    "frozen and an error": _frozen_and_an_error,
    "unfrozen inside": _unfrozen_inside,
}


def _called(what: str, model: nn.Module, images: Tensor) -> Any:
    """With parameters that are halved for the call, or after a step of their own, as meta-learning does."""
    parameters = dict(model.named_parameters())
    if what == "lent":
        return torch.func.functional_call(model, {name: 0.5 * p for name, p in parameters.items()}, (images,))
    if what == "inner step":
        inner = model(images)[0].square().mean()
        gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True, materialize_grads=True)
        stepped = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        return torch.func.functional_call(model, stepped, (images,))
    return model(images)


def _trained(what: str, height: int | None, width: int = 1) -> list[Tensor]:
    """The parameters after some steps, and the losses, a mean over the replicas."""
    torch.manual_seed(0)
    net: Any = Net()
    if what != "dtype":
        net.double()
    on = None if height is None else mesh(height, width)
    model = net if on is None else ff.parallelize(net, on)
    assert on is None or isinstance(model._averaging, Averaging)
    losses = []
    for step in range(STEPS):
        if what in CHANGES:
            CHANGES[what](net, step)
            if "longer" not in what:
                assert isinstance(model.head, nn.Linear)  # who looks at a part shows it to the model before its call
        images = torch.randn(4, 2, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if on is not None:
            images = ff.shard(images.chunk(on.size(0))[on.get_local_rank("data")], on)
        mask, scores = _called(what, model, images)
        loss = mask.sin().mean() + scores.square().mean()
        model.zero_grad()
        try:
            loss.backward()
        except ArithmeticError:
            if "parts" not in what:
                continue
            body = model.body(images)
            loss = model.mask(body).sin().mean() + model.head(body.mean((2, 3))).square().mean()
            model.zero_grad()
            loss.backward()
        losses.append(loss.detach() / (1 if on is None else dist.get_world_size()))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad if parameter.requires_grad else 0.0
    told = torch.stack(losses)
    if on is not None:
        dist.all_reduce(told)
    return [*(parameter.detach() for parameter in net.parameters()), told]


@pytest.mark.parametrize("what", [*CHANGES, "lent", "inner step"])
def test_a_model_that_changes_trains_as_in_one_process(what: str) -> None:
    expected = _trained(what, None)
    height = 2 if what == "inner step" else 1  # on two replicas it would be a step of each one's own images
    for width in (2,) if what == "inner step" else (1, 2):
        for found in rank_group(4).run(_trained, what, height, width):
            assert max(map(relative, expected, found)) < 1e-10


def _by_turns(width: int | None) -> list[Tensor]:
    """Two models that share a body, trained by turns; in the end both were called before one backward pass."""
    torch.manual_seed(0)
    body = nn.Conv2d(2, 4, 3, padding=1)
    nets = [nn.Sequential(body, nn.Tanh(), nn.Conv2d(4, number, 3)).double() for number in (1, 2)]
    models: list[nn.Module] = list(nets) if width is None else [ff.parallelize(net, mesh(1, width)) for net in nets]
    image = torch.randn(2, 2, 6, 9, dtype=torch.float64)
    image = image if width is None else ff.shard(image, mesh(1, width))
    for step in range(6):
        net, model = nets[step % 2], models[step % 2]
        model.zero_grad()
        model(image).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    if width is not None:
        with pytest.raises(GradientError, match="2 parallel models that share a trained parameter"):
            sum(model(image).square().mean() for model in models).backward()  # type: ignore[union-attr]
    return [parameter.detach() for net in nets for parameter in net.parameters()]


def test_models_that_share_parameters_are_trained_by_turns() -> None:
    expected = _by_turns(None)
    for found in rank_group(2).run(_by_turns, 2):
        assert max(map(relative, expected, found)) < 1e-12


def _head_of_seed(net: Any, seed: int = 7) -> None:
    torch.manual_seed(seed)
    net.mask, net.head = nn.Conv2d(4, 2, 1).double(), nn.Linear(4, 3).double()


def _in_parts(what: str, width: int | None) -> list[Tensor]:
    """The parameters after steps in which parts of the model are called and never the whole."""
    torch.manual_seed(0)
    net: Any = Net().double()
    on = None if width is None else mesh(1, width)
    model: Any = net if on is None else ff.parallelize(net, on)
    net.body.requires_grad_(what != "unfrozen")
    for step in range(STEPS):
        if step == 2:
            if what == "unfrozen":
                net.body.requires_grad_(True)
            else:
                _head_of_seed(net, dist.get_rank() if what == "other seeds" else 7)
            if what.startswith("head alone"):
                net.body.requires_grad_(False)
            if what == "hook, of .module":
                net.head.weight.register_hook(torch.sign)
        images = torch.randn(4, 2, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if on is not None:
            images = ff.shard(images.chunk(on.size(0))[on.get_local_rank("data")], on)
        called = net if what.endswith(".module") else model
        features = called.body(images)
        loss = called.mask(features).sin().mean() + called.head(features.mean((2, 3))).square().mean()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def test_parts_of_a_model_train_what_is_new_as_in_one_process() -> None:
    for what in ("new heads", "unfrozen", "head alone"):
        expected = _in_parts(what, None)
        for width in (1, 2):
            for found in rank_group(4).run(_in_parts, what, width):
                assert max(map(relative, expected, found)) < 1e-10, (what, width)


def _refusals(width: int) -> list[str]:
    said = []
    for what in ("other seeds", "hook, of .module", "head alone, of .module"):
        with pytest.raises(GradientError) as raised:
            _in_parts(what, width)
        said.append(str(raised.value))
    return said


def test_what_only_parts_of_a_model_have_shown_is_refused_where_ranks_differ() -> None:
    for values, hooks, gradients in rank_group(2).run(_refusals, 1):
        assert values.startswith("mask.weight, mask.bias, head.weight, head.bias: trained only since")
        assert "each rank has drawn its own values" in values
        assert "their hooks have seen one rank's gradients" in hooks and "each rank has its own gradients" in gradients


def _cast_with_gradients(width: int | None) -> list[Tensor]:
    """Gradients of three passes, between which DDP is made anew, and the model cast there and back with the first's."""
    torch.manual_seed(0)
    net = Net().double()
    on = None if width is None else mesh(1, width)
    model = net if on is None else ff.parallelize(net, on)
    net.head.requires_grad_(False)
    for step in range(3):
        images = torch.randn(4, 2, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if on is not None:
            images = ff.shard(images.chunk(on.size(0))[on.get_local_rank("data")], on)
        mask, scores = model(images)
        (mask.sin().mean() + scores.square().mean()).backward()
        net.head.requires_grad_(True)
        model.train()
        model.float()
        model.double()
    return [parameter.grad for parameter in net.parameters()]  # type: ignore[misc]


def test_gradients_that_are_cast_with_the_model_are_added_to() -> None:
    expected = _cast_with_gradients(None)
    for width in (1, 2):
        for found in rank_group(4).run(_cast_with_gradients, width):
            assert max(map(relative, expected, found)) < 1e-6, width
