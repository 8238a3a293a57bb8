"""A loop with Accelerate: device, precision, accumulation, optimizer are its own, model and batches are fullframe's.

`accelerator.prepare(model)` would wrap the model in a DDP of its own, which knows no split tensors: `ff.parallelize`
stands in its place, and `ff.ShardedLoader` in that of a prepared loader.
"""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

import fullframe as ff
from examples.shapes import Network, Shapes


def train(mixed_precision: str = "no", accumulate: int = 1, epochs: int = 3) -> list[float]:
    """The loss of every batch, the same on all ranks."""
    mesh = ff.init_mesh(width=int(os.environ.get("WORLD_SIZE", "1")))  # before Accelerate, which takes what is there
    accelerator = Accelerator(
        cpu=mesh.device_type == "cpu", mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate
    )

    torch.manual_seed(0)
    model = ff.parallelize(Network().to(accelerator.device), mesh)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = ff.ShardedLoader(DataLoader(Shapes(), batch_size=4), mesh)
    accelerator.register_for_checkpointing(loader)  # where it stands goes into accelerator.save_state

    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.cross_entropy(model(batch["image"]), batch["mask"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.print(losses)
    return losses


if __name__ == "__main__":
    train()
