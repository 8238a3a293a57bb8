"""What meets split tensors and is another on each rank of a replica is refused on all; what may differ is let be."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import DivergenceError
from fullframe.model.same.operands import OperandsInPasses
from fullframe.spatial.whole_operands import PLACES, watching
from tests.rank_group import rank_group


class Drawing(nn.Module):
    """Lets its maps meet what a generator of its own draws."""

    def __init__(self, way: str, seed: int = 0, from_pass: int = 1):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.way, self.from_pass, self.passes = way, from_pass, 0
        self._draw = np.random.default_rng(seed)

    def forward(self, image: Tensor) -> Tensor:
        self.passes += 1
        x = self.first(image)
        if self.passes >= self.from_pass:
            x = self.drawn(x)
        return self.last(x)  # type: ignore[no-any-return]

    def drawn(self, x: Tensor) -> Tensor:
        number, four = (
            self._draw.normal(),
            torch.tensor(self._draw.normal(size=(4, 1, 1)).tolist(), dtype=torch.float64),
        )
        match self.way:
            case "number":
                return x * float(number)
            case "numpy's number":
                return x * number
            case "alpha":
                return x.add(x, alpha=number)
            case "whole tensor":
                return x + four
            case "in a list":
                return torch.stack([x, four.expand(x.shape)]).sum(0)
            case "complex":
                return (x * torch.complex(four, four)).real
            case "order of channels":
                return x[:, self._draw.permutation(4)]
            case "some channels":
                return x * x[:, (first := int(self._draw.integers(3))) : first + 1]
            case _:
                return x


def image_of(mesh: object) -> Tensor:
    return ff.shard(torch.rand(1, 3, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), mesh)  # type: ignore[arg-type]


def said_of(way: str, passes: int, from_pass: int = 1, alike: bool = False) -> tuple[str, int]:
    """The error, and in which pass, of a training whose maps or loss meet what each rank draws for itself."""
    mesh = ff.init_mesh(width=2)
    torch.manual_seed(0)
    seed = 7 if alike else 7 + dist.get_rank()  # for want of one a test would find the same order now and then
    model = ff.parallelize(Drawing(way, seed, from_pass).double(), mesh)
    draw, number = np.random.default_rng(seed), 0
    try:
        for _ in range(passes):
            number += 1
            image = image_of(mesh)
            out = model(image * draw.uniform() if way == "image" else image)
            (out * draw.uniform() if way == "loss" else out).square().mean().backward()
            if way == "calls of one rank" and dist.get_rank():
                out + 1.0
    except DivergenceError as error:
        return str(error), number
    return "", 0


WAYS = (
    "number",
    "numpy's number",
    "alpha",
    "whole tensor",
    "in a list",
    "complex",
    "order of channels",
    "loss",
    "image",
)


def test_what_each_rank_draws_for_itself_is_refused_on_all() -> None:
    for way in WAYS:
        for said, number in rank_group(2).run(said_of, way, 1):
            assert number == 1 and "meets a split one is another on rank 1 than on rank 0" in said, (way, said)
            assert "test_operands.py:" in said, (way, said)


def test_the_same_numbers_are_let_be() -> None:
    for way in (*WAYS, "some channels", "nothing", "calls of one rank"):
        assert rank_group(2).run(said_of, way, 5, 1, True) == [("", 0)] * 2, way


def test_what_begins_later_is_found_at_the_next_power_of_two() -> None:
    assert [number for _, number in rank_group(2).run(said_of, "number", 9, 5)] == [8, 8]


def _compared(*calls: Callable[[Tensor, int], object]) -> str:
    """The error of a pass in which an image meets what these let it meet, by the rank's number."""
    image = image_of(ff.init_mesh(width=2))
    operands = OperandsInPasses(image.spec.spatial)  # type: ignore[attr-defined]
    try:
        for call in calls:
            call(image, dist.get_rank())
        operands.forward_begins()
        operands.forward_has_ended()
    except DivergenceError as error:
        return str(error)
    return ""


