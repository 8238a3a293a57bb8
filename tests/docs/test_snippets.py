"""Blocks of Python that stand alone on a page: they run as they are, and compute what is said beside them."""

import copy
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.docs.page import ROOT, blocks
from tests.rank_group import rank_group


def snippet(page: str, number: int, **names: Any) -> dict[str, Any]:
    """The names after the `number`-th block of a page that is no file of its own, run where `names` are known.

    A mesh is of two ranks, the smallest that splits what the page splits.
    """
    found = [b.text for b in blocks((ROOT / page).read_text()) if b.language == "python" and not b.title]
    text = found[number].replace("width=4", "width=2").replace("stages=2, width=2", "stages=2")
    exec(text.replace("depth=2, height=1, width=2", "depth=2, height=1"), names)
    return names


def frames(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(channels: int = 1, volume: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layer: Any = nn.Conv3d if volume else nn.Conv2d
    first, last = layer(3, 4, 3, padding=1), layer(4, channels, 3, padding=1)
    return nn.Sequential(first, nn.Tanh(), last).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network(3)

    def forward(self, state: Tensor, sinogram: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.layers(state)) + 0.1 * sinogram


def off(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))


def gradients_of(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def unrolled() -> float:
    """The largest difference from the plain loop, of results, losses and gradients."""
    import fullframe as ff

    page, block, state = "docs/techniques/unroll.md", Block(), frames(4, 3, 9, 14)
    known = {"ff": ff, "block": block, "start": state, "sinogram": frames(4, 3, 9, 14), "target": frames(4, 3, 9, 14)}
    for _ in range(14):
        state = block(state, known["sinogram"])
    loss = F.mse_loss(state, known["target"])
    loss.backward()
    one = gradients_of(block)

    here = snippet(page, 0, **known)
    assert here["deep"].solved.converged
    found = [off([here["net"](known["start"], known["sinogram"]), here["states"][-1]], [state, state])]
    there = snippet(page, 1, **known, criterion=F.mse_loss)
    found.append(off([there["loss"], *gradients_of(block)], [loss, *one]))
    there = snippet(page, 2, **there | {"criterion": lambda state, target: F.mse_loss(state, target, reduction="sum")})
    found.append(off([there["loss"] / state.numel(), *gradients_of(block)], [loss, *one]))
    return max(found)


def penalized() -> float:
    """A penalty on the gradient of an image, split and not."""
    import fullframe as ff

    page, one = "docs/how_it_works/gradients.md", network()
    many = ff.parallelize(copy.deepcopy(one), mesh := ff.init_mesh(width=2))
    whole = SimpleNamespace(shard=lambda image, mesh: image.clone())
    for model, names in ((one, whole), (many, ff)):
        snippet(page, 0, ff=names, torch=torch, model=model, image=frames(2, 3, 9, 13), mesh=mesh)
    return off(gradients_of(many), gradients_of(one))


def in_depth() -> float:
    import fullframe as ff

    plain, scan = network(2, volume=True), frames(2, 3, 5, 6, 7)
    labels = (frames(2, 5, 6, 7) > 0.5).long()
    loader = DataLoader([{"scan": scan[0]}] * 2, batch_size=2)  # type: ignore[arg-type]
    there = snippet(
        "docs/techniques/volumes.md", 0, ff=ff, model=copy.deepcopy(plain), loader=loader, scan=scan, labels=labels
    )
    assert next(iter(there["loader"]))["scan"].shape == scan.shape
    split, one = F.cross_entropy(there["model"](there["x"]), there["y"]), F.cross_entropy(plain(scan), labels)
    for loss in (split, one):
        loss.backward()
    return off([split, *gradients_of(there["model"])], [one, *gradients_of(plain)])


def from_horovod() -> float:
    import fullframe as ff

    plain, image = network(), frames(1, 3, 8, 9)
    there = snippet("docs/coming_from/horovod.md", 0, ff=ff, model=copy.deepcopy(plain))
    there["model"](ff.shard(image, there["mesh"])).square().mean().backward()
    plain(image).square().mean().backward()
    return off(gradients_of(there["model"]), gradients_of(plain))


def read_in_parts() -> float:
    """What a data set that reads parts gives, and a metric of what is split, against the whole of it."""
    import torchmetrics

    import fullframe as ff

    page, mesh = "docs/techniques/loading.md", ff.init_mesh(width=2)
    kind = snippet(page, 0, Dataset=Dataset, random=random, HEIGHT=9, WIDTH=14)["Frames"]
    kind.__len__, kind.images, kind.labels = lambda self: 4, frames(4, 3, 9, 14), torch.arange(4)
    loader = ff.ShardedLoader(DataLoader(kind(), batch_size=2), mesh)
    factors = [batch["image"].full() / kind.images[batch["label"]] for batch in loader]
    spread = max(float((f.amax((1, 2, 3)) - f.amin((1, 2, 3))).max()) for f in factors)  # one number for each frame

    there = snippet(page, 2, torchmetrics=torchmetrics, ff=ff)
    plain, image = network(19), frames(1, 3, 9, 14)
    mask = (frames(1, 9, 14) * 19).long()
    there["evaluate"](
        ff.parallelize(copy.deepcopy(plain), mesh), {"image": ff.shard(image, mesh), "mask": ff.shard(mask, mesh)}
    )
    split = there["overlap"].compute()
    there["overlap"].reset()
    there["evaluate"](plain, {"image": image, "mask": mask})
    return max(spread, float((split - there["overlap"].compute()).abs()))


def test_blocks_on_two_ranks_compute_what_one_process_computes() -> None:
    for case in (unrolled, penalized, in_depth, from_horovod, read_in_parts):
        found = rank_group(2).run(case)
        assert max(found) < 1e-9, (case.__name__, found)


def test_boxes_are_cut_with_their_images() -> None:
    cut = snippet("docs/techniques/accumulation.md", 0)["cut"]
    batch = {"img": torch.arange(4), "bboxes": torch.arange(5), "batch_idx": torch.tensor([0, 0, 2, 3, 3])}
    found = [(part["img"].tolist(), part["bboxes"].tolist(), part["batch_idx"].tolist()) for part in cut(batch, 2)]
    assert found == [([0, 1], [0, 1], [0, 0]), ([2, 3], [2, 3, 4], [0, 1, 1])]


def test_groups_by_name() -> None:
    from fullframe.recipe import Parameters

    model = nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 1)})
    made = snippet("docs/techniques/optimizers.md", 0, torch=torch)["optimizer"](Parameters(model.named_parameters()))
    assert [(group["lr"], [p.numel() for p in group["params"]]) for group in made.param_groups] == [
        (1e-4, [6, 3]),
        (1e-3, [3, 1]),
    ]
