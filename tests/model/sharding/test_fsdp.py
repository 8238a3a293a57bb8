"""Sharded parameters under split tensors: every gradient is one process's, in whatever way the blocks are written."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.errors import DivergenceError, GradientError, MeshError, StrategyError
from fullframe.model.sharding.fsdp import AtEnd
from fullframe.model.sharding.requirements import require_whole
from fullframe.model.sharding.values import whole_value
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group

CHANNELS = 6  # over 4 ranks: 2, 2, 2 and none


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spatial, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GroupNorm(2, CHANNELS)
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.mix(F.gelu(self.norm(self.spatial(x))))


class Net(nn.Module):
    """Stem, blocks, head; the images reach the first block without a gradient of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 5, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.features(self.stem(image)))  # type: ignore[no-any-return]


class Recomputed(Net):
    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


class Unrolled(Net):
    """The same blocks again and again."""

    def features(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(super().features(x))
        return x


class Structured(Net):
    """Blocks that take keywords and give dicts, tuples and views, which are then written to."""

    class Block(Block):
        def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
            y = (super().forward(x) + extra["skip"]).transpose(2, 3)
            return {"pair": (y, 0.5), "name": "block"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, shift = block(x * 1, extra={"skip": x})["pair"]
            y += shift
            x = y.transpose(2, 3)
        return x


class Tied(Net):
    """A weight of the blocks is the head's too, so that those blocks are no units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.blocks[0].mix.weight = self.blocks[2].mix.weight = self.head.weight  # type: ignore[union-attr]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Alone(Net):
    """No repeated block: the model is one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])


class Layers(Net):
    """Large layers, each a unit of its own but the last, which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS * 60_000) for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        means = super().features(x).mean((2, 3))
        for layer in [*self.layers, self.layers[-1]]:
            means = means + layer(means).unflatten(1, (CHANNELS, -1)).mean(2)
        return x + means[:, :, None, None]


class Whole(Net):
    """The loss is of whole tensors, behind a pooled head."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image).mean((2, 3))


class Numbers(Net):
    """Numbers without dims in blocks and in the model, tied, frozen, without a gradient, and written to in forward."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.blocks[0].again = self.blocks[0].scale  # type: ignore[union-attr]
        self.temperature, self.unused = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        self.temperature.data.clamp_(max=1.2)
        return super().forward(image) * self.temperature.exp() + self.shift * self.blocks[1].scale  # type: ignore


class Restless(Numbers):
    class Block(Numbers.Block):
        def forward(self, x: Tensor) -> Tensor:
            self.scale = nn.Parameter(self.scale.detach() * 0.9)
            return super().forward(x)


class RecomputedNumbers(Numbers, Recomputed):
    pass


class Spectral(Net):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, 1, 1, dtype=torch.complex128))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + (torch.complex(x, x.cos()) * self.weight).abs()


Build = Callable[[], nn.Module]
NETS: list[Build] = [Net, Recomputed, Unrolled, Structured, Tied, Frozen, Alone, Layers, Whole]
NETS += [Numbers, RecomputedNumbers, Spectral, lambda: Net().to(memory_format=torch.channels_last)]
MESHES = [(2, 1, 2), (4, 2, 2), (4, 1, 2), (2, 1, 1)]  # ranks, height, width


def _built(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def _images(*size: int) -> Tensor:
    return torch.randn(4, 3, *(size or (12, 22)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _mine(images: Tensor, on: DeviceMesh) -> Tensor:
    part = images.chunk(on.size(0))[on.get_local_rank("data")]
    return ff.shard(part, on) if on.size(1) * on.size(2) > 1 else part


def _loss(out: Any) -> Tensor:
    out = out if isinstance(out, Tensor) else out.logits
    return F.mse_loss(out.sin(), out.detach() * 0.5)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By name, whole."""
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def _worst(expected: dict[str, Tensor | None], got: dict[str, Tensor | None]) -> float:
    assert expected.keys() == got.keys()
    pairs = [(expected[name], got[name]) for name in expected]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(relative(a, b) for a, b in pairs if a is not None and b is not None)


