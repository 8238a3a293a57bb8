"""A loop of one's own whose loss leaves pixels out, over data replicas: divided by the count of the whole batch.

Each replica leaves out another number of pixels, so the mean of the replicas' means is not the mean over the batch,
here as under DistributedDataParallel.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import fullframe as ff
from examples.shapes import Network, Shapes

IGNORED = 0


def mean_over_batch(summed: Tensor, count: Tensor, mesh: DeviceMesh) -> Tensor:
    """What this replica adds to the mean over the whole batch, times the replicas.

    Its gradient, averaged over the ranks as `parallelize` does, is that of the mean; so is its value.
    """
    counted = count.clone()
    if mesh.size(0) > 1:
        dist.all_reduce(counted, group=mesh.get_group("data"))
    return summed * mesh.size(0) / counted


def train(width: int = 1, epochs: int = 3) -> list[float]:
    """The loss of every batch, as this replica has it."""
    mesh = ff.init_mesh(width=width)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ff.parallelize(Network().to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ff.ShardedLoader(DataLoader(Shapes(), batch_size=4), mesh)

    losses = []
    for _ in range(epochs):
        for batch in loader:
            mask = batch["mask"]
            summed = F.cross_entropy(model(batch["image"]), mask, ignore_index=IGNORED, reduction="sum")
            loss = mean_over_batch(summed, (mask != IGNORED).sum(), mesh)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train(width=int(os.environ.get("WIDTH", "1"))))
