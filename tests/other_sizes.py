"""Synchronised batch norm over two replicas whose images are of other sizes, and in one process."""

from typing import Any

import torch
from torch import Tensor, nn

import fullframe as ff

OTHER_SIZES = [((1, 7, 9), (3, 7, 9)), ((2, 7, 9), (1, 11, 13)), ((2, 7, 9), (2, 11, 1))]  # the last one's goes whole


def images_of(sizes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 3, h, w, generator=generator, dtype=torch.float64) for n, h, w in sizes]


def of_one_size_each(sizes: Any) -> Any:
    """Gradients and statistics of two replicas, one of whose losses also has a gradient's square."""
    mesh = ff.init_mesh(width=2)
    norm = nn.SyncBatchNorm(3, dtype=torch.float64)
    model = ff.parallelize(norm, mesh)
    x = ff.shard(images_of(sizes)[mesh.get_local_rank("data")].requires_grad_(), mesh)
    loss = (x * model(x).sin()).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var


def in_one_process(sizes: Any) -> Any:
    images = [x.requires_grad_() for x in images_of(sizes)]
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    flat = torch.cat([x.transpose(0, 1).flatten(1) for x in images], 1)
    loss = (flat * norm(flat[None])[0].sin()).sum()
    gradients = torch.autograd.grad(loss, images, create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    assert norm.weight.grad is not None and norm.bias.grad is not None
    return norm.weight.grad / 2, norm.bias.grad / 2, norm.running_mean, norm.running_var
