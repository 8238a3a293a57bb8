"""Gradients that users reach by hand are one process's: of inputs, weights and maps, in hooks and outside the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fullframe as ff
from fullframe.ranks.channel import channel_of
from fullframe.ranks.groups import group_of_all
from fullframe.spatial.gradients import graph_behind
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group
from tests.spatial.by_hand import Case, all_as_in_one_process, drawn, gradients, image, whole

MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]


def _on(on: DeviceMesh | None, image: Tensor) -> Tensor:
    return image if on is None else ff.shard(image, on)


class Net(nn.Module):
    """Convolutions, a gate from a mean, a head on whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.mix(F.gelu(self.stem(x)))
        return x * torch.sigmoid(self.gate(x.mean((2, 3)))).view(-1, 4, 1, 1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).sin().mean((2, 3)))  # type: ignore[no-any-return]


class Maps(Net):
    """Gives the features, split."""

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) + self.head.weight.sum() + self.head.bias.sum()


def _net(on: DeviceMesh | None, build: type[nn.Module] = Net, **options: Any) -> tuple[Any, Any]:
    """The model as it is called, and the user's own."""
    torch.manual_seed(0)
    net = build().double()
    return (net if on is None else ff.parallelize(net, on, **options)), net


def _leaf(on: DeviceMesh | None) -> list[Tensor]:
    x = _on(on, image()).requires_grad_()
    assert x.is_leaf and x.requires_grad and not (x * 1).is_leaf
    found = []
    for _ in range(2):
        (x.mean((2, 3)) * x.sin().mean((2, 3))).sum().backward()
        assert x.grad is not None
        found.append(whole(x.grad))  # the second is added
    x.grad.mul_(3)
    found.append(whole(x.grad))
    x.grad = None
    assert x.grad is None
    x.requires_grad_(False)
    x.requires_grad = True
    x.mean().square().backward()
    return [*found, whole(x.grad)]


def _split_over_one_axis(on: DeviceMesh | None) -> list[Tensor]:
    rows = _on(on, image()).detach().mean(3).requires_grad_()  # on 2x2 two ranks have the same
    (rows.sin() * drawn(2, 3, 9)).sum().square().backward()
    return [whole(rows.grad)]


def _whole_leaf(on: DeviceMesh | None) -> list[Tensor]:
    t = image().requires_grad_()
    _on(on, t).sin().mean().square().backward()
    return [whole(t.grad)]


def _optimised_image(on: DeviceMesh | None) -> list[Tensor]:
    found = []
    for build in (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5), lambda p: torch.optim.Adam(p, lr=0.1)):
        x = nn.Parameter(_on(on, image()))
        optimizer = build([x])
        for _ in range(3):
            optimizer.zero_grad()
            (x[..., 1:] - x[..., :-1]).square().mean().backward()
            optimizer.step()
        found.append(whole(x))
    return found


def _outside(on: DeviceMesh | None) -> list[Tensor]:
    """Parameters that no model holds, and what is computed from them, beside split tensors."""
    table, scale = nn.Parameter(drawn(1, 3, 1, 13)), nn.Parameter(drawn(1))
    plain = drawn(3, 1, 1).requires_grad_()
    seen: list[Tensor] = []
    x = _on(on, image())
    gate = torch.sigmoid(x.mean((2, 3)) * scale)
    gate.register_hook(lambda g: seen.append(g.clone()))
    gate.retain_grad()
    standard = table / table.norm()
    loss = ((x * gate[..., None, None] + standard) * plain).sin().mean() + scale.square().sum()
    loss.backward()
    return [table.grad, scale.grad, plain.grad, gate.grad, *seen]  # type: ignore[list-item]


def _cat_and_where(on: DeviceMesh | None) -> list[Tensor]:
    w = image(3).requires_grad_()
    x = _on(on, image())
    loss = torch.cat([x, w * 2], 1).sin().mean() + torch.where(x > 0, x, w).cos().mean()
    return [*torch.autograd.grad(loss, w)]


