"""Gradients of gradients are one process's: of every rule's cases, of penalties, inner steps and Hessian products.

Third ones are not promised; torch's own, through its batch, instance and layer norm, are not those of the formula.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.spatial.rules.normalization import OverReplicas
from fullframe.spatial.second_derivative import gradients_of
from fullframe.techniques.recompute import recompute
from tests.exactness import mesh, relative
from tests.rank_group import rank_group
from tests.spatial.by_hand import all_as_in_one_process, drawn, gradients, image, whole
from tests.spatial.cases import MESHES, Case, all_cases, every_fourth, one

TOLERANCE = 1e-10
WITHOUT = {
    "attention: multi-head attention": "torch's own kernel has no second derivative",
    "moments: vector norm of order 0": "the sine of thousands: one digit of the input is six of the result",
    "reduction: prod, nansum, nanmean": "products of billions; small ones are below",
}
MORE: dict[str, Case] = {
    "prod": one(lambda x: [(x * 0.1 + 1).prod(3), (x * 0.1).cos().prod()]),
    "prod around a zero": one(lambda x: [(x * 0.1 + 1 - (x * 0.1 + 1)[..., :1]).prod(3)]),
    "conv over joined rows": Case(lambda x, w: F.conv2d(x, w, None, 2, 4, 2, 2), whole=((6, 2, 5, 5),)),
    "conv1d": Case(lambda x, w: F.conv1d(x.mean(2), w, padding=2), whole=((2, 4, 5),)),
    "batch_norm, evaluation": Case(
        lambda x, w, b: F.batch_norm(x, torch.ones(4).double(), torch.ones(4).double() * 2, w, b), whole=((4,), (4,))
    ),
    "batch_norm of small numbers": one(lambda x: F.batch_norm(x * 1e-4 + 5, None, None, training=True)),
    "group_norm, one group": Case(lambda x, w, b: F.group_norm(x, 1, w, b), whole=((4,), (4,))),
    "instance_norm": Case(lambda x, w, b: F.instance_norm(x, None, None, w, b), whole=((4,), (4,))),
    "rms_norm over the image": Case(
        lambda x, w: F.rms_norm(x, tuple(w.shape), w), whole=((11, 37),), sizes=((11, 37),)
    ),
    "max_pool1d": one(lambda x: F.max_pool1d(x.mean(2), 3, 2, 1)),
    "std and var": one(lambda x: [x.std((2, 3)), x.var(3), x.std(), torch.logsumexp(x, 3)]),
    "bicubic": one(lambda x: F.interpolate(x, size=(9, 23), mode="bicubic", align_corners=True)),
}


def _measured(t: Tensor) -> Tensor:
    """A number that depends on every element, and in no linear way."""
    t = (t * t.conj()).real if t.is_complex() else t
    return (t.sin() * torch.linspace(-1, 1, t.numel(), dtype=torch.float64).cos().view(t.shape)).sum()


def _both(case: Case, on: DeviceMesh | None, order: int = 2) -> list[Tensor]:
    """First and second derivatives, or more, by all operands."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    split = [torch.randn((*lead, *case.sizes[-1]), generator=generator, dtype=torch.float64) for lead in case.split]
    leaves = [_on(on, t).requires_grad_() for t in split]
    leaves += [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in case.whole]
    outputs = [t for t in tree_leaves(case.op(*leaves)) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        return []
    value: Any = sum(map(_measured, outputs))
    found: list[Tensor] = []
    for left in reversed(range(order)):
        by_leaf = torch.autograd.grad(value, leaves, create_graph=left > 0, allow_unused=True)
        found += [torch.zeros(0) if g is None else whole(g) for g in by_leaf]
        value = value + 0.1 * sum(_measured(g) for g in by_leaf if left and g is not None)
    return found


def _swept(height: int, width: int, every: int) -> dict[str, float]:
    found = {}
    for name, case in {**all_cases(every), **MORE}.items():
        if name not in WITHOUT:
            try:
                here = _both(case, None)
            except (RuntimeError, NotImplementedError):
                continue  # plain torch has none
            there = _both(case, mesh(height, width))
            found[name] = max([float(len(here) != len(there)), *map(relative, here, there)])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(  # the smaller meshes' borders are among theirs
    ("height", "width"), [pytest.param(2, 2, marks=pytest.mark.further), (1, 3)]
)
@every_fourth
def test_every_rule_s_second_derivative(height: int, width: int, every: int) -> None:
    for found in rank_group(height * width).run(_swept, height, width, every, timeout_seconds=900):
        assert len(found) > 450 / every
        assert not {name: error for name, error in found.items() if not error <= TOLERANCE}


THIRD = ("composed: select_scatter", "composed: slice_scatter", "indexing: write into slices")


def _thirds(height: int, width: int) -> list[float]:
    cases = [all_cases()[name] for name in THIRD]
    pairs = [(_both(case, None, 3), _both(case, mesh(height, width), 3)) for case in cases]
    return [max(map(relative, *pair)) for pair in pairs]


@pytest.mark.parametrize(("height", "width"), [(2, 2), (1, 3)])
def test_third_derivatives_of_writes_by_ranks_that_own_none_of_the_rows(height: int, width: int) -> None:
    for errors in rank_group(height * width).run(_thirds, height, width):
        assert max(errors) <= TOLERANCE


def _on(on: DeviceMesh | None, image: Tensor) -> Tensor:
    return image.clone() if on is None else ff.shard(image, on)


class Critic(nn.Module):
    """Something of everything: strided, grouped and transposed convolutions, norms, pooling, resizing, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.batch = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.down, self.group = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 6)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1)
        self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.leaky_relu(self.batch(self.stem(x)), 0.2), 3, 1, 1)
        x = F.interpolate(self.up(F.silu(self.group(self.down(x)))), scale_factor=2, mode="bilinear")
        x = x * torch.sigmoid(self.gate(x.mean((2, 3)))).view(-1, 4, 1, 1)
        return self.head(x.sin().mean((2, 3)))  # type: ignore[no-any-return]


def _critic(on: DeviceMesh | None) -> tuple[Any, Critic]:
    torch.manual_seed(0)
    net = Critic().double()
    return (net if on is None else ff.parallelize(net, on)), net


def _wasserstein(on: DeviceMesh | None) -> list[Tensor]:
    """WGAN-GP: the norm of each image's gradient should be 1."""
    model, net = _critic(on)
    x = _on(on, image()).requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    ((g.flatten(1).norm(2, 1) - 1).square().mean() * 10 + out.mean()).backward()
    return [whole(g), whole(x.grad), *gradients(net)]


def _whole_leaf(on: DeviceMesh | None) -> list[Tensor]:
    """R1, of a tensor that is split on its way, in evaluation."""
    model, net = _critic(on)
    model.eval()
    t = image().requires_grad_()
    out = model(_on(on, t))
    (g,) = torch.autograd.grad(out.sum(), t, create_graph=True)
    (g.square().sum() * 3 + out.mean()).backward()
    return [whole(g), whole(t.grad), *gradients(net)]


def _of_parameters(on: DeviceMesh | None) -> list[Tensor]:
    """A penalty on the gradient of a model's parameters."""
    model, net = _critic(on)
    x = _on(on, image()).requires_grad_()
    out = model(x).square().mean()
    found = torch.autograd.grad(out, list(net.parameters()), create_graph=True)
    (sum(g.square().sum() for g in found) * 3 + out).backward()
    return [*map(whole, found), whole(x.grad), *gradients(net)]


def _hessian_product(on: DeviceMesh | None) -> list[Tensor]:
    model, net = _critic(on)
    parameters = list(net.parameters())
    found = torch.autograd.grad(model(_on(on, image())).square().mean(), parameters, create_graph=True)
    product: Any = sum((g * drawn(*g.shape)).sum() for g in found)
    return [whole(g) for g in torch.autograd.grad(product, parameters)]


def _inner_steps(on: DeviceMesh | None) -> list[Tensor]:
    """Through two steps down an energy."""
    model, net = _critic(on)
    x = _on(on, image()).requires_grad_()
    z = x
    for _ in range(2):
        (g,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
        z = z - 0.1 * g
    model(z).mean().backward()
    return [whole(x.grad), *gradients(net)]


def _fast_weights(on: DeviceMesh | None) -> list[Tensor]:
    """MAML: through a step of the parameters, which belong to no parallel model."""
    torch.manual_seed(0)
    net = Critic().double().eval()
    x, parameters = _on(on, image()), dict(net.named_parameters())
    loss = torch.func.functional_call(net, parameters, (x,)).square().mean()
    found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), found, strict=True)}
    torch.func.functional_call(net, fast, (x.flip(1),)).square().mean().backward()
    return gradients(net)


