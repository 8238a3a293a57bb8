"""The part that runs on the ranks: what a step of a vision transformer saves for backward, and its time."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff

CHANNELS, HEADS, BLOCKS = 192, 3, 4
STEPS = 5


class ByKernel(nn.Module):
    """Attention by `scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, C) to (N, L, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, heads, L, d) to (N, heads, L, d)."""
        return F.scaled_dot_product_attention(q, k, v)


class ByHand(ByKernel):
    """Attention with a softmax of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, heads, L, d) to (N, heads, L, d)."""
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


class Block(nn.Module):
    """Attention and two linear layers, norm first."""

    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2))
        self.attention = attention()
        self.mlp = nn.Sequential(nn.Linear(CHANNELS, 4 * CHANNELS), nn.GELU(), nn.Linear(4 * CHANNELS, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """(N, L, C) to (N, L, C)."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Vit(nn.Module):
    """Patches of 16 pixels, blocks, the mean of squares."""

    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.patches = nn.Conv2d(3, CHANNELS, 16, 16)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(BLOCKS)))

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) to a number."""
        return self.blocks(self.patches(image).flatten(2).transpose(1, 2)).square().mean()  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[], nn.Module]] = {"scaled_dot_product_attention": ByKernel, "softmax by hand": ByHand}


def kept_bytes(model: nn.Module, image: Tensor) -> int:
    """Bytes of the different storages that forward saves for backward, parameters not counted."""
    storages: dict[int, Any] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(image)
    return sum(storage.nbytes() for storage in storages.values())


def row(kind: str, sides: int, ranks: int) -> dict[str, Any]:
    """Bytes kept by this rank (of several the largest) and the fastest of some steps, of sides x sides tokens."""
    torch.manual_seed(0)
    model: nn.Module = Vit(KINDS[kind])
    image = torch.randn(1, 3, 16 * sides, 16 * sides)
    if ranks > 1:
        mesh = ff.init_mesh(height=ranks)
        model, image = ff.parallelize(model, mesh), ff.shard(image, mesh)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(image).backward()
        seconds.append(time.perf_counter() - start)
    found = torch.tensor([float(kept_bytes(model, image)), min(seconds)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    kept, fastest = found.tolist()
    return {"attention": kind, "tokens": sides**2, "ranks": ranks, "kept_bytes": int(kept), "seconds": fastest}


def on_rank(rank: int, ranks: int, sides: tuple[int, ...], store: str, result: str) -> None:
    """All cases on one of the ranks; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = [row(kind, side, ranks) for kind in KINDS for side in sides]
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.destroy_process_group()