def _asked_for(on: DeviceMesh | None) -> list[Tensor]:
    """`autograd.grad`: of weights, split leaves and maps; a norm of it in the loss."""
    model, net = _net(on)
    x = _on(on, image()).requires_grad_()
    y = x.sin()
    loss = model(y).square().mean() + 0.1 * y.mean()
    wanted = [net.mix.weight, net.head.weight, x, y]
    found = torch.autograd.grad(loss, wanted, retain_graph=True)
    (loss * found[0].norm()).backward()
    rows = y.mean(3)
    (of_rows,) = torch.autograd.grad(rows.sin().sum(), rows)
    return [whole(g) for g in (*found, x.grad, of_rows)] + gradients(net)


def _seeded(on: DeviceMesh | None) -> list[Tensor]:
    """Backward from a split map: the seed whole or split."""
    found = []
    for kind in range(5):
        w, x = nn.Parameter(drawn(4, 3, 3, 3)), _on(on, image()).requires_grad_()
        y, seed = F.conv2d(x, w, padding=1), drawn(2, 4, 9, 13)
        if kind == 0:
            y.backward(seed)
        elif kind == 1:
            y.backward(gradient=_on(on, seed), retain_graph=True)
        elif kind == 2:
            torch.autograd.backward([y, y.mean()], [seed, None])
        elif kind == 3:
            y.mean().square().backward(inputs=[x, w])
        else:
            z = y.mean(3)
            x.grad, w.grad = torch.autograd.grad([z, y], [x, w], grad_outputs=[seed[..., 0], seed])
        found += [whole(x.grad), whole(w.grad)]
    return found


def _kept_of_maps(on: DeviceMesh | None) -> list[Tensor]:
    """`retain_grad` and hooks of split maps; a hook's result goes on."""
    x = _on(on, image()).requires_grad_()
    seen: list[Tensor] = []
    x.register_hook(lambda g: seen.append(whole(g)))
    y = x.sin()
    y.retain_grad()
    assert y.retains_grad and not x.retains_grad
    y.register_hook(lambda g: g.clamp(-0.001, 0.002))
    rows = (y * 2).mean(2)
    rows.retain_grad()
    rows.register_hook(lambda g: g + drawn(2, 3, 13) * 0.01)
    last: list[Tensor] = []
    x.register_post_accumulate_grad_hook(lambda leaf: last.append(whole(leaf.grad)))
    (rows.square().mean() * y.mean()).backward()
    return [whole(x.grad), whole(y.grad), whole(rows.grad), *seen, *last]


def _kept_of_what_is_written_to(on: DeviceMesh | None) -> list[Tensor]:
    """As torch does, `retain_grad` keeps the gradient of what is written in place since: a feature map under a ReLU."""
    x = _on(on, image()).requires_grad_()
    relu, part, view = x.sin(), x.cos(), (x * 2)[..., 2:5]
    for kept in (relu, part, view):
        kept.retain_grad()
    F.relu_(relu)
    part[..., 3:7] *= 3
    view.mul_(2)
    (relu * drawn(9, 13) + part.square()).sum().backward(retain_graph=True)
    found = [whole(part.grad)]
    (part.square().sum() + view.square().sum()).backward()
    return [*found, *(whole(kept.grad) for kept in (x, relu, part, view))]


def _of_views_of_all_rows(on: DeviceMesh | None) -> list[Tensor]:
    """A view of all rows has hooks and a gradient of its own; what torch gives back as it is has its operand's."""
    found: list[Tensor] = []
    for view in (
        lambda x: x.narrow(2, 0, 9), lambda x: x.narrow(-1, 0, 13), lambda x: x.flatten(2, 2),
        lambda x: torch.broadcast_tensors(x, x)[0], lambda x: torch.broadcast_tensors(x, x[:, :1])[0],
    ):  # fmt: skip
        x = _on(on, image()).requires_grad_()
        y = x.sin()
        part = view(y)
        part.register_hook(lambda g: g * 2)
        loss = (part * drawn(9, 13)).sum() + y.square().sum()
        found += map(whole, torch.autograd.grad(loss, [x, y, part], retain_graph=True))
        part.mul_(3)
        found.append(whole(y))
    return found


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-2, 1e-2)


