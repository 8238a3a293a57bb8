"""Host time on one inner rank of a job whose messages go nowhere, on maps so small that arithmetic hardly counts.

`time.thread_time` counts what this thread computes, whoever else uses the machine; of many calls the fastest counts.
Split and plain are called in turns, plain on a map as large as the rank's own part.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from benchmarks.networks import pair
from fullframe.model.compiled.blocks import CompiledBlocks
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.gradients import manage
from fullframe.spatial.tensor import wrap

RANK, RANKS = 1, 4  # along the width: a neighbour on either side
MAP = (2, 8, 8, 8)  # (N, C, H, W) on this rank
IMAGE = (1, 3, 64, 64)
MICROSECONDS = 1e6


class Op(NamedTuple):
    """A function of a map (N, C, H, W) and of parameters of these shapes."""

    run: Callable[..., Tensor]
    parameters: tuple[tuple[int, ...], ...] = ()


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2).unsqueeze(1)


OPS: dict[str, Op] = {
    "relu": Op(torch.relu),
    "add": Op(lambda x: x + x),
    "conv 1x1": Op(F.conv2d, ((8, 8, 1, 1), (8,))),
    "conv 3x3": Op(lambda x, w, b: F.conv2d(x, w, b, padding=1), ((8, 8, 3, 3), (8,))),
    "conv 3x3, stride 2": Op(lambda x, w, b: F.conv2d(x, w, b, 2, 1), ((8, 8, 3, 3), (8,))),
    "conv_transpose 2x2": Op(lambda x, w: F.conv_transpose2d(x, w, stride=2), ((8, 8, 2, 2),)),
    "batch_norm": Op(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((8,), (8,))),
    "group_norm": Op(lambda x, w, b: F.group_norm(x, 2, w, b), ((8,), (8,))),
    "layer_norm of channels": Op(lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (8,), w, b), ((8,), (8,))),
    "max_pool 3/2/1": Op(lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool 2": Op(lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool 1": Op(lambda x: F.adaptive_avg_pool2d(x, 1)),
    "interpolate x2 bilinear": Op(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "interpolate to 12 rows": Op(lambda x: F.interpolate(x, size=(12, x.shape[3]), mode="bilinear")),
    "cat of channels": Op(lambda x: torch.cat([x, x], 1)),
    "pad reflect": Op(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "softmax of channels": Op(lambda x: x.softmax(1)),
    "mean": Op(lambda x: x.mean()),
    "attention": Op(lambda x: F.scaled_dot_product_attention(_tokens(x), _tokens(x), _tokens(x))),
    "cross_entropy": Op(lambda x: F.cross_entropy(x, x.detach().argmax(1))),
}


class ResNetUNet(nn.Module):
    """ResNet-50's stages (`transformers`) and a decoder of pairs of layers with skips: 61 norms, an eighth as wide."""

    def __init__(self, classes: int = 8):
        super().__init__()
        import transformers

        stages = ["stem", "stage1", "stage2", "stage3", "stage4"]
        widths = [8, 32, 64, 128, 256]
        config = transformers.ResNetConfig(out_features=stages, embedding_size=widths[0], hidden_sizes=widths[1:])
        self.encoder = transformers.ResNetBackbone(config)
        outs = [8, 8, 16, 32]  # of the decoder, finest first
        below = [*outs[1:], widths[-1]]
        self.up = nn.ModuleList(pair(skip + b, out) for skip, b, out in zip(widths[:-1], below, outs, strict=True))
        self.head = nn.Conv2d(outs[0], classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = list(self.encoder(image).feature_maps)
        x = skips.pop()
        for up in reversed(self.up):
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = up(torch.cat([skip, x], 1))
        return self.head(x)


def fastest(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds of the fastest call of each, called in turns; the first three rounds are not counted."""
    best = dict.fromkeys(variants, float("inf"))
    for number in range(rounds + 3):
        for name, run in variants.items():
            started = time.thread_time()
            run()
            taken = (time.thread_time() - started) * MICROSECONDS
            best[name] = min(best[name], taken) if number >= 3 else best[name]
    return best


def of_op(op: Op, mesh: Any, rounds: int) -> dict[str, float]:
    """Forward, and forward with backward, split and plain."""
    torch.manual_seed(0)
    whole = torch.randn(*MAP[:-1], MAP[-1] * RANKS)
    shell = ff.shard(whole, mesh, check=False)
    local = shell.local.detach().requires_grad_()
    parameters = [nn.Parameter(torch.randn(shape)) for shape in op.parameters]
    for parameter in parameters:
        manage(parameter, None)  # as of a model, whose gradients DDP averages
    leaves = [local, *parameters]

    def split(backward: bool) -> None:
        end = op.run(wrap(local.view_as(local), shell.spec), *parameters)
        finish(end.local if isinstance(end, ff.SpatialTensor) else end, backward)

    def plain(backward: bool) -> None:
        finish(op.run(local.view_as(local), *parameters), backward)

    def finish(end: Tensor, backward: bool) -> None:
        if backward:
            torch.autograd.grad(end, leaves, torch.ones_like(end), allow_unused=True)

    runs = {
        "split forward": lambda: split(False), "plain forward": lambda: plain(False),
        "split": lambda: split(True), "plain": lambda: plain(True),
    }  # fmt: skip
    return fastest(runs, rounds)


class Convolutions(TorchDispatchMode):
    """The calls of torch's convolutions inside, forward and backward, kept to be made again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            self._calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def again(self) -> None:
        """All of them, one after another."""
        with torch.no_grad():
            for func, args in self._calls:
                func(*args)


def of_step(mesh: Any, rounds: int, compiled: bool) -> dict[str, Any]:
    """Forward and backward of the network, split and plain, and the convolutions in it.

    Also split and compiled, by blocks and all in one, and why some blocks are not.
    """
    torch.manual_seed(0)
    plain_model, model = ResNetUNet(), ResNetUNet()
    model = ff.parallelize(model, mesh, average_gradients=False)
    shell = ff.shard(torch.randn(*IMAGE[:-1], IMAGE[-1] * RANKS), mesh, check=False)
    local = shell.local.detach()

    def stepping(net: nn.Module, image: Tensor) -> Callable[[], None]:
        parameters = list(net.parameters())

        def step() -> None:
            for parameter in parameters:
                parameter.grad = None
            net(image).square().mean().backward()

        return step

    runs = {"split": stepping(model, shell), "plain": stepping(plain_model, local)}
    with Convolutions() as convolutions:
        runs["plain"]()
    runs["convolutions"] = convolutions.again
    made: dict[str, CompiledBlocks] = {}
    for name, which in (("compiled", True), ("compiled as one", "all")) if compiled else ():
        parallel = ff.parallelize(ResNetUNet(), mesh, average_gradients=False, compile=which)
        assert parallel.compiled is not None
        runs[name], made[name] = stepping(parallel, shell), parallel.compiled
    found: dict[str, Any] = dict(fastest(runs, rounds))
    apart = found["convolutions"]
    host = {name: (found[name] - apart) / (found["split"] - apart) for name in made}
    programs = {name: [round(one.seconds, 1) for one in blocks.programs.said] for name, blocks in made.items()}
    whys = {block: why for blocks in made.values() for block, why in blocks.programs.whys.items() if why}
    return found | {"host": host, "programs": programs, "as they are": whys}


def measured(rounds: int, steps: int, compiled: bool) -> dict[str, Any]:
    """Microseconds of each op, and of a step."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with fake_job(RANK, RANKS):
        mesh = ff.init_mesh(width=RANKS)
        ops = {name: of_op(op, mesh, rounds) for name, op in OPS.items()}
        return {"ops": ops, "step": of_step(mesh, steps, compiled)}
