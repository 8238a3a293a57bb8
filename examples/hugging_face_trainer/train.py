"""Training by Hugging Face's Trainer: its loop, schedule, logging and checkpoints; model and batches are fullframe's.

The Trainer would wrap the model in a DDP that knows no split tensors, and give every rank other samples. `Split` keeps
it from both.
"""

import os
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import fullframe as ff
from examples.shapes import Network, Shapes


class Split(Trainer):
    """A Trainer whose `model` comes from `ff.parallelize`, and whose batches come from `loader`."""

    def __init__(self, *args: Any, loader: ff.ShardedLoader, **options: Any):
        super().__init__(*args, **options)
        self.loader, self.losses = loader, []
        self.accelerator.prepare_model = lambda model, **options: model  # it is under DDP as it is

    def get_train_dataloader(self) -> Any:
        return self.loader

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Tensor:
        loss = F.cross_entropy(model(inputs["image"]), inputs["mask"])
        self.losses.append(loss.item())
        return loss


def train(epochs: int = 3, folder: str | None = None) -> list[float]:
    """The loss of every step, the same on all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = ff.init_mesh(width=ranks)  # before the Trainer, which takes the process group that is there
    torch.manual_seed(0)
    model = ff.parallelize(Network(), mesh)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=folder or scratch,
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=mesh.device_type == "cpu",
            remove_unused_columns=False,
        )
        loader = ff.ShardedLoader(DataLoader(Shapes(), batch_size=4), mesh)
        trainer = Split(model, arguments, loader=loader)
        trainer.train()
    return trainer.losses


if __name__ == "__main__":
    print(train())