def _hooks_of_parameters(on: DeviceMesh | None) -> list[Tensor]:
    """Clamped and normalised, registered before the model is parallelized and after it."""
    torch.manual_seed(0)
    net = Net().double()
    net.stem.weight.register_hook(lambda g: g / g.norm())
    model = net if on is None else ff.parallelize(net, on)
    net.mix.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    net.head.weight.register_post_accumulate_grad_hook(_clamp)
    model(_on(on, image())).square().mean().backward()
    return gradients(net)


def _gathered(on: DeviceMesh | None) -> list[Tensor]:
    """What has no rule runs whole: hooks see the same there, and functions with a backward of their own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Clamped()).double()
    model = net if on is None else ff.parallelize(net, on, unsupported="gather")
    seen: list[Tensor] = []
    out = model(_on(on, image()))
    out.register_hook(lambda g: g * 100)
    out.register_hook(lambda g: seen.append(whole(g)))
    out.square().mean().backward()
    return [*seen, *gradients(net)]


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.1, 0.1)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Clamp.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def _twice_differentiated(on: DeviceMesh | None) -> list[Tensor]:
    """A penalty on the gradient of the image, where every exchange is linear."""
    w = nn.Parameter(drawn(3, 1, 1))
    x = _on(on, image()).requires_grad_()
    y = ((x * w).sin() + x.mean() ** 2)[..., 2:11]
    (g,) = torch.autograd.grad((y * y).mean(), x, create_graph=True)
    (g.square().sum() * 100 + y.mean()).backward()
    return [whole(g), w.grad, whole(x.grad)]  # type: ignore[list-item]


def _two_losses(on: DeviceMesh | None) -> list[Tensor]:
    """A backward pass for each loss of one forward pass, and for each of two forward passes."""
    model, net = _net(on, Maps)
    out = model(_on(on, image()))
    out.square().mean().backward(retain_graph=True)
    out.sin().mean().backward()
    found = gradients(net)
    first, second = model(_on(on, image())), model(_on(on, image(2)))
    first.mean().backward()
    second.mean().square().backward()
    return found + gradients(net)


def _one_then_some(on: DeviceMesh | None) -> list[Tensor]:
    """A second loss that reaches some of the parameters."""
    model, net = _net(on)
    x = _on(on, image())
    model(x).square().mean().backward()
    net.features(x).sin().mean().backward()
    net.head(x.mean((2, 3))[:, [0, 1, 2, 0]]).square().mean().backward()
    return gradients(net)


def _unfrozen(on: DeviceMesh | None) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net().double()
    net.stem.requires_grad_(False)
    model = net if on is None else ff.parallelize(net, on)
    x, found = _on(on, image()), list[Tensor]()
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: net.stem.requires_grad_(True),
        lambda: net.head.requires_grad_(False),
        lambda: net.requires_grad_(False),
        lambda: net.head.requires_grad_(True),
        lambda: setattr(net, "gate", nn.Linear(4, 4).double()),
    ]
    for change in changes:
        torch.manual_seed(3)
        change()
        net.zero_grad()
        loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
        found += gradients(net)
    return found


def _past_the_wrapper(on: DeviceMesh | None) -> list[Tensor]:
    model, net = _net(on)
    for called in (net, net, model, net):
        called(_on(on, image())).square().mean().backward()
    return gradients(net)


def _kept_by_reference(on: DeviceMesh | None) -> list[Tensor]:
    """Gradients, and views of them, that are kept while the next are computed; also after the forward pass."""
    model, net = _net(on)
    kept: list[Tensor] = []
    for step in range(5):
        loss = model(_on(on, image(step))).square().mean()
        if step % 2 == 0:
            kept += [p.grad.view(-1) if step > 2 else p.grad for p in net.parameters() if p.grad is not None]
        net.zero_grad(set_to_none=True)
        loss.backward()
        if step % 2:
            kept += [p.grad for p in net.parameters()][:2]
    return [*kept, *gradients(net)]


@dataclass
class Result:
    out: Tensor
    name: str = "result"


class InAnObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return {"result": Result(self.features(x))}


def _in_an_object(on: DeviceMesh | None) -> list[Tensor]:
    options = {} if on is None else {"find_unused_parameters": True}
    model, net = _net(on, InAnObject, **options)
    for _ in range(2):
        model(_on(on, image()))["result"].out.square().mean().backward()
    return gradients(net)


def _penalised_convolutions(on: DeviceMesh | None) -> list[Tensor]:
    """A discriminator with a penalty on its gradient (R1): strided, padded and dilated convolutions, pooling."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.AvgPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)
    ).double()
    model = net if on is None else ff.parallelize(net, on)
    x = _on(on, image()).requires_grad_()
    out = model(x).tanh().square().mean()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    (out + g.square().sum() * 100).backward()
    return [whole(g), whole(x.grad), *gradients(net)]