def _written(image: Tensor, rank: int) -> None:
    torch.full((1, 3, 7, 11), float(rank), dtype=torch.float64).copy_(image)  # as torch.empty would leave it
    torch.add(image, 1.0, out=torch.full((1, 3, 7, 11), float(rank), dtype=torch.float64))


def _rounded(image: Tensor, rank: int) -> Tensor:
    return image * (1 + 1e-9 * rank)


def _noise(image: Tensor, rank: int) -> Tensor:
    return image + 1e-7 * (1 + rank)


def _not_a_number(image: Tensor, rank: int) -> Tensor:
    return image + torch.tensor([torch.nan, torch.inf, 1.0] + 8 * [-torch.inf], dtype=torch.float64)


def _many(image: Tensor, rank: int) -> None:
    for _ in range(PLACES + 3):
        image + 1.0


def _late(image: Tensor, rank: int) -> Tensor:
    return image + 1.0 * rank


def _at_lines_of_their_own(image: Tensor, rank: int) -> None:
    if rank:
        image * 255.0
    else:
        image + 1.0


def test_what_is_written_over_and_what_rounds_otherwise_is_let_be() -> None:
    for call in (_at_lines_of_their_own, _written, _rounded, _noise, _not_a_number, _many):
        assert rank_group(2).run(_compared, call) == [""] * 2, call


def test_more_calls_than_places_are_told_apart_by_their_place() -> None:
    for said in rank_group(2).run(_compared, _many, _late):
        assert "add of (1, 3, 7, 11): each computes" in said


def _seeded_apart(image: Tensor, rank: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return image * torch.rand(())


def test_states_that_were_seeded_apart_are_named() -> None:
    for said in rank_group(2).run(_compared, _seeded_apart):
        assert "share where nobody seeds them apart after parallelize (torch.manual_seed(seed + mesh." in said


def _rows_of_a_large_one(image: Tensor, rank: int) -> Tensor:
    large = torch.zeros(7, 11, 200, dtype=torch.float64)
    large[0] = rank * torch.rand(11, 200, generator=torch.Generator().manual_seed(0))
    return image[..., None] * large


def test_a_row_of_a_large_tensor_is_looked_at_in_turn() -> None:
    for said in rank_group(2).run(_compared, _rows_of_a_large_one):  # the first turn's is row 0
        assert "mul of (1, 3, 7, 11, 1)" in said


def _watched(passes: int) -> list[int]:
    """How many look on in the passes of one model, in forward and after backward; and once it is gone."""
    mesh, found = ff.init_mesh(width=2), []
    model: nn.Module | None = ff.parallelize(Drawing("nothing").double(), mesh)
    for _ in range(passes):
        assert model is not None
        handle = model.module.first.register_forward_hook(lambda *_: found.append(len(watching)))
        model(image_of(mesh)).square().mean().backward()
        found.append(len(watching))
        handle.remove()
    model = None
    gc.collect()
    return [*found, len(watching)]


def test_few_passes_are_looked_at_and_no_model_that_is_gone() -> None:
    found = rank_group(2).run(_watched, 5)
    assert found == [[1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]] * 2
    assert rank_group(2).run(_watched, 1) == [[1, 1, 0]] * 2


@pytest.mark.parametrize("width", [1, 2])
def test_replicas_may_draw_for_themselves(width: int) -> None:
    """They read other samples, and so may be mixed by other numbers."""
    assert rank_group(4 if width == 2 else 2).run(_of_replicas, width) == [""] * 2 * width


def _of_replicas(width: int) -> str:
    mesh = ff.init_mesh(width=width)
    model = ff.parallelize(Drawing("number", mesh.get_local_rank("data")).double(), mesh)
    try:
        model(image_of(mesh)).square().mean().backward()
    except DivergenceError as error:
        return str(error)
    return ""
