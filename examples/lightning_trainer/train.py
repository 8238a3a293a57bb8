"""Training by Lightning's Trainer: its loop, callbacks, logging and checkpoints; model and batches are fullframe's.

Lightning's own strategy for several processes would wrap the module in a DDP that knows no split tensors, and cut the
batches once more. `OneRank` tells it instead that each process works alone, but for what it writes and decides.
"""

import os
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

import fullframe as ff
from examples.shapes import Network, Shapes


class OneRank(SingleDeviceStrategy):
    """A process of the mesh: files and lines are the first rank's, decisions and objects are everyone's."""

    def __init__(self, mesh: dist.DeviceMesh):
        index = None if mesh.device_type == "cpu" else torch.accelerator.current_device_index()
        super().__init__(torch.device(mesh.device_type, index))
        self.mesh = mesh
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_distributed(self) -> bool:
        return True  # so that `self.log(..., sync_dist=True)` calls `reduce`

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        super().setup_environment()
        lightning.utilities.rank_zero.rank_zero_only.rank = self.global_rank

    def barrier(self, *args: Any, **options: Any) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        carried = [obj]
        dist.broadcast_object_list(carried, src)
        return carried[0]

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """What is logged with `sync_dist=True`: the mean over the replicas, whose ranks have the same."""
        if isinstance(tensor, Tensor):
            tensor = tensor / self.mesh["data"].size()  # a new one: Lightning goes on counting in what it hands over
            dist.all_reduce(tensor, group=self.mesh.get_group("data"))
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)


class Segmenter(lightning.LightningModule):
    """The network on the mesh; the loss of each step stays in `losses`."""

    def __init__(self, mesh: dist.DeviceMesh):
        super().__init__()
        torch.manual_seed(0)
        self.model = ff.parallelize(Network(), mesh)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(self.model(batch["image"]), batch["mask"])
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True, sync_dist=True)  # over replicas; in one it is whole on every rank
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(
    precision: str = "32-true", epochs: int = 3, folder: str | None = None, width: int | None = None
) -> list[float]:
    """The loss of every step on this rank's replica; a checkpoint in `folder` if given."""
    mesh = ff.init_mesh(width=width or int(os.environ.get("WORLD_SIZE", "1")))
    module = Segmenter(mesh)
    loader = ff.ShardedLoader(DataLoader(Shapes(), batch_size=4), mesh)
    trainer = lightning.Trainer(
        strategy=OneRank(mesh),
        accelerator=mesh.device_type,
        devices=1,
        use_distributed_sampler=False,
        precision=precision,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader)
    if folder is not None:
        trainer.save_checkpoint(os.path.join(folder, "last.ckpt"))
    return module.losses


if __name__ == "__main__":
    print(train())
