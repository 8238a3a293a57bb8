"""Full backward hooks of modules: they see and change one process's gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.spatial.module_hooks import Node
from tests.exactness import mesh, relative
from tests.rank_group import rank_group

Seen = list[Tensor | None]


class Scaled(nn.Module):
    """A split tensor and a whole one, in and out."""

    def __init__(self, again: bool):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.again = again

    def forward(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        conv: Any = (lambda x: checkpoint(self.conv, x, use_reentrant=False)) if self.again else self.conv
        return torch.relu(conv(x) * scales[:, None, None]), scales.sin()


class Network(nn.Module):
    def __init__(self, again: bool = False):
        super().__init__()
        self.scales = nn.Parameter(torch.randn(4))
        self.first, self.middle, self.last = nn.Conv2d(3, 4, 3, padding=1), Scaled(again), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, scales = self.middle(self.first(x), self.scales * 2)
        return (self.last(y.mean((2, 3)) * scales) ** 2).sum()


def whole(gradient: Tensor | None) -> Tensor | None:
    full = gradient.full() if isinstance(gradient, ff.SpatialTensor) else gradient
    return None if full is None else full.detach().clone()


def looks(network: Any, saw: Seen) -> None:
    for module in (network, network.first, network.middle, network.last):
        module.register_full_backward_hook(lambda _, before, after: saw.extend(map(whole, (*before, *after))))


def replaces(network: Any, saw: Seen) -> None:
    network.middle.register_full_backward_hook(lambda _, before, after: tuple(g * g for g in before))
    looks(network, saw)


def replaces_by_whole_ones(network: Any, saw: Seen) -> None:
    network.first.register_full_backward_pre_hook(lambda _, after: (whole(after[0]) * 3,))  # type: ignore[operator]
    looks(network, saw)


def changes_before(network: Any, saw: Seen) -> None:
    network.middle.register_full_backward_pre_hook(lambda _, after: (after[0].abs(), *after[1:]))
    looks(network, saw)


def writes(network: Any, saw: Seen) -> None:
    def double(_: nn.Module, before: Any, after: Any) -> None:
        before[0].mul_(2)

    network.middle.register_full_backward_hook(double)
    looks(network, saw)


def of_every_module(network: Any, saw: Seen) -> None:
    network.handle = nn.modules.module.register_module_full_backward_hook(
        lambda module, before, after: saw.extend(map(whole, after)) if isinstance(module, (nn.Conv2d, Scaled)) else None
    )


HOOKS: dict[str, Callable[[Any, Seen], None]] = {
    hooks.__name__: hooks
    for hooks in (looks, replaces, replaces_by_whole_ones, changes_before, writes, of_every_module)
}


def _ran(hooks: str, again: bool, shape: tuple[int, int] | None, x: Tensor) -> tuple[Seen, Seen]:
    torch.manual_seed(0)
    network: Any = Network(again).double()
    saw: Seen = []
    model = network if shape is None else ff.parallelize(network, mesh(*shape))
    HOOKS[hooks](network, saw)
    try:
        model(x if shape is None else ff.shard(x, mesh(*shape))).backward()
    finally:
        if hooks == "of_every_module":
            network.handle.remove()
    return saw, [p.grad for p in model.parameters()]


def _differences(shape: tuple[int, int], hooks: str) -> list[float]:
    worst = []
    for again in (False, True):
        for trained in (False, True):
            first = torch.randn(2, 3, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            second = first.clone().requires_grad_(trained)
            one = _ran(hooks, again, None, first.requires_grad_(trained))
            split = _ran(hooks, again, shape, second)
            pairs = [*zip(one[0] + one[1], split[0] + split[1], strict=True), (first.grad, second.grad)]
            assert len(one[0]) > 3
            assert all((a is None) == (b is None) for a, b in pairs)
            worst.append(max(relative(a, b) for a, b in pairs if a is not None and b is not None))
    return worst


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_get_and_give_one_process_s_gradients(hooks: str, shape: tuple[int, int]) -> None:
    for found in rank_group(shape[0] * shape[1]).run(_differences, shape, hooks):
        assert max(found) < 1e-12


def _hooked_alone() -> None:
    x = ff.shard(torch.randn(1, 3, 8, 8).requires_grad_(), mesh(1, 2))
    module = nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    assert isinstance(module(x).grad_fn, Node) and not isinstance((x * 2).grad_fn, Node)


def test_the_node_is_found_by_its_type() -> None:
    rank_group(2).run(_hooked_alone)


def _written_to() -> str:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3)
    model = ff.parallelize(nn.Sequential(conv, nn.ReLU(inplace=True)), mesh(1, 2))
    conv.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError) as caught:
        model(ff.shard(torch.randn(1, 3, 8, 8), mesh(1, 2)))
    return str(caught.value)


def test_what_left_such_a_module_is_not_written_to() -> None:
    for said in rank_group(2).run(_written_to):
        assert "is a view and is being modified inplace" in said
