"""The numbers of one process, from ranks: several on one device by gloo, or one a GPU by NCCL."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from benchmarks.gpu.cases import image, networks
from benchmarks.gpu.found import Found, device_of, difference, ieee

_BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-2}  # rounding may tip which of two pixels is the larger: a pool's
_FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


@ieee()
def exact(kind: str) -> Found:
    """On each rank: every network split over all ranks, output and gradients against plain torch on the same device."""
    found, device = Found(), device_of(kind)
    for name, dtype, layout, error in differences(device):
        found.note(ranks=dist.get_world_size(), network=name, dtype=str(dtype)[6:], layout=layout, difference=error)
        what = f"{name}, {dtype}, {layout}, {dist.get_world_size()} ranks"
        found.require(error <= _BOUNDS[dtype], f"{what}: differs from one process by {error:.1e}")
    return found


def differences(device: torch.device) -> Iterator[tuple[str, torch.dtype, str, float]]:
    """Of each network, dtype and layout: the largest relative difference. In NHWC 4 ranks lie side by side."""
    ranks = dist.get_world_size()
    square = ff.init_mesh(width=2, height=ranks // 2) if ranks > 1 else ff.init_mesh()
    meshes = {"NCHW": square, "NHWC": ff.init_mesh(width=ranks)}
    for name, build in networks().items():
        for dtype in _BOUNDS:
            for layout in _FORMATS if dtype == torch.float32 else ("NCHW",):
                x = image(device, dtype).to(memory_format=_FORMATS[layout])
                torch.manual_seed(0)
                plain = build().to(device, dtype).to(memory_format=_FORMATS[layout])
                torch.manual_seed(0)
                split = build().to(device, dtype).to(memory_format=_FORMATS[layout])
                expected = _answers(plain, plain, x)
                parallel = ff.parallelize(split, meshes[layout], average_gradients=False)
                got = _answers(parallel, split, ff.shard(x, meshes[layout], check=False))
                got = [got[0], *map(_mean, got[1:])]
                yield name, dtype, layout, difference(expected, got)


def _answers(model: nn.Module, plain: nn.Module, x: Tensor) -> list[Tensor]:
    """The whole output, and this rank's gradients."""
    out = model(x)
    out.square().mean().backward()
    whole = ff.full(out)
    return [whole.detach(), *(p.grad for p in plain.parameters() if p.grad is not None)]


def _mean(gradient: Tensor) -> Tensor:
    """Over the ranks: each has its own."""
    total = gradient.detach().cpu()  # by gloo, which is there beside NCCL
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(gradient.device)
