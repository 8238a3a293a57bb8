"""One rank: takes steps with a strategy and counts bytes, those of the update by the memory profiler's own events."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fullframe as ff
from benchmarks.networks import convnext_tiny
from fullframe.model.parallelize_for import parallelize_for
from fullframe.simulation.memory.trace import storages
from fullframe.techniques.optimizers import build_optimizer
from tests.simulation.real_steps import held_bytes

STEPS = 3  # of which the last is measured; optimizers make their state in the first
SHAPE = (2, 3, 64, 64)  # small: activations are not the question


def loss(model: nn.Module, image: Tensor) -> Tensor:
    """Any loss will do."""
    return model(image).last_hidden_state.square().mean()  # type: ignore[no-any-return]


def on_rank(rank: int, ranks: int, store: str, result: str, fields: dict[str, Any]) -> None:
    """Measure `ff.Strategy(**fields)` and let rank 0 write the larger counts of the ranks."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    counts = bytes_per_parameter(ff.Strategy(**fields))
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, counts)
    if rank == 0:
        Path(result).write_text(json.dumps({name: max(found[name] for found in everywhere) for name in counts}))
    dist.destroy_process_group()


def bytes_per_parameter(strategy: ff.Strategy) -> dict[str, float]:
    """Bytes on this rank over the model's number of parameters."""
    plain = convnext_tiny()
    total = sum(p.numel() for p in plain.parameters())
    model = parallelize_for(
        strategy,
        plain,
        ff.init_mesh(),
        find_unused_parameters=True,  # the pooled output's norm
    )
    optimizer = build_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), model, strategy)
    step = ff.TrainStep(model, loss, optimizer, strategy)
    gradients = _watch_gradients(model)
    temporaries: list[int] = []
    for number in range(STEPS):
        if number == STEPS - 1:
            gradients.clear()
            optimizer.step = _profiled(optimizer, temporaries)  # type: ignore[method-assign]
        step(torch.randn(SHAPE))
    counts = {
        "parameter": sum(map(_local_bytes, model.parameters())),
        "gradient": max(gradients) if strategy.update_in_backward else _gradient_bytes(model),
        "state": _state_bytes(optimizer),
        "temporary": max(temporaries),
    }
    return {name: count / total for name, count in counts.items()}


def _watch_gradients(model: nn.Module) -> list[int]:
    """Grows by the bytes of all gradients that are there, each time one has come."""
    seen: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(_gradient_bytes(model)))
    return seen


def _gradient_bytes(model: nn.Module) -> int:
    return sum(_local_bytes(p.grad) for p in model.parameters() if p.grad is not None)


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(storage.nbytes() for value in values for storage in storages(value))


def _profiled(optimizer: torch.optim.Optimizer, peaks: list[int]) -> Callable[[], Any]:
    """The optimizer's `step`, which adds to `peaks` by how much the allocated bytes rise while it runs.

    Where parameters are updated one by one, only for the largest: starting the profiler takes long.
    """
    step = optimizer.step
    largest = max(p.numel() for group in optimizer.param_groups for p in group["params"])

    def run() -> Any:
        if not any(p.numel() == largest for group in optimizer.param_groups for p in group["params"]):
            return step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = step()
        peaks.append(max(held_bytes(profiler), default=0))
        return result

    return run
