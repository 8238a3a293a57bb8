"""A loop with Accelerate: device, precision, accumulation, optimizer are its own, model and batches are fullframe's.

`accelerator.prepare(model)` would wrap the model in a DDP of its own, which knows no split tensors: `ff.parallelize`
stands in its place, and `ff.ShardedLoader` in that of a prepared loader.
"""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import fullframe as ff
from examples.shapes import Network, Shapes


def train(
    mixed_precision: str = "no",
    accumulate: int = 1,
    epochs: int = 3,
    resume_from: str | None = None,
    save_to: str | None = None,
) -> list[float]:
    """The loss of every batch, the same on all ranks; goes on from one saved state, and saves its own."""
    mesh = ff.init_mesh(width=int(os.environ.get("WORLD_SIZE", "1")))  # before Accelerate, which takes what is there
    accelerator = Accelerator(
        cpu=mesh.device_type == "cpu",
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=accumulate,
        # Batches are those of the whole job: without it a prepared scheduler steps once for each process.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )

    torch.manual_seed(0)
    model = ff.parallelize(Network().to(accelerator.device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    loader = ff.ShardedLoader(DataLoader(Shapes(), batch_size=4), mesh)
    # accelerator.save_state writes what was prepared and what is registered: here the weights, and where the loader is.
    accelerator.register_for_checkpointing(model, loader)
    if resume_from is not None:
        accelerator.load_state(resume_from)

    losses = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.cross_entropy(model(batch["image"]), batch["mask"])
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if save_to is not None:
        accelerator.save_state(save_to)
    accelerator.print(losses)
    return losses


if __name__ == "__main__":
    train()
