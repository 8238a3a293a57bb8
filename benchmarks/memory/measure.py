"""One fresh process: its peak of memory, by the kernel's count, from building the model to the end of the second step.

`python -m benchmarks.memory.measure TECHNIQUE OPTIMIZER RANKS RANK STORE` prints `{"baseline_bytes", "peak_bytes"}`;
TECHNIQUE "plain" is PyTorch without fullframe.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo  # 70 MiB of code that DDP and every optimizer load: the process's, not the technique's
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import fullframe as ff
from benchmarks.networks import convnext_tiny
from benchmarks.spatial_memory.measure import forget_peak, status_bytes
from benchmarks.spatial_memory.models import feature_loss

SHAPE = (1, 3, 512, 1024)
BUDGET_BYTES = 544 << 20  # in all: half of what one process saves for backward, shared by the ranks
STEPS = 2  # the first makes the optimizer's state, the second has it from the start
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-4),
    "sgd": lambda parameters: SGD(parameters, lr=1e-4, momentum=0.9),
    "adafactor": lambda parameters: Adafactor(parameters, lr=1e-4),
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {"recompute": "blocks"},
    "budget": {"recompute": "budget"},
    "offload": {"offload": True},
}


def loss(model: nn.Module, image: Tensor) -> Tensor:
    """Reads the last feature map and the pooled output, so that every parameter has a gradient."""
    return feature_loss(model, image, image)


def train_plain(optimizer_name: str, image: Tensor, model: nn.Module, steps: int) -> None:
    """The loop as one writes it without fullframe."""
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for _ in range(steps):
        loss(model, image).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_fullframe(technique: str, optimizer_name: str, image: Tensor, model: nn.Module, ranks: int) -> None:
    """The same through `ff.TrainStep`, the image split on its width."""
    options = dict(TECHNIQUES[technique])
    if technique == "budget":
        options["recompute_budget_bytes"] = BUDGET_BYTES // ranks
    mesh = ff.init_mesh(width=ranks)
    model = ff.parallelize(model, mesh)
    strategy = ff.Strategy(width=ranks, **options)
    step = ff.TrainStep(model, loss, OPTIMIZERS[optimizer_name](model.parameters()), strategy)
    part = ff.shard(image, mesh) if ranks > 1 else image
    for _ in range(STEPS):
        step(part)


def measured(technique: str, optimizer_name: str, ranks: int) -> dict[str, int]:
    """Resident bytes before there is a model, and the most there were until the second step was done.

    Two tiny steps of a model that is thrown away come first, so that what any process pays once (code, oneDNN's
    kernels) is in the baseline.
    """
    torch.manual_seed(1)
    image = torch.randn(SHAPE)
    train_plain(optimizer_name, image[..., :64, :64].clone(), convnext_tiny().train(), steps=2)
    forget_peak()
    baseline = status_bytes("VmRSS")
    model = convnext_tiny().train()
    if technique == "plain":
        train_plain(optimizer_name, image, model, STEPS)
    else:
        train_fullframe(technique, optimizer_name, image, model, ranks)
    return {"baseline_bytes": baseline, "peak_bytes": status_bytes("VmHWM")}


def main(technique: str, optimizer_name: str, ranks: int, rank: int, store: str) -> None:
    """Joins the other rank where there is one, measures, prints."""
    torch.set_num_threads(1)
    # DDP's remark about the strides of a depthwise weight's gradient; and that a CPU has nothing to offload to.
    warnings.simplefilter("ignore")
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    print(json.dumps(measured(technique, optimizer_name, ranks)))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