CASES: list[Case] = [
    _leaf,
    _split_over_one_axis,
    _whole_leaf,
    _optimised_image,
    _outside,
    _cat_and_where,
    _asked_for,
    _seeded,
    _kept_of_maps,
    _kept_of_what_is_written_to,
    _of_views_of_all_rows,
    _hooks_of_parameters,
    _gathered,
    _twice_differentiated,
    _penalised_convolutions,
    _two_losses,
    _one_then_some,
    _unfrozen,
    _past_the_wrapper,
    _kept_by_reference,
    _in_an_object,
]

test_what_is_seen_is_one_process_s = all_as_in_one_process(CASES, MESHES)


def test_each_node_of_a_graph_is_met_once_and_none_beyond_a_target() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert len(list(graph_behind([(y + y).grad_fn, y.grad_fn, None]))) == 3  # add, mul, accumulate
    assert list(graph_behind([y.grad_fn], until={y.grad_fn})) == [y.grad_fn]


def _nodes() -> tuple[bool, ...]:
    x = ff.shard(image(), mesh(1, 2)).requires_grad_()
    y, bare = x * 2, (x * 2).local.grad_fn
    node = y.grad_fn
    own = y.local.grad_fn
    return node == y.grad_fn, node == own, node != bare, {node: 1}[y.grad_fn] == 1, repr(node) == repr(own)


def test_a_split_tensor_s_node_is_the_same_one_each_time() -> None:
    assert rank_group(2).run(_nodes) == [(True,) * 5] * 2


def _of_replicas() -> dict[str, float]:
    """Two replicas of two ranks, each with an image of its own: parameters get the mean, whoever holds them."""
    on = mesh(1, 2)
    mine = on.get_local_rank("data")
    return {
        name: max(map(relative, case(None, [image(0), image(1)]), case(on, [image(mine)])))
        for name, case in REPLICAS.items()
    }


def _steps(on: DeviceMesh | None, images: list[Tensor]) -> list[Tensor]:
    """Two losses of one forward pass, a layer unfrozen, a hook, the model past its wrapper, a head alone."""
    model, net = _net(on, Maps)
    net.mix.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3) if len(images) == 0 else g)
    net.stem.weight.requires_grad_(False)
    for _ in range(2):
        outs = [model(_on(on, image)) for image in images]
        sum(out.square().mean() / len(images) for out in outs).backward(retain_graph=True)  # type: ignore[union-attr]
        sum(out.sin().mean() / len(images) for out in outs).backward()  # type: ignore[union-attr]
        net.stem.weight.requires_grad_(True)
    for one in images:
        (net(_on(on, one)).cos().mean() / len(images)).backward()
    features = torch.stack([one.mean() * torch.ones(4, dtype=torch.float64) for one in images])
    net.head(features).square().mean().backward()
    return gradients(net)


