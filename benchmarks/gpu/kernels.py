"""Every family of rules on the device's own kernels, by memory format and dtype, and the precisions of a step.

A rank alone is compared with plain torch. A rank whose neighbours do not exist gets garbage from them, so of it only
dtype, memory format and that the host never waits are asked.
"""

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from benchmarks.gpu.cases import Function, ops
from benchmarks.gpu.found import Found, device_of, difference, ieee
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.shard import even_spec
from fullframe.spatial.tensor import wrap
from fullframe.training.step import TrainStep

_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}
_TWICE = 2.0  # as far from fp64 as plain torch is
_FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
_PRECISIONS = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 0.1}
_SHAPE = 2, 20, 36  # samples, rows, columns


@ieee()
def kernels(kind: str, only: Collection[str] = ()) -> Found:
    """Forward and backward of each op in {NCHW, NHWC} x {fp64, fp32, bf16} x {1, 8 channels} (the CPU: 1)."""
    found, device = Found(), device_of(kind)
    mesh, worst = ff.init_mesh(), dict[str, float]()
    choices = list(itertools.product(_FORMATS, _TOLERANCE, (1, 8) if kind != "cpu" else (1,)))
    for layout, dtype, channels in choices:
        for name in only or ops(channels):
            what = f"{name}, {layout}, {str(dtype)[6:]}, {channels} channels"
            with found.trying(what):
                op, x = _made(name, channels, device, dtype, layout)
                plain, split = _run(op, x, x), _run(op, x, ff.shard(x, mesh, check=False))
                exact_op, exact_x = copy.deepcopy(op).double(), x.detach().double().requires_grad_()
                truth = _run(exact_op, exact_x, exact_x)
                error, allowed = difference(truth, split), max(_TOLERANCE[dtype], _TWICE * difference(truth, plain))
                worst[name] = max(worst.get(name, 0.0), error / allowed)
                found.require(error <= allowed, f"{what}: differs from fp64 by {error:.1e}, plain torch much less")
                _require_alike(found, what, plain[0], split[0])
    with fake_job(1, 3):
        mesh = ff.init_mesh(width=3)
        spatial_of(mesh, draw_seed=lambda generator: 0)
        for layout, dtype, channels in choices:
            for name in only or ops(channels):
                what = f"{name}, {layout}, {str(dtype)[6:]}, {channels} channels, with neighbours"
                with found.trying(what):
                    op, x = _made(name, channels, device, dtype, layout)
                    spec = even_spec((*x.shape[:-1], 3 * x.shape[-1]), mesh)
                    _run(op, x, wrap(x, spec))  # the first time copies what it will need again to the device
                    with _host_never_waits(device):
                        split = _run(op, x, wrap(x, spec))
                    _require_alike(found, what, op(x), split[0])
    found.note(ops=len(worst), cases=2 * len(worst) * len(choices), worst_of_allowed=max(worst.values()))
    return found


def _made(name: str, channels: int, device: torch.device, dtype: torch.dtype, layout: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    op = ops(channels)[name].to(device, dtype)
    samples, rows, columns = _SHAPE
    x = torch.randn(samples, channels, rows, columns).to(device, dtype).to(memory_format=_FORMATS[layout])
    return op.to(memory_format=_FORMATS[layout]), x.requires_grad_()


def _run(op: nn.Module, leaf: Tensor, x: Tensor) -> list[Tensor]:
    """The output, and gradients of the leaf and the parameters; of a split output this rank's part."""
    out = op(x)
    out = out.local if isinstance(out, ff.SpatialTensor) else out
    wanted = [leaf, *op.parameters()]
    weights = torch.linspace(-1, 2, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, wanted, weights)]


def _require_alike(found: Found, what: str, plain: Tensor, split: Tensor) -> None:
    found.require(split.dtype == plain.dtype, f"{what}: gives {split.dtype}, plain torch {plain.dtype}")
    if plain.dim() == 4 and min(plain.shape[1:]) > 1 and plain.is_contiguous(memory_format=torch.channels_last):
        kept = split.is_contiguous(memory_format=torch.channels_last)
        found.require(kept, f"{what}: NHWC is lost, plain torch keeps it")


@contextmanager
def _host_never_waits(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def precision(kind: str) -> Found:
    """Gradients of a training step in each precision against fp64, with and without recompute."""
    found, device, mesh = Found(), device_of(kind), ff.init_mesh()
    batch = {"image": torch.randn(2, 16, 24, 40, generator=torch.Generator().manual_seed(0)).to(device)}
    exact = _gradients(mesh, {"image": batch["image"].double()}, ff.Strategy(), torch.float64)
    for name, bound in _PRECISIONS.items():
        for recompute in ("none", "blocks"):
            options: Any = {"precision": name, "recompute": recompute}
            options |= {"recompute_modules": ("2",)} if recompute == "blocks" else {}
            error = difference(exact, _gradients(mesh, batch, ff.Strategy(**options), torch.float32))
            found.note(precision=name, recompute=recompute, error=error, bound=bound)
            found.require(error <= bound, f"{name}, recompute {recompute}: gradients differ from fp64 by {error:.1e}")
    return found


def _gradients(mesh: Any, batch: dict[str, Tensor], strategy: ff.Strategy, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU())
    pixels = Function(lambda x: x.flatten(2).mT)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), inner, pixels, nn.Linear(32, 64))
    model = model.to(batch["image"].device, dtype)
    gradients: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.update({p: p.grad.clone()}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    TrainStep(ff.parallelize(model, mesh), _loss, optimizer, strategy)(batch)
    return [gradients[parameter] for parameter in model.parameters()]


def _loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    out = model(batch["image"]).to(batch["image"].dtype)
    return F.smooth_l1_loss(out, torch.ones_like(out))
