"""A training step on the CUDA-like device: the host waits for it once, for the numbers by which the step is decided."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.simulation.fake.data_parallel import WithoutBuckets
from fullframe.training.step import TrainStep
from tests.cuda_like.device import counted, to_device
from tests.cuda_like.models import moved, one_rank
from tests.cuda_like.ranks import device_ranks
from tests.models.networks import FPN, UNet

# The one wait that is meant.
MEANT = ("training/host.py RealHost.read", "tolist")
# Facts, which ranks tell each other by gloo, on the host, where a job has gloo beside NCCL, as all that we start.
BY_GLOO = ("ranks/channel.py", "ranks/agreement.py")
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"microbatches": 2},
    "clipped, averaged": {"clip_norm": 0.1, "ema_decay": 0.9},
    "recomputed": {"recompute": "blocks", "recompute_modules": ("smooth",)},
}


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["labels"], ignore_index=4)


def summed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    outputs = [t for pair in model(batch["image"]) for t in pair]
    return sum(t.square().sum() for t in outputs), len(batch["image"])  # type: ignore[return-value]


def curious(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Looks at its own value."""
    loss = model(batch["image"]).square().mean()
    return loss if loss.item() > 0 else -loss


NETWORKS: dict[str, tuple[Any, Any]] = {
    "UNet": (UNet, cross_entropy), "FPN": (FPN, summed), "curious": (lambda: nn.Conv2d(3, 4, 3, padding=1), curious),
}  # fmt: skip


def _waits(network: str, options: dict[str, Any], optimizer: str) -> list[tuple[tuple[str, str], int]]:
    """What the host waits for in the sixth step of an inner rank of eight; in the first four operands are compared."""
    torch.manual_seed(0)
    build, loss = NETWORKS[network]
    with one_rank(4, 8):
        on = ff.init_mesh(height=2, width=2)
        model = ff.parallelize(moved(build()), on, data_parallel=WithoutBuckets)
        strategy = ff.Strategy(data=2, height=2, width=2, **options)
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
        step = TrainStep(model, loss, made, strategy)
        image = to_device(torch.randn(2, 3, 64, 96))
        labels = to_device(torch.randint(5, (2, 64, 96)))
        batch = {"image": ff.shard(image, on, check=False), "labels": ff.shard(labels, on, check=False)}
        for _ in range(5):
            step(batch)
        with counted() as counts:
            step(batch)
    found: dict[tuple[str, str], int] = {}
    for (why, line), times in counts.waits.items():
        if line.path in BY_GLOO:
            continue
        found[f"{line.path} {line.function}", why] = found.get((f"{line.path} {line.function}", why), 0) + times
    assert not counts.faults, counts.faults
    return list(found.items())


def waits(network: str, options: str, optimizer: str) -> dict[tuple[str, str], int]:
    found = dict(device_ranks().run(_waits, network, STEPS[options], optimizer)[0])
    assert found.pop(MEANT) == 1
    return found


def test_the_host_waits_once_a_step() -> None:
    asked = ("UNet", "plain", "SGD"), ("UNet", "microbatches", "AdamW"), ("FPN", "clipped, averaged", "AdamW")
    found = {step: waits(*step) for step in (*asked, ("FPN", "recomputed", "SGD"))}
    assert {step: places for step, places in found.items() if places} == {}


def test_a_loss_that_is_looked_at_is_found() -> None:
    assert any(why == "_local_scalar_dense" for _, why in waits("curious", "plain", "SGD"))