def _expected(build: Build, *size: int) -> dict[str, Tensor | None]:
    plain = _built(build)
    _loss(plain(_images(*size))).backward()
    return _gradients(plain)


def _units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def _error(build: Build, on: DeviceMesh, *size: int) -> float:
    model = ff.parallelize(_built(build), on, shard_parameters=True)
    _loss(model(_mine(_images(*size), on))).backward()
    return _worst(_expected(build, *size), _gradients(model))


def _errors(height: int, width: int) -> list[float]:
    return [_error(build, mesh(height, width)) for build in NETS]


@pytest.mark.parametrize(("ranks", "height", "width"), MESHES)
def test_every_gradient_is_that_of_one_process(ranks: int, height: int, width: int) -> None:
    for errors in rank_group(ranks).run(_errors, height, width):
        assert max(errors) < 1e-9, errors


def _norm_in_eval() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()).double()


def _twice(build: Build, width: int) -> float:
    """Two forward passes, one backward pass."""
    on, plain = mesh(1, width), _built(build)
    (_loss(plain(_images())) + _loss(plain(_images() + 1))).backward()
    model = ff.parallelize(_built(build), on, shard_parameters=True)
    (_loss(model(ff.shard(_images(), on))) + _loss(model(ff.shard(_images() + 1, on)))).backward()
    return _worst(_gradients(plain), _gradients(model))


@pytest.mark.parametrize(("build", "width"), [(Net, 2), (_norm_in_eval, 2), (_norm_in_eval, 1)])
def test_two_forward_passes_before_backward(build: Build, width: int) -> None:
    """With replicas (width 1) the second takes buffers over that the first has kept for backward."""
    assert max(rank_group(2).run(_twice, build, width)) < 1e-9


def _errors_of_known_models() -> list[float]:
    from tests.models import zoo

    builds = [zoo.convnext, lambda: zoo.segformer().eval(), lambda: zoo.resnet("bottleneck").eval()]
    return [_error(build, mesh(1, 2), 32, 70) for build in builds]


def test_known_models() -> None:
    for errors in rank_group(2).run(_errors_of_known_models):
        assert max(errors) < 1e-9, errors


def _units_of_nets() -> list[list[str]]:
    models = [ff.parallelize(_built(build), mesh(1, 2), shard_parameters=True) for build in (Net, Tied, Alone, Layers)]
    return [_units(model.module) for model in models]


def test_the_units_are_the_blocks_and_the_rest() -> None:
    for net, tied, alone, layers in rank_group(2).run(_units_of_nets):
        assert net == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert tied == ["", "blocks.1"]
        assert alone == [""]
        assert layers == ["", "blocks.0", "blocks.1", "blocks.2", "layers.0", "layers.1"]


def _bytes_held() -> tuple[int, int, int]:
    model = ff.parallelize(_built(Net), mesh(1, 2), shard_parameters=True)
    whole = sum(p.numel() for p in model.parameters())
    _loss(model(_mine(_images(), mesh(1, 2)))).backward()
    parameters: list[Any] = list(model.parameters())
    with pytest.raises(MeshError, match=r"stem\.weight is sharded already"):
        require_whole(model.module)
    return whole, *(sum(t.to_local().numel() for t in ts) for ts in (parameters, [p.grad for p in parameters]))


def test_a_rank_holds_its_part() -> None:
    held = rank_group(2).run(_bytes_held)
    for whole, parameters, gradients in held:
        assert parameters == gradients
        assert 0.4 * whole < parameters < 0.6 * whole
    assert sum(parameters for _, parameters, _ in held) == held[0][0]


def _after_evaluation() -> float:
    """The parameters change between an evaluation and the next forward pass, as an average swapped in does it."""
    on = mesh(1, 2)
    model, plain = ff.parallelize(_built(Net), on, shard_parameters=True), _built(Net)
    parameters = [*model.parameters(), *plain.parameters()]
    with torch.no_grad():
        model(_mine(_images(), on))
        for parameter in parameters:
            parameter.mul_(1.5)
        return relative(plain(_images()), model(_mine(_images(), on)).full())