def _seeds(on: DeviceMesh | None) -> list[Tensor]:
    """A map's gradients by seeds, whole and split, that are differentiated by."""
    found = []
    for seed in (image().requires_grad_(), _on(on, image()).requires_grad_()):
        x, w = _on(on, image()).requires_grad_(), drawn(3, 3, 3, 3).requires_grad_()
        y = F.conv2d(x, w, padding=1).sin()
        g, of_weight = torch.autograd.grad(y, [x, w], seed, create_graph=True)
        (g.square().mean() + of_weight.sin().sum()).backward()
        found += [g, of_weight, seed.grad, w.grad, x.grad]
    return list(map(whole, found))


def _backward_twice(on: DeviceMesh | None) -> list[Tensor]:
    """`backward(create_graph=True)`: the gradients of leaves, and of a map that keeps its own."""
    x, w = _on(on, image()).requires_grad_(), drawn(4, 3, 3, 3).requires_grad_()
    h = F.conv2d(x, w, padding=1)
    h.retain_grad()
    F.instance_norm(h).sin().mean((2, 3)).square().sum().backward(create_graph=True)
    assert x.grad is not None and w.grad is not None and h.grad is not None
    penalty = h.grad.square().sum() + w.grad.square().sum() + x.grad.sin().sum()
    found = [whole(t.grad) for t in (h, w, x)]
    x.grad = w.grad = None
    penalty.backward()
    return [*found, whole(w.grad), whole(x.grad)]


