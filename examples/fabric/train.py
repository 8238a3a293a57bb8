"""A loop with Lightning Fabric: device, precision, optimizer and logging are Fabric's, model and batches fullframe's.

`fabric.setup(model)` would wrap the model in a DDP of Fabric's own, which knows no split tensors: `ff.parallelize`
stands in its place, and `ff.ShardedLoader` in that of `fabric.setup_dataloaders`.
"""

import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

import fullframe as ff
from examples.shapes import Network, Shapes


def train(precision: str = "32-true", epochs: int = 3) -> list[float]:
    """The loss of every step, the same on all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = ff.init_mesh(width=ranks)  # before Fabric, which takes the process group that is there
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator=mesh.device_type,
        strategy="ddp" if ranks > 1 else "auto",
        devices=local_ranks,
        num_nodes=ranks // local_ranks,
        precision=precision,
    )
    fabric.launch()

    torch.manual_seed(0)
    model = ff.parallelize(fabric.to_device(Network()), mesh)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = ff.ShardedLoader(DataLoader(Shapes(), batch_size=4), mesh)

    losses = []
    for _ in range(epochs):
        for batch in loader:
            with fabric.autocast():
                loss = F.cross_entropy(model(batch["image"]), batch["mask"])
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    fabric.print(losses)
    return losses


if __name__ == "__main__":
    train()
