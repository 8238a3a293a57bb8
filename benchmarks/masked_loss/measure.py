"""The part that runs on the 2 ranks: one loss in four spellings, alone and behind a network, timed in turn."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from benchmarks.networks import UNet
from benchmarks.timing import Timed, interleaved, ratio

RANKS = 2
SHARES = (0.05, 0.5, 0.95)  # of the pixels that are valid: a lidar's, a stereo camera's, nearly all
Loss = Callable[[Tensor, Tensor], Tensor]


def unmasked(pred: Tensor, target: Tensor) -> Tensor:
    """Over all pixels."""
    return F.smooth_l1_loss(pred, target)


def indexed(share: float) -> Loss:
    """By boolean indexing, as it is usually written."""

    def loss(pred: Tensor, target: Tensor) -> Tensor:
        mask = target < share
        return F.smooth_l1_loss(pred[mask], target[mask])

    return loss


def selected(share: float) -> Loss:
    """The same number by `torch.where`, which picks no elements."""

    def loss(pred: Tensor, target: Tensor) -> Tensor:
        mask = target < share
        each = F.smooth_l1_loss(pred, target, reduction="none")
        return torch.where(mask, each, 0).sum() / mask.sum()

    return loss


def step(model: Callable[[Tensor], Tensor], image: Tensor, target: Tensor, loss: Loss) -> Callable[[], None]:
    """One forward and backward; of several channels the first is the prediction."""
    return lambda: loss(model(image)[:, :1], target).backward()


def table(
    name: str, shape: tuple[int, ...], build: Callable[[], nn.Module] | None, rounds: int
) -> list[dict[str, Any]]:
    """One row for each share of valid pixels; without a network the map itself is what is trained."""
    mesh, rows = ff.init_mesh(width=RANKS), []
    torch.manual_seed(1)
    image, target = torch.randn(shape), torch.rand(shape[0], 1, *shape[2:])
    if build is None:
        image = image[:, :1].clone().requires_grad_()
        alone = split = nn.Identity()
    else:
        torch.manual_seed(2)
        alone, split = build(), ff.parallelize(build(), mesh)
    parts = ff.shard(image.detach(), mesh), ff.shard(target, mesh)
    parts[0].requires_grad_(image.requires_grad)

    def drop_gradients() -> None:
        for model in (alone, split):
            model.zero_grad(set_to_none=True)
        if image.requires_grad:
            image.grad = parts[0].grad = None

    for share in SHARES:
        losses = {"all pixels": unmasked, "mask": indexed(share), "where": selected(share)}
        variants = [Timed(f"split, {kind}", step(split, *parts, loss)) for kind, loss in losses.items()]
        first = dist.get_rank() == 0
        variants += [
            Timed(f"one process, {kind}", step(alone, image, target, losses[kind]) if first else None)
            for kind in ("all pixels", "mask")
        ]
        seconds = interleaved(variants, rounds, drop_gradients)
        rows.append(
            {
                "network": name,
                "shape": list(shape),
                "share": share,
                "rounds": rounds,
                "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
                "split_over_all_pixels": ratio(seconds["split, mask"], seconds["split, all pixels"]),
                "split_over_where": ratio(seconds["split, mask"], seconds["split, where"]),
                "one_process_over_all_pixels": ratio(seconds["one process, mask"], seconds["one process, all pixels"]),
                "speedup": ratio(seconds["one process, mask"], seconds["split, mask"]),
            }
        )
    return rows


def on_rank(rank: int, store: str, result: str, quick: bool) -> None:
    """Everything, on one of the ranks; rank 0 leaves its findings as JSON in the file `result`."""
    import json

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    rows = table("none", (1, 3, 512, 1024), None, 5 if quick else 41)
    rows += table("UNet", (1, 3, 128, 256), UNet, 3 if quick else 9)
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
