"""A user's script: every public name, as the documents use them."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import fullframe as ff


class Frames(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.randn(3, 32, 64), "mask": torch.zeros(32, 64, dtype=torch.long)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(x)
        return features


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    prediction: Tensor = model(batch["image"])
    return F.cross_entropy(prediction, batch["mask"])


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def recipe() -> ff.Recipe:
    return ff.Recipe(model=Network, loss=loss, optimizer=optimizer, data=Frames, batch_size=4)


def own_loop() -> None:
    mesh = ff.init_mesh(height=1, width=2)
    model = ff.parallelize(Network(), mesh, unsupported="gather")
    loader = ff.ShardedLoader(DataLoader(Frames(), batch_size=4), mesh)
    chosen = optimizer(model.parameters())
    watch = ff.watch_leaks(model=model)
    for batch in loader:
        value = loss(model, batch)
        value.backward()  # pyright: ignore[reportUnknownMemberType]  # torch has no types for its arguments
        chosen.step()
        chosen.zero_grad()
        watch.step()
    for leak in watch.leaks:
        print(leak.text, leak.bytes_per_step)
    stream = ff.ShardedStream([torch.zeros(4, 3, 32, 64)], mesh, weighted=True)
    print([batch.shape for batch in stream], stream.weight)
    x = ff.shard(torch.zeros(1, 3, 32, 64), mesh)
    print(
        x.local.shape, x.full().shape, ff.full(x).shape, [str(placement) for placement in x.placements], x.device_mesh
    )
    whole: Tensor = ff.scatter(None, mesh, src=0)
    part = ff.from_local(x.local, mesh, like=x)
    print(isinstance(whole, ff.SpatialTensor), part.shape)


def own_steps(model: nn.Module) -> None:
    strategy = ff.Strategy(width=2, precision="bf16", microbatches=2)
    step = ff.TrainStep(model, loss, optimizer(model.parameters()), strategy)
    record = step({"image": torch.zeros(4, 3, 32, 64), "mask": torch.zeros(4, 32, 64, dtype=torch.long)})
    print(record.loss, record.grad_norm, record.skipped, record.seconds, strategy.ranks, strategy.to_json())


def double(x: Tensor) -> Tensor:
    return 2 * x


@ff.rule(double)
def rule_of_double(function: object, x: ff.SpatialTensor) -> Tensor:
    return x * 2


def planned() -> None:
    plans = ff.plan(recipe(), "4xT4", precisions=["fp32", "fp16"])
    best = plans[0]
    if best.fits and best.prediction is not None:
        print(best.reason, best.samples_per_second, best.headroom_bytes, best.prediction.peak_bytes)
    prediction = ff.simulate(recipe(), ff.Strategy(width=2), "A100-80GB")
    print(prediction.bytes["activation"], prediction.step_seconds, prediction.to_json())


def trained(run_dir: Path) -> nn.Module:
    try:
        return ff.fit(recipe(), ff.Strategy(width=2), run_dir, resume="auto", on_message=print)
    except ff.UnsupportedOp as error:
        print(error.function, error.fix, error.module)
        raise
    except ff.FullframeError as error:
        raise SystemExit(str(error)) from error


def iterated(x: Tensor) -> Tensor:
    many = ff.unroll(Network(), 8, recompute="nested")
    fixed = ff.fixed_point(Network(), tolerance=1e-3)
    state: Tensor = many(x)
    end: Tensor = fixed(state)
    print(fixed.solved)
    return end


def shown() -> None:
    found = ff.report("runs/first")
    print(found.findings, found.save("page.html"), ff.__version__)