def _criterion(on: DeviceMesh | None, images: list[Tensor]) -> list[Tensor]:
    weight, bias = nn.Parameter(drawn(3, 1, 1)), nn.Parameter(drawn(1))
    maps = [_on(on, image) for image in images]
    sum(((x * weight).sin().mean() + (x.mean() * bias).square().sum()) / len(images) for x in maps).backward()  # type: ignore[union-attr]
    (sum((x + bias).square().mean() / len(images) for x in maps)).backward()  # type: ignore[union-attr]
    return [weight.grad]  # type: ignore[list-item]


def _clamped(on: DeviceMesh | None, images: list[Tensor]) -> list[Tensor]:
    model, net = _net(on)
    net.mix.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    sum(model(_on(on, image)).square().mean() / len(images) for image in images).backward()  # type: ignore[union-attr]
    return gradients(net)


REPLICAS: dict[str, Callable[..., list[Tensor]]] = {"steps": _steps, "criterion": _criterion, "clamped": _clamped}


def test_replicas_with_other_images() -> None:
    for found in rank_group(4).run(_of_replicas):
        assert {name: error for name, error in found.items() if not error < 1e-9} == {}


def _refused(what: str) -> None:
    on = mesh(1, 2)
    x = ff.shard(image(), on).requires_grad_()
    if what == "gradients of parameters with a graph":
        _net(on)[0](x).mean().backward(create_graph=True)
    elif what == "a graph of sharded parameters":
        model, _ = _net(on, shard_parameters=True, find_unused_parameters=True)
        torch.autograd.grad(model(x).mean(), x, create_graph=True)
    elif what == "no seed":
        x.sin().backward()
    elif what == "seed of another shape":
        x.sin().backward(drawn(2, 3, 9, 1))
    elif what == "inputs":
        y = x.sin()
        y.mean().backward(inputs=[y])
    elif what == "batched":
        torch.autograd.grad(x.sin(), x, drawn(5, 2, 3, 9, 13), is_grads_batched=True)
    elif what == "batched, of one rank's point":  # the other rank has no gradient to send
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        torch.autograd.grad((x * scale)[:, :, 2, 3].sum(0), scale, torch.eye(3).double(), is_grads_batched=True)
    elif what == "vjp":
        torch.func.vjp(torch.sin, x)
    elif what == "grad of a parallel model":
        model, scale = _net(on)[0], torch.tensor(2.0, dtype=torch.float64)
        torch.func.grad(lambda scale: model(x.detach()).mean() * scale)(scale)


REFUSED = {
    "a graph of sharded parameters": ("GradientError", "do without shard_parameters"),
    "gradients of parameters with a graph": ("GradientError", "cannot be differentiated; use torch.autograd.grad"),
    "no seed": ("RuntimeError", "grad can be implicitly created only for scalar outputs"),
    "seed of another shape": ("RuntimeError", "Mismatch in shape"),
    "inputs": ("UnsupportedOp", "Use autograd.grad for it"),
    "batched": ("UnsupportedOp", "is_grads_batched"),
    "batched, of one rank's point": ("UnsupportedOp", "is_grads_batched"),
    "grad of a parallel model": ("UnsupportedOp", "a transform of torch.func (grad, vjp, jvp, vmap)"),
    "vjp": ("UnsupportedOp", "In place of torch.func.grad and vmap use torch.autograd.grad and a loop"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    from tests.rank_group import RankFailure

    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_refused, what)
    for _, name, text, _ in caught.value.errors:
        assert name == REFUSED[what][0]
        assert REFUSED[what][1] in text


def _agree() -> float:
    """The gradient of a weight outside the model, on the two ranks."""
    w = nn.Parameter(drawn(3, 1, 1))
    (ff.shard(image(), mesh(1, 2)) * w).sin().mean().backward()
    assert w.grad is not None
    both = [torch.empty_like(w.grad) for _ in range(2)]
    dist.all_gather(both, w.grad)
    return float((both[0] - both[1]).abs().max())


def test_ranks_agree_to_the_last_bit() -> None:
    assert rank_group(2).run(_agree) == [0.0, 0.0]


def _attack(height: int, width: int) -> float:
    """Steps of a perturbation, whose data is set anew, under the gradient's sign; other data is refused."""
    found = []
    for on in (None, mesh(height, width)):
        x = image() if on is None else ff.shard(image(), on)
        d = torch.zeros_like(x).requires_grad_()
        for _ in range(3):
            (gradient,) = torch.autograd.grad((x + d).sin().mean(), d)
            d.data = (d.data + 0.01 * gradient.sign()).clamp(-0.015, 0.015)
        (d * x).sum().backward()
        assert d.grad is not None
        found.append([t.full() if isinstance(t, ff.SpatialTensor) else t for t in (d.detach(), d.grad)])
    for other in (x.full(), x.float(), x.mT):
        with pytest.raises(ff.UnsupportedOp, match="no_grad"):
            d.data = other
    return max(relative(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 2)])
