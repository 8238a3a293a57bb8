"""What a mask picks, in a simulation: every element, which a real step with a full mask holds as much as."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fullframe as ff
from fullframe.cli.application import run
from fullframe.errors import UnsupportedOp
from fullframe.simulation.fake.full_masks import FULL_MASKS
from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.spatial.selection import TAKEN_AS_FEW
from tests.rank_group import rank_group
from tests.simulation.fake.test_outcomes import Remembering
from tests.simulation.real_steps import peak_and_left
from tests.spatial.rules.test_masks import RECIPE
from tests.spatial.torchvision_kernels import torchvision_ops

ROWS, COLUMNS = 64, 96
BOXES = 200
COPY_BYTES = 2 * ROWS * COLUMNS // 2  # of a mask's part, by which a CPU knows it again, and a simulation does not
aten = torch.ops.aten


class Depth(nn.Module):
    """Per pixel, and again per pixel that a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 1))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        return self.out(x)[:, 0], self.head(self.norm(x.permute(0, 2, 3, 1)[mask]))[:, 0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By a mask, a mask of what it picked, in torch's order, by `masked_select` and by `nonzero`."""
    depth = batch["depth"]
    mask = depth > 0
    dense, sparse = model(batch["image"], mask)
    error = (dense[mask] - depth[mask]).abs()
    near = error[depth[mask] < 0.5]
    found = torch.where(mask)[1].float().mean()
    ordered = sparse.cumsum(0).square().mean() / (1 + found)
    return error.mean() + near.sum() / mask.sum() + dense.masked_select(mask).std() + ordered  # type: ignore[no-any-return]


def samples(share: float) -> list[dict[str, Tensor]]:
    """Four, whose depth is known in a share of the pixels."""
    generator = torch.Generator().manual_seed(0)
    image, depth, known = (torch.rand(2, *s, ROWS, COLUMNS, generator=generator) for s in ((3,), (), ()))
    depth = torch.where(known < share, depth + 0.01, 0)
    return [{"image": image[n % 2], "depth": depth[n % 2]} for n in range(4)]


def recipe(**changed: Any) -> ff.Recipe:
    fields: dict[str, Any] = {
        "model": Depth, "loss": loss, "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "data": lambda: samples(1.0), "batch_size": 2,
    }  # fmt: skip
    return ff.Recipe(**fields | changed)


def _counted(height: int, width: int, share: float) -> tuple[int, int]:
    data = samples(share)
    return peak_and_left(recipe(data=lambda: data), ff.Strategy(height=height, width=width))


def _measured(height: int, width: int, share: float) -> tuple[int, int]:
    """Bounds of the peak of the rank that holds most: what is left in its count was freed unseen, before or after."""
    for _ in range(6):
        found = rank_group(height * width).run(_counted, height, width, share)
        least, most = max(peak - left for peak, left in found), max(peak for peak, _ in found)
        if most < 1.005 * least:
            break
    return least, most


BY_MASKS: dict[str, Any] = {
    "nonzero": lambda x: aten.nonzero(x), "masked_select": lambda x: aten.masked_select(x[0, 0], x[:, :1] > -1),
    "index": lambda x: aten.index(x, [None, x[0] > -1]), "flat": lambda x: aten.index(x.flatten(), [x.flatten() > -1]),
    "at the end": lambda x: aten.index(x, [None, None, None, x[0, 0, 0] > -1]),
    "beside an index": lambda x: aten.index(x, [torch.zeros(12, dtype=torch.int64), None, x[0, 0] > -1]),
    "two of three, beside two numbers": lambda x: aten.index(x, [torch.arange(2), x[0, :, 0, 0].cumsum(0) < 3]),
    "two of three, beside a mask": lambda x: aten.index(x, [x[:, 0, 0, 0] > -1, x[0, :, 0, 0].cumsum(0) < 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_MASKS)
def test_an_outcome_has_the_shape_that_a_full_mask_gives(name: str) -> None:
    x = torch.ones(2, 3, 3, 4)
    expected, outcomes = BY_MASKS[name](x), Outcomes(fake := FakeTensorMode())
    with fake, Remembering(outcomes):
        found = BY_MASKS[name](torch.empty(2, 3, 3, 4))
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert outcomes.notes == {FULL_MASKS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_the_bytes_are_an_upper_bound_that_a_full_mask_meets(shape: tuple[int, int]) -> None:
    found = ff.simulate(recipe(), ff.Strategy(height=shape[0], width=shape[1]), "cpu", without=("context",))
    assert found.notes == (FULL_MASKS,)
    (least, full), (_, half) = (_measured(*shape, share) for share in (1.0, 0.4))
    assert full < 1.05 * least
    assert found.peak_bytes <= 1.06 * full
    assert 0.9999 * least <= found.peak_bytes + COPY_BYTES  # a few numbers of 8 bytes are not seen
    assert half < 0.7 * full


def test_a_recipe_with_masks_is_planned_and_the_assumption_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    for words in (["plan", "--gpus", "2xA100-80GB"], ["simulate", "--gpus", "4xcpu", "--width", "2"]):
        assert run([*words, str(path)]) == 0
        said = capsys.readouterr().out
        assert said.count("note: ") == said.count(FULL_MASKS) == 1


class Regions(nn.Module):
    """Reads a map where its best boxes are, of which `nms` keeps those that lie apart."""

    def __init__(self, nms: bool) -> None:
        super().__init__()
        self.nms = nms
        self.stem, self.score = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        best, place = self.score(x)[0].flatten().topk(BOXES)
        corner = torch.stack([place % COLUMNS, place // COLUMNS], dim=1).to(x.dtype)
        boxes = torch.cat([corner, corner + 0.4], dim=1)
        kept = torchvision_ops().nms(boxes, best, 0.5) if self.nms else torch.arange(BOXES)
        return x[0].flatten(1)[:, place[kept]].sin().mean() + best[kept].mean()


@pytest.mark.parametrize("width", [1, 2])
def test_a_step_with_nms_is_simulated_as_if_it_kept_all_boxes(width: int) -> None:
    found, without = (
        ff.simulate(recipe(model=lambda nms=nms: Regions(nms), loss=_of_regions), ff.Strategy(width=width), "cpu")
        for nms in (True, False)
    )
    assert found.notes == (FULL_MASKS,) and without.notes == ()
    assert found.peak_bytes == without.peak_bytes


def _of_regions(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["image"])  # type: ignore[no-any-return]


def _scattered(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["depth"] > 0
    dense, sparse = model(batch["image"], mask)
    return dense.masked_scatter(mask, sparse).mean()


def test_what_a_source_gives_to_a_mask_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOp, match=r"masked_scatter: .* which a simulation does not have"):
        ff.simulate(recipe(loss=_scattered), ff.Strategy(width=2), "A100-80GB")


@pytest.mark.parametrize("way", ["write", "read"])
def test_as_many_positions_as_a_mask_has_elements_may_be_few(way: str) -> None:
    """Lift-Splat's cells: features of kept points, one a cell, written at the cells; no more than these in truth."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        image = model.stem(batch["image"])  # type: ignore[operator]
        rows, cells = image.permute(0, 2, 3, 1).flatten(0, 2), batch["depth"].flatten()
        kept = cells > 0
        rows, cells = rows[kept], (cells[kept] * 36).long() % 36
        order = cells.argsort(stable=True)
        rows, cells = rows[order], cells[order]
        last = torch.cat([cells[1:] != cells[:-1], cells[:1] >= 0])
        grid = image.new_zeros(2, 16, 8, 6) if way == "write" else image[:, :, :8, :6] * 1
        cells = cells[last]
        if way == "read":
            return grid[cells * 0, :, cells // 6, cells % 6].square().mean()
        grid[cells * 0, :, cells // 6, cells % 6] = rows[last]
        return (grid * image[:, :, :8, :6]).square().mean()

    found = ff.simulate(recipe(loss=loss), ff.Strategy(width=2), "cpu", without=("context",))
    # What is written goes in turns, however much it is.
    assert set(found.notes) == ({FULL_MASKS, TAKEN_AS_FEW} if way == "read" else {FULL_MASKS})


class Pruned(nn.Module):
    """Channels by masks of its own, ordinary attributes: what they pick is no guess. `rows` is of more than 1,024."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16 if way == "write" else 6, 1, 1)
        self.way, self.keep, self.rows = way, torch.arange(16) % 8 < 3, torch.arange(32 * 64).view(32, 64) % 8 < 3
        self.weight = nn.Parameter(torch.ones(6, 16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.way == "write":
            weight = x.new_zeros(16, 16, 1, 1)
            weight[self.keep] = self.weight
            return self.out(nn.functional.conv2d(x, weight))  # type: ignore[no-any-return]
        if self.way == "many":
            return self.out(x[:, :6]) * x.new_ones(32, 64)[self.rows].view(768).sum()  # type: ignore[no-any-return]
        index = self.keep if self.way == "mask" else self.keep.nonzero()[:, 0]
        return self.out(x[:, index])  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("way", ["mask", "nonzero", "write", "many"])
def test_a_mask_that_a_model_holds_is_read(way: str, width: int) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["image"]).square().mean()  # type: ignore[no-any-return]

    found = ff.simulate(recipe(model=lambda: Pruned(way), loss=loss), ff.Strategy(width=width), "cpu")
    assert found.notes == ()
