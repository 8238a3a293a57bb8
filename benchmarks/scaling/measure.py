"""The part that runs on the ranks: training steps with a loader and an optimizer, plain DDP's and ours in turn."""

import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fullframe as ff
from benchmarks.networks import UNet, convnext_tiny
from benchmarks.timing import Timed, interleaved, ratio

NETWORKS: dict[str, Callable[[], nn.Module]] = {"ConvNeXt-tiny": convnext_tiny, "UNet": UNet}
CASES = (("ConvNeXt-tiny", (2, 3, 128, 256)), ("UNet", (2, 3, 128, 256)))  # images a replica
_SAMPLES = 4096  # an epoch never ends


class Frames(Dataset[dict[str, Tensor]]):
    """The same image each time, copied as a decoder would write it."""

    def __init__(self, shape: tuple[int, ...]):
        self._image = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self._image.clone()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over everything the network gives."""
    output = model(batch["image"])
    if isinstance(output, Tensor):
        return output.square().mean()
    return output.last_hidden_state.square().mean() + output.pooler_output.tanh().mean()


def plain_steps(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Iterator[float]:
    """The loop that everybody writes: DDP, a distributed sampler, the loss read after each step."""
    data = Frames(shape[1:])
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in DataLoader(data, shape[0], sampler=DistributedSampler(data, shuffle=True)):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield value.item()


def our_steps(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Iterator[float]:
    """`TrainStep` and `ShardedLoader`: with the agreement of all ranks on loss, gradient norm and finiteness."""
    ranks, mesh = dist.get_world_size(), ff.init_mesh()
    model = ff.parallelize(build(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = ff.TrainStep(model, loss, optimizer, ff.Strategy(data=ranks))
    read = DataLoader(Frames(shape[1:]), shape[0] * ranks, shuffle=True)
    for batch in ff.ShardedLoader(read, mesh):
        yield step(batch).loss


def rows(rounds: int) -> list[dict[str, Any]]:
    """One for each network, on the ranks that there are."""
    found = []
    for network, shape in CASES:
        plain, ours = plain_steps(NETWORKS[network], shape), our_steps(NETWORKS[network], shape)
        variants = [Timed("plain", lambda steps=plain: next(steps)), Timed("ours", lambda steps=ours: next(steps))]
        seconds = interleaved(variants, rounds, lambda: None)
        images = shape[0] * dist.get_world_size()
        found.append(
            {
                "network": network,
                "shape": list(shape),
                "ranks": dist.get_world_size(),
                "rounds": rounds,
                "plain_images_per_second": images / statistics.median(seconds["plain"]),
                "images_per_second": images / statistics.median(seconds["ours"]),
                "share_of_plain": ratio(seconds["plain"], seconds["ours"]),
            }
        )
    return found


def on_rank(rank: int, ranks: int, store: str, result: str, rounds: int) -> None:
    """All rows, on one of the ranks; rank 0 leaves them as JSON in the file `result`."""
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message="Grad strides do not match"
    )  # DDP's, of a depthwise weight; ours gets it too
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = rows(rounds)
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