def test_data_is_set_anew(height: int, width: int) -> None:
    assert max(rank_group(height * width).run(_attack, height, width)) < 1e-12


def _of_several() -> float:
    found = []
    for on in (None, mesh(1, 2)):
        x = (image() if on is None else ff.shard(image(), on)).requires_grad_()
        a, b = x.sin(), x.cos()
        torch.autograd.graph.register_multi_grad_hook(
            (a, b), lambda them: found.append(sum(g.square().sum() for g in them))
        )
        (a * b).mean().backward()
    return relative(*found)


def test_a_hook_of_several_tensors() -> None:
    assert max(rank_group(2).run(_of_several)) < 1e-12


def _of_replicas_that_differ(parameters: int, by_message: bool) -> list[float]:
    """Of one replica the criterion comes before the model, whose bucket of gradients is on its way meanwhile."""
    on, size = mesh(1, 1), 300
    if not by_message:
        channel = channel_of(group_of_all())
        channel.boxes, channel.carrier, channel.tagged, channel.gathers = None, None, False, True
    weights = [nn.Parameter(torch.ones(size, size, dtype=torch.float64)) for _ in range(4)]
    nets = [nn.Linear(size, size).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    model = ff.parallelize(nets[1], on)

    def loss(net: Any, a: Tensor, b: Tensor, replica: int, on: DeviceMesh | None) -> Tensor:
        generator = torch.Generator().manual_seed(replica)
        x = _on(on, torch.randn(1, 1, size, size, dtype=torch.float64, generator=generator))
        parts = [
            lambda: (x * a).sin().mean(),
            lambda: (x * b).cos().mean() if parameters == 2 else 0.0,
            lambda: net(x).mean() if parameters == 1 else 0.0,  # no bucket is left behind by the error
        ]
        return sum(part() for part in (parts[::-1] if replica else parts))  # type: ignore[no-any-return,operator]

    (sum(loss(nets[0], *weights[:2], replica, None) for replica in range(2)) / 2).backward()
    loss(model, *weights[2:], dist.get_rank(), on).backward()
    return [relative(a.grad, b.grad) for a, b in [(nets[0].weight, nets[1].weight), (weights[0], weights[2])]]


@pytest.mark.parametrize("by_message", [True, False])
def test_replicas_come_to_a_criterion_s_parameters_in_other_orders(by_message: bool) -> None:
    """One of them and the model's buckets: that is right. Two of them: each would get the other's gradient."""
    assert max(map(max, rank_group(2).run(_of_replicas_that_differ, 1, by_message))) < 1e-12
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_of_replicas_that_differ, 2, by_message)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["DivergenceError"] * 2


def _of_ranks(seed: int) -> None:
    on = mesh(1, 2)
    torch.manual_seed(seed * dist.get_rank())
    weights = nn.Parameter(torch.randn(3, 1, 1))
    x = ff.shard(torch.ones(1, 3, 4, 6), on)
    for _ in range(2):
        (x * weights).sum().backward()


def test_a_criterion_s_parameter_that_differs_between_ranks_is_told() -> None:
    rank_group(2).run(_of_ranks, 0)
    with pytest.raises(RankFailure, match="holds other values on rank 1 than on rank 0; make it") as raised:
        rank_group(2).run(_of_ranks, 7)
    assert len(raised.value.errors) == 2
