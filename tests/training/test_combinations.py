"""Splits, replicas, precision, microbatches, recompute, sharding: any of them together train as one process does.

Five optimizer steps against plain PyTorch with the whole batch. The network has repeated blocks and group norm: batch
norm takes its statistics over one replica's microbatch, so that with it those two would change the numbers.
"""

import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from fullframe.model.parallelize_for import parallelize_for
from fullframe.model.sharding.values import is_sharded, whole_value
from fullframe.techniques.optimizers import build_optimizer
from tests.rank_group import rank_group
from tests.training.blocks import loss as exact_loss

BATCH, STEPS = 6, 5
MESHES = {
    "split 1x2": {"width": 2},
    "split 2x2": {"height": 2, "width": 2},
    "2 replicas x 1x2": {"data": 2, "width": 2},
}

# Error of the parameters' change, relative to it in float64; one process with bf16 has 0.0032.
EXACT, BF16 = 1e-12, 0.005


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spatial, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.mix = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.gelu(self.norm(self.spatial(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(image)))
        return F.interpolate(x, size=image.shape[-2:], mode="bilinear")


def network(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Targets with holes (-1), of another share in every sample."""
    generator = torch.Generator().manual_seed(step)
    image = torch.randn(BATCH, 3, 9, 14, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(-1, 4, (BATCH, 9, 14), generator=generator)
    for sample in range(BATCH):
        target[sample, :, : sample * 2] = -1
    return {"image": image, "target": target}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    used = batch["target"] >= 0
    values = F.cross_entropy(model(batch["image"]).float(), torch.where(used, batch["target"], 0), reduction="none")
    return torch.where(used, values, 0.0).sum(), used.sum()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def settings(precision: str):
    """Data type, loss and optimizer. AdamW divides by the gradient's own size, rounding included; SGD does not."""
    return (torch.float64, exact_loss, adamw) if precision == "fp32" else (torch.float32, loss, momentum)


@cache
def one_process(precision: str) -> list[Tensor]:
    """The change of each parameter, by plain PyTorch in float64."""
    model = network()
    optimizer = settings(precision)[2](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = exact_loss(model, batch_of(step))
        (total / count).backward()
        optimizer.step()
    return [p.detach() - q.detach() for p, q in zip(model.parameters(), network().parameters(), strict=True)]


def trained(strategy: ff.Strategy) -> tuple[list[Tensor], bool, list[float]]:
    """The change of each parameter, whether parameters are sharded, and the losses."""
    dtype, loss_of, make = settings(strategy.precision)
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    model = parallelize_for(
        strategy,
        network(dtype),
        mesh,
    )
    step = ff.TrainStep(model, loss_of, build_optimizer(make, model, strategy), strategy)
    replica, share = mesh.get_local_rank("data"), BATCH // strategy.data
    losses = []
    for number in range(STEPS):
        batch = {name: value[replica * share :][:share] for name, value in batch_of(number, dtype).items()}
        if strategy.height * strategy.width > 1:
            batch = {name: ff.shard(value, mesh) for name, value in batch.items()}
        record = step(batch)
        assert not record.skipped
        losses.append(record.loss)
    pairs = zip(model.parameters(), network().parameters(), strict=True)
    sharded = all(map(is_sharded, model.parameters()))
    return [whole_value(p.detach()).double() - q.detach() for p, q in pairs], sharded, losses


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference over the norm, of all parameters together."""
    differences = torch.stack([(f - e).norm() for f, e in zip(found, expected, strict=True)])
    return float(differences.norm() / torch.stack([e.norm() for e in expected]).norm())


CHOICES = (tuple(MESHES), ("fp32", "bf16"), (1, 3), ("none", "blocks"), (False, True))


def cases():
    """All combinations. Every other one is slow: the rest hold any four of the choices together."""
    for chosen in itertools.product(*(enumerate(values) for values in CHOICES)):
        numbers, case = zip(*chosen, strict=True)
        yield pytest.param(*case, marks=pytest.mark.slow) if sum(numbers) % 2 else case


@pytest.mark.parametrize(("mesh", "precision", "microbatches", "recompute", "sharded"), cases())
def test_five_steps_are_those_of_one_process(mesh, precision, microbatches, recompute, sharded) -> None:
    strategy = ff.Strategy(
        **MESHES[mesh],
        precision=precision,
        microbatches=microbatches,
        recompute=recompute,
        shard_parameters=sharded,
    )
    results = rank_group(strategy.ranks).run(trained, strategy)
    for found, is_sharded_, losses in results:
        assert is_sharded_ == sharded
        assert losses == results[0][2]
        assert error(found, one_process(precision)) < (EXACT if precision == "fp32" else BF16)


def test_the_tolerance_of_bf16_is_that_of_one_process() -> None:
    """Half precision is really used, and one process alone is as far from float64."""
    found, _, _ = trained(ff.Strategy(precision="bf16"))
    assert BF16 / 2 < error(found, one_process("bf16")) < BF16