def test_no_stale_parameters_after_a_forward_pass_without_backward() -> None:
    assert max(rank_group(2).run(_after_evaluation)) < 1e-12


def _evaluated_by_replicas() -> tuple[float, list[float]]:
    """Replicas that trained on samples of their own: what each gives for the same images, and its statistics."""
    on = mesh(1, 1)
    norm = nn.BatchNorm2d(4).double()
    model = ff.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3).double(), norm), on, shard_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(_images().chunk(on.size(0))[on.get_local_rank("data")]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return float(model(_images()).sum()), norm.running_mean.tolist()


def test_replicas_evaluate_with_the_same_running_statistics() -> None:
    first, second = rank_group(2).run(_evaluated_by_replicas)
    assert first == second


def _inference(first: bool) -> float:
    on = mesh(1, 2)
    model = ff.parallelize(_built(Net), on, shard_parameters=True)
    if not first:
        _loss(model(_mine(_images(), on))).backward()
        model.zero_grad()
    with torch.inference_mode():
        model(_mine(_images(), on))
    _loss(model(_mine(_images(), on))).backward()
    return _worst(_expected(Net), _gradients(model))


def test_inference_mode_between_steps() -> None:
    assert max(rank_group(2).run(_inference, False)) < 1e-9
    with pytest.raises(RankFailure, match=r"use torch\.no_grad\(\) rather than"):
        rank_group(2).run(_inference, True)


def _accumulated(height: int, width: int) -> tuple[float, float]:
    on, plain = mesh(height, width), _built(Net)
    for part in _images().chunk(2):
        _loss(plain(part)).backward()
    errors = []
    for inside in (True, False):
        model = ff.parallelize(_built(Net), on, shard_parameters=True)
        first, second = _images().chunk(2)
        if inside:
            with model.no_sync():
                _loss(model(_mine(first, on))).backward()
            assert all(p.grad is None for p in model.parameters())  # nothing was sent yet
        else:
            _loss(model(_mine(first, on))).backward()
        _loss(model(_mine(second, on))).backward()
        errors.append(_worst(_gradients(plain), _gradients(model)))
    return errors[0], errors[1]


def test_gradients_accumulate_with_and_without_no_sync() -> None:
    for ranks, height, width in [(2, 1, 2), (4, 1, 2)]:
        for inside, outside in rank_group(ranks).run(_accumulated, height, width):
            assert max(inside, outside) < 1e-9


def _users_own(parallel: bool) -> float:
    """The user has sharded some blocks; what fully_shard has not taken is averaged too, without `parallelize`."""
    on, model = mesh(1, 2), _built(Net)
    ranks = torch.distributed.init_device_mesh("cpu", (2,))
    for module in (model.blocks[0], model.blocks[2].spatial, model.head):  # type: ignore[index,union-attr]
        fully_shard(module, mesh=ranks)
    if parallel:
        model = ff.parallelize(model, on, shard_parameters=True)
        assert _units(model.module) == ["", "head", "blocks.0", "blocks.1", "blocks.2.spatial"]
    _loss(model(_mine(_images(), on))).backward()
    return _worst(_expected(Net), _gradients(model))


@pytest.mark.parametrize("parallel", [True, False])
def test_blocks_that_the_user_has_sharded(parallel: bool) -> None:
    assert max(rank_group(2).run(_users_own, parallel)) < 1e-9


class Half(Net):
    """Uses its extra branch when told."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.never = nn.Linear(2, 2)
        self.with_extra = False

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        return x + self.extra(x) if self.with_extra else x


def _unused(find: bool, users: tuple[int, ...]) -> float:
    """Replicas, of which `users` use the extra branch."""
    on, models = mesh(1, 1), []
    for shard_parameters in (True, False):
        model = ff.parallelize(_built(Half), on, find_unused_parameters=find, shard_parameters=shard_parameters)
        model.module.with_extra = torch.distributed.get_rank() in users
        _loss(model(_mine(_images(), on))).backward()
        models.append(model)
    assert models[0].module.never.weight.grad is None
    return _worst(_gradients(models[1]), _gradients(models[0]))


def test_parameters_without_a_gradient() -> None:
    """On no rank: none, as with DDP. On some: those count as zeros."""
    for users in [(), (1,), (0, 1)]:
        assert max(rank_group(2).run(_unused, True, users)) < 1e-9
        assert max(rank_group(2).run(_unused, False, users)) < 1e-9


def _zeroed_between(width: int) -> float:
    """Gradients are let go of between forward and backward, of a branch that the second step does not use."""
    on, found = mesh(1, width), []
    for is_sharded in (False, True):
        net: Any = _built(Half)
        model = ff.parallelize(net, on, shard_parameters=True) if is_sharded else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step in range(3):
            net.with_extra = step != 1
            loss = _loss(model(ff.shard(_images(), on) if is_sharded else _images()))
            optimizer.zero_grad()
            loss.backward()
            assert (net.extra.weight.grad is None) == (step == 1)
            optimizer.step()
        found.append([whole_value(parameter.detach()) for parameter in net.parameters()])
    return max(map(relative, *found))


@pytest.mark.parametrize("width", [1, 2])
def test_gradients_that_are_let_go_of_between_forward_and_backward(width: int) -> None:
    assert max(rank_group(2).run(_zeroed_between, width)) < 1e-9


class Skipping(Net):
    """As with LayerDrop: a block is left out, of as many parameters as another replica's."""

    skipped = -1

    def features(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return x


def _skipping(trains: bool) -> None:
    on = mesh(1, 1)
    model = ff.parallelize(_built(Skipping), on, find_unused_parameters=True, shard_parameters=True)

    def run() -> None:
        with torch.set_grad_enabled(trains):
            loss = _loss(model(_mine(_images(), on)))
        if trains:
            loss.backward()

    model.module.skipped = 0
    run()
    model.module.skipped = 1 + torch.distributed.get_rank()
    with pytest.raises(DivergenceError, match=r"rank 0 ran blocks\.2, rank 1 ran blocks\.1; skip blocks alike"):
        run()


@pytest.mark.parametrize("trains", [True, False])
def test_replicas_that_skip_other_blocks(trains: bool) -> None:
    """Each would gather half of one block's parameters and half of another's."""
    rank_group(2).run(_skipping, trains)


def _buffers() -> list[Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    model = ff.parallelize(net, mesh(1, 1), shard_parameters=True)
    for _ in range(2):
        _loss(model(torch.randn(2, 3, 8, 8, dtype=torch.float64))).backward()
    model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    return [net[1].running_mean, net[1].num_batches_tracked]  # type: ignore[list-item]


def _buffers_over_microbatches(shard_parameters: bool) -> list[Tensor]:
    """Losses, and the buffers after each of six passes, for three updates."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).double()
    model, seen = ff.parallelize(net, mesh(1, 1), shard_parameters=shard_parameters), list[Tensor]()
    torch.manual_seed(torch.distributed.get_rank())
    for number in range(6):
        with nullcontext() if number % 2 else model.no_sync():
            loss = _loss(model(torch.randn(2, 3, 8, 8, dtype=torch.float64)))
            loss.backward()
        seen += [loss.detach(), *(buffer.clone() for buffer in net.buffers())]
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    return [*seen, *(buffer.clone() for buffer in net.buffers())]


def test_buffers_within_an_accumulation_are_each_replicas_own() -> None:
    """As with DDP, which shares them in the first of its passes."""
    ways = [rank_group(2).run(_buffers_over_microbatches, sharded) for sharded in (True, False)]
    for sharded, plain in zip(*ways, strict=True):
        for one, other in zip(sharded, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_buffers_are_the_first_ranks() -> None:
    """As with DDP, at the start of each forward pass; the last one here has moved them apart again."""
    (mean, steps), (other, other_steps) = rank_group(2).run(_buffers)
    assert steps == other_steps == 3
    # Three steps with momentum 0.1, of which the last was the rank's own.
    assert 0 < (mean - other).abs().max() < 0.1


def _refused(what: str) -> None:
    model: nn.Module = _built(Net)
    if what == "sharded already":
        fully_shard(model.head, mesh=torch.distributed.init_device_mesh("cpu", (4,)))  # type: ignore[arg-type]
        ff.parallelize(model, mesh(1, 2))
    elif what == "other ranks":
        fully_shard(model.head, mesh=mesh(1, 2)["data"])  # type: ignore[arg-type]
        ff.parallelize(model, mesh(1, 2), shard_parameters=True)
    elif what == "hook":
        model.head.weight.register_hook(torch.sin)  # type: ignore[union-attr]
        ff.parallelize(model, mesh(1, 2), shard_parameters=True)
    elif what == "later hook":
        model = ff.parallelize(model, mesh(1, 2), shard_parameters=True)
        model.module.head.weight.register_hook(torch.sin)  # type: ignore[union-attr]
        model(_mine(_images(), mesh(1, 2)))
    elif what == "frozen later":
        model = ff.parallelize(model, mesh(1, 2), shard_parameters=True)
        model.module.head.requires_grad_(False)  # type: ignore[union-attr]
        model(_mine(_images(), mesh(1, 2)))
    elif what == "a new head":
        model = ff.parallelize(model, mesh(1, 2), shard_parameters=True)
        model.module.head = nn.Conv2d(1, 1, 1)
        model(_mine(_images(), mesh(1, 2)))
    elif what in ("a weight made of another", "a new weight"):
        model = ff.parallelize(model, mesh(1, 2), shard_parameters=True)
        with torch.no_grad():
            if what == "a new weight":
                model(_mine(_images(), mesh(1, 2)))
                model.module.head.weight = nn.Parameter(model.module.head.weight.detach() * 2)  # type: ignore[union-attr]
            made = {name: p * 1.5 for name, p in model.named_parameters() if what != "a new weight"}
            torch.func.functional_call(model, made, (_mine(_images(), mesh(1, 2)),))
    elif what == "optimizer before":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = ff.parallelize(model, mesh(1, 2), shard_parameters=True)
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # which is right
        optimizer.step()
    elif what == "a new number":
        model = ff.parallelize(_built(Numbers), mesh(1, 2), shard_parameters=True)
        model.module.temperature = nn.Parameter(torch.tensor(1.0).double())
        with torch.no_grad():
            model(_mine(_images(), mesh(1, 2)))
    elif what == "a number that forward replaces":
        ff.parallelize(_built(Restless), mesh(1, 2), shard_parameters=True)(_mine(_images(), mesh(1, 2)))
    elif what == "TorchScript":
        model.head = torch.jit.script(model.head)
        ff.parallelize(model, mesh(1, 2), shard_parameters=True)
    elif what == "a part by itself":
        model = ff.parallelize(model, mesh(1, 2), shard_parameters=True)
        model.module.head(_mine(_images(), mesh(1, 2)))  # type: ignore[operator]


REFUSED = {
    "sharded already": "parameter head.weight is sharded already",
    "other ranks": "parameter head.weight is sharded over 2 of 4 ranks",
    "TorchScript": "module 'head' was compiled by TorchScript",
    "a part by itself": "do that in a method of the model, called on the parallel model",
    "hook": "parameter head.weight has a gradient hook",
    "later hook": "parameter head.weight has a gradient hook",
    "frozen later": "requires_grad of head.bias, head.weight has changed",
    "optimizer before": "the optimizer was made before parallelize(..., shard_parameters=True)",
    "a new head": "head.bias, head.weight came into the model after",
    "a weight made of another": "is another tensor than the one that was sharded",
    "a new weight": "head.weight is another tensor than the one that was sharded",
    "a new number": "temperature is another tensor than the one that was sharded",
    "a number that forward replaces": "blocks.0.scale is replaced in forward",
}


GRADIENTS = ("a part by itself", "hook", "later hook", "frozen later", "a new head", "optimizer before")


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_averaged_wrong_is_refused(what: str) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_group(4).run(_refused, what)
    for _, name, text, _ in caught.value.errors:
        named = "StrategyError" if "another tensor" in REFUSED[what] or "replaced" in REFUSED[what] else "MeshError"
        assert name == ("GradientError" if what in GRADIENTS else named)
        assert REFUSED[what] in text


class Weighed(nn.Module):
    """Its loss weighs two terms by their gradients of the last weight, as VQGAN's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def loss(self, x: Tensor) -> Tensor:
        y = self.last(self.body(x).sin())
        terms = (y - x).abs().mean(), y.square().mean()
        first, second = (torch.autograd.grad(term, self.last.weight, retain_graph=True)[0].norm() for term in terms)
        return terms[0] + terms[1] * (first / second).detach()  # type: ignore[no-any-return]


def _weighed(height: int, width: int) -> list[Tensor]:
    on = mesh(height, width)
    torch.manual_seed(0)
    net, x = Weighed().double(), torch.randn(1, 3, 5, 7).double()
    model: Any = ff.parallelize(net, on, shard_parameters=True) if height * width > 1 else net
    for _ in range(2):
        loss = model.loss(ff.shard(x, on) if height * width > 1 else x)
        loss.backward()
    return [loss.detach(), *(whole_value(parameter.grad) for parameter in model.parameters())]


def test_a_gradient_of_a_weight_that_forward_asks_for_is_one_process_s() -> None:
    expected = _weighed(1, 1)
    for found in (*rank_group(2).run(_weighed, 1, 2), *rank_group(4).run(_weighed, 2, 2)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def _penalised(width: int, of_whole: bool) -> list[Tensor]:
    on = mesh(1, width)
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)).double(), torch.randn(1, 3, 4, 6).double()
    model = ff.parallelize(net, on, shard_parameters=width > 1)
    loss = model(ff.shard(x, on) if width > 1 else x).square().mean()
    for parameter in model.parameters():
        loss = loss + (whole_value(parameter) if of_whole else parameter).abs().sum()
    loss.backward()
    return [whole_value(parameter.grad) for parameter in model.parameters()]


def test_a_penalty_on_sharded_parameters_is_taken_of_whole_ones() -> None:
    expected = _penalised(1, True)
    for found in rank_group(2).run(_penalised, 2, True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(RankFailure, match=r"values of sharded parameters .* take them of parameter.full_tensor\(\)"):
        rank_group(2).run(_penalised, 2, False)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).sin()
        return self.one(x), self.other(x)


def _one_loss_after_the_other(width: int) -> list[Tensor]:
    """Each backward pass passes over the other's head."""
    on = mesh(1, width)
    torch.manual_seed(0)
    net, x = TwoHeads().double(), torch.randn(1, 3, 4, 6).double()
    model = ff.parallelize(net, on, shard_parameters=width > 1)
    one, other = model(ff.shard(x, on) if width > 1 else x)
    one.square().mean().backward(retain_graph=True)
    other.square().mean().backward()
    return [whole_value(parameter.grad) for parameter in model.parameters()]


def test_a_second_loss_of_one_forward_pass_leaves_the_gradients_of_the_first() -> None:
    expected = _one_loss_after_the_other(1)
    for found in rank_group(2).run(_one_loss_after_the_other, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Failing(Net):
    fails = False

    def features(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.fails:
            raise ValueError("a bad sample")
        return self.blocks[1](x)  # type: ignore[no-any-return]


def _after_an_error() -> float:
    """A bad sample is left out; the parameters are changed before the next one."""
    on = mesh(1, 2)
    model, plain = ff.parallelize(_built(Failing), on, shard_parameters=True), _built(Failing)
    for net, images in [(model, _mine(_images(), on)), (plain, _images())]:
        for fails in (False, True):
            net.fails = fails  # type: ignore[assignment]
            with pytest.raises(ValueError, match="a bad sample") if fails else nullcontext():
                _loss(net(images)).backward()
        net.zero_grad()
        net.fails = False  # type: ignore[assignment]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.5)
        _loss(net(images)).backward()
    return _worst(_gradients(plain), _gradients(model))


def test_what_is_done_to_parameters_after_an_error_in_forward_is_not_lost() -> None:
    assert max(rank_group(2).run(_after_an_error)) < 1e-9


def _copied() -> None:
    model = ff.parallelize(_built(Net), mesh(1, 2), shard_parameters=True)
    for module in (model.module, model.module.blocks[0]):  # type: ignore[index]
        with pytest.raises(StrategyError, match="keep an average by names"):
            AveragedModel(module)  # type: ignore[arg-type]


def test_the_end_of_a_backward_pass_is_told_from_its_being_given_up() -> None:
    told: list[str] = []
    queued = [AtEnd(lambda: told.append("ended"), lambda: told.append("given up")) for _ in range(2)]
    queued.pop()()
    assert told == ["ended"]
    queued.clear()
    assert told == ["ended", "given up"]


def test_a_copy_of_a_sharded_module_is_refused() -> None:
    rank_group(2).run(_copied)


def _without_a_way_back() -> None:
    """As with torch 2.11 and 2.12, whose next gradients are others."""
    on = mesh(1, 2)
    model = ff.parallelize(_built(Failing), on, shard_parameters=True)
    model(_mine(_images(), on))
    model.fails = True  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(FSDPModule, "reset_iter_state"):
            patch.delattr(FSDPModule, "reset_iter_state")
        with pytest.raises(ValueError, match="a bad sample"):
            model(_mine(_images(), on))
    with pytest.raises(GradientError, match="ended by an error, after which torch"):
        model(_mine(_images(), on))


def test_a_torch_that_cannot_go_on_after_an_error_is_told() -> None:
    rank_group(2).run(_without_a_way_back)


def _after_an_error_in_backward(runs: Callable[[Callable[[], Any]], Any]) -> float:
    """A batch is left out, as after an out-of-memory, and a state loaded, between two steps."""
    on = mesh(1, 2)
    model, plain = ff.parallelize(_built(Net), on, shard_parameters=True), _built(Net)
    for net, images in [(model, _mine(_images(), on)), (plain, _images())]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        block: Any = (net.module if net is model else net).blocks[1]  # type: ignore[union-attr]
        for fails in (False, True, False):
            handle = block.register_full_backward_hook(_fail) if fails else None
            with pytest.raises(ValueError, match="no memory") if fails else nullcontext():
                runs(_loss(net(images)).backward)
            if handle is None:
                optimizer.step()
            else:
                handle.remove()
            optimizer.zero_grad()
            if fails:
                with torch.no_grad():
                    for parameter in net.parameters():  # by hand, as an average is put in
                        parameter.mul_(1.1)
                block.load_state_dict(_built(Net).blocks[1].state_dict())  # type: ignore[index,union-attr]
        _loss(net(images)).backward()
    return _worst(_gradients(plain), _gradients(model))


def _fail(*_: Any) -> None:
    raise ValueError("no memory")


def _here(call: Callable[[], Any]) -> None:
    call()


def _elsewhere(call: Callable[[], Any]) -> None:
    """In another thread, as a GPU's backward pass."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


@pytest.mark.parametrize("runs", [_here, _elsewhere])
def test_a_step_after_an_error_in_backward_is_one_process_s(runs: Callable[[Callable[[], Any]], Any]) -> None:
    assert max(rank_group(2).run(_after_an_error_in_backward, runs)) < 1e-9


def _attacked() -> list[str]:
    """A step after the gradient of its images, which is asked for alone."""
    on = mesh(1, 2)
    model = ff.parallelize(Net().double(), on, shard_parameters=True)
    images = _mine(_images(), on).requires_grad_()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.autograd.grad(_loss(model(images)), images)
        _loss(model(images)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [str(warning.message) for warning in said if "got no gradient" in str(warning.message)]


def test_a_gradient_of_the_images_alone_leaves_no_parameter_unused() -> None:
    assert rank_group(2).run(_attacked) == [[], []]
