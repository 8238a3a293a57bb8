"""Training by Hugging Face's Trainer: its loop, schedule, logging, evaluation and checkpoints; model and batches are
fullframe's.

The Trainer would wrap the model in a DDP that knows no split tensors, give every rank other samples, and gather over
all ranks. `Split` keeps it from that.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import fullframe as ff
from examples.shapes import Network, Shapes


class Split(Trainer):
    """A Trainer whose `model` comes from `ff.parallelize`; batch sizes are those of the whole job."""

    def __init__(self, model: nn.Module, args: TrainingArguments, mesh: dist.DeviceMesh, **options: Any):
        args._n_gpu = 1  # one process is given all GPUs of the machine, for nn.DataParallel, otherwise
        super().__init__(model, args, **options)
        self.mesh, self.losses = mesh, []
        self.accelerator.prepare_model = lambda model, **options: model  # it is under DDP as it is
        self.model_accepts_loss_kwargs = False  # else accumulated batches that have "labels" are added, not averaged
        self.gather_function = self.accelerator.gather_for_metrics = self.over_replicas

    def loader(self, data: Dataset[Any], batch_size: int) -> Any:
        return ff.ShardedLoader(DataLoader(data, batch_size=batch_size), self.mesh)

    def get_train_dataloader(self) -> Any:
        self.train_loader = self.loader(self.train_dataset, self.args.train_batch_size)
        return self.train_loader

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        """The loader goes on in the middle of an epoch too, where the Trainer would skip batches of a sampler."""
        epochs, batches = super()._init_training_state(*args, **options)
        position = {"epoch": epochs, "position": batches}
        self.train_loader.load_state_dict(self.train_loader.state_dict() | position)
        transformers.trainer.skip_first_batches = lambda loader, batches: loader
        return epochs, batches

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.loader(eval_dataset or self.eval_dataset, self.args.eval_batch_size)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
        with self.accelerator.autocast():  # which `prepare_model` would put around the model
            scores = model(inputs["image"])
            loss = F.cross_entropy(scores, inputs["labels"])
        if model.training:
            self.losses.append(self.over_replicas(loss.detach().reshape(1)).mean().item())
        return (loss, {"scores": scores}) if return_outputs else loss

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        found = super().prediction_step(*args, **options)
        return tree_map_only(ff.SpatialTensor, ff.SpatialTensor.full, found)

    def over_replicas(self, found: Any) -> Any:
        """Whole tensors, alike on the ranks of a replica, one after the other along their first dim."""
        group, replicas = self.mesh.get_group("data"), self.mesh["data"].size()

        def gathered(one: Tensor) -> Tensor:
            parts = [torch.empty_like(one) for _ in range(replicas)]
            dist.all_gather(parts, one.contiguous(), group)
            return torch.cat(parts)

        return tree_map_only(Tensor, gathered, found)


class Labelled(Shapes):
    """With the name that the Trainer knows labels by."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {"image": sample["image"], "labels": sample["mask"]}


def measured(found: Any) -> dict[str, float]:
    """The share of pixels that are right, and of how many images."""
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()), "images": len(found.label_ids)}


def train(width: int | None = None, resume: str | None = None, **options: Any) -> tuple[list[float], dict[str, float]]:
    """The loss of every batch, and what the evaluation after the last gives, the same on all ranks."""
    # The mesh is made before the Trainer, which takes the process group that is there.
    mesh = ff.init_mesh(width=width or int(os.environ.get("WORLD_SIZE", "1")))
    torch.manual_seed(0)
    model = ff.parallelize(Network(), mesh)
    with tempfile.TemporaryDirectory() as scratch:
        defaults = {
            "output_dir": scratch,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.01,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": mesh.device_type == "cpu",
            "remove_unused_columns": False,
            "label_names": ["labels"],
        }
        arguments = TrainingArguments(**{**defaults, **options})
        trainer = Split(
            model, arguments, mesh, train_dataset=Labelled(), eval_dataset=Labelled(), compute_metrics=measured
        )
        trainer.train(resume_from_checkpoint=resume)
        measures = trainer.evaluate()
    return trainer.losses, measures


if __name__ == "__main__":
    print(train())