def _hooks(on: DeviceMesh | None) -> list[Tensor]:
    x, w, kept = _on(on, image()).requires_grad_(), drawn(4, 3, 3, 3).requires_grad_(), []
    h = F.conv2d(x, w, padding=1)

    def hook(g: Tensor) -> Tensor:
        kept.append(g)
        return g * g.square().sum()

    h.register_hook(hook)
    (g,) = torch.autograd.grad(h.sin().square().sum(), x, create_graph=True)
    (g.sin().sum() + kept[0].cos().sum()).backward()
    return [whole(g), whole(w.grad), whole(x.grad)]


def _mixed(on: DeviceMesh | None) -> list[Tensor]:
    """Of two split tensors, one of which is not split over the width; a parameter of no model."""
    x, scale = _on(on, image()).requires_grad_(), nn.Parameter(drawn(3, 1, 1))
    rows = _on(on, image()).detach().mean(3).requires_grad_()
    out = (F.softmax(x * scale, 3) * rows.unsqueeze(3)).amax(2).square().sum()
    found = torch.autograd.grad(out, [x, rows, scale], create_graph=True)
    sum(g.sin().sum() for g in found).backward()  # type: ignore[union-attr]
    return list(map(whole, (*found, x.grad, rows.grad, scale.grad)))


def _recomputed(on: DeviceMesh | None) -> list[Tensor]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(4, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(3, 1, 1))
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), block, nn.Conv2d(4, 2, 3)).double()
    if on is not None:
        recompute(net, ["1"])
    x = _on(on, image()).requires_grad_()
    out = (net if on is None else ff.parallelize(net, on))(x).sin().sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    (g.square().sum() + out).backward()
    return [whole(g), whole(x.grad), *gradients(net)]


def _linear(on: DeviceMesh | None) -> list[Tensor]:
    """The gradient of a linear network does not depend on the image, which gets none of a penalty, or zeros."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 4, 3, bias=False))
    net, x = net.double(), _on(on, image()).requires_grad_()
    out = (net if on is None else ff.parallelize(net, on))(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    g.square().sum().backward(retain_graph=True)
    nothing = [x.grad, *torch.autograd.grad(g.square().sum(), x, allow_unused=True)]
    return [whole(g), *gradients(net), *(torch.zeros(2, 3, 9, 13) if t is None else whole(t).float() for t in nothing)]


CASES: list[Callable[[DeviceMesh | None], list[Tensor]]] = [
    _wasserstein,
    _linear,
    _whole_leaf,
    _of_parameters,
    _hessian_product,
    _inner_steps,
    _fast_weights,
    _seeds,
    _backward_twice,
    _hooks,
    _mixed,
    _recomputed,
]

test_penalties_are_those_of_one_process = all_as_in_one_process(CASES, MESHES)


def _of_replicas() -> list[float]:
    """A penalty with batch norm over two replicas of two ranks, each with an image of its own."""
    on, images = mesh(1, 2), [drawn(2, 3, 9, 13, seed=seed) for seed in (1, 2)]
    mine = on.get_local_rank("data")
    found = []
    for x in (torch.cat(images).requires_grad_(), ff.shard(images[mine], on).requires_grad_()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3))
        model = ff.parallelize(net.double(), on) if found else net.double()
        with OverReplicas(2) if found else nullcontext():
            out = model(x).sin().sum()
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        (g.square().sum() * 0.1 + out).backward()
        found.append([whole(g), whole(x.grad), *gradients(net)])
    here = [t.chunk(2)[mine] for t in found[0][:2]] + [t / 2 for t in found[0][2:]]  # DDP takes the replicas' mean
    return list(map(relative, here, found[1]))


def test_batch_norm_over_replicas() -> None:
    for errors in rank_group(4).run(_of_replicas):
        assert max(errors) < TOLERANCE


def test_only_needed_gradients_are_made_and_hooks_are_not_run() -> None:
    x, w = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    x.register_hook(lambda g: g * 100)
    gradient, none = gradients_of(lambda x, w: x**3 * w, [x, w], torch.tensor(5.0), [True, False])
    assert none is None and gradient is not None and gradient.item() == 3 * 3**2 * 2 * 5
    (second,) = torch.autograd.grad(gradient, w)
    assert second.item() == 3 * 3**2 * 5
