"""Split tensors of the ranks' own parts, or of one rank's whole: values, gradients, and what is no part."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from fullframe.ranks.exchange import InFlight
from tests.exactness import mesh, relative
from tests.rank_group import RankFailure, rank_group

MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]


def _image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _loss(x: Tensor, weight: Tensor) -> Tensor:
    return (F.conv2d(x, weight, padding=1).sin() * x.mean()).sum()


def _bounds(size: int, ranks: int) -> list[int]:
    """Of uneven parts: the first rank has one row alone."""
    return [0, *(1 + (size - 1) * part // max(1, ranks - 1) for part in range(ranks))] if ranks > 1 else [0, size]


class _Through(torch.nn.Module):
    """A function of the ranks' parts."""

    def __init__(self, gain: torch.nn.Parameter, on: Any) -> None:
        super().__init__()
        self.gain, self.on = gain, [on]

    def forward(self, x: Any) -> Tensor:
        return ff.from_local((x.local * self.gain).tanh(), self.on[0], like=x)


def _made(height: int, width: int) -> dict[str, float]:
    """A leaf cut unevenly, a computed part, a part like another tensor's; and their gradients."""
    on, image, weight = mesh(height, width), _image(1, 2, 9, 13), _image(2, 2, 3, 3)
    i, j = on.get_local_rank("height"), on.get_local_rank("width")
    top, left = _bounds(9, height), _bounds(13, width)
    mine = (..., slice(top[i], top[i + 1]), slice(left[j], left[j + 1]))

    here, w_here = image.clone().requires_grad_(), weight.clone().requires_grad_()
    _loss(here, w_here).backward()
    there, w_there = image[mine].clone().requires_grad_(), weight.clone().requires_grad_()
    x = ff.from_local(there, on)
    assert x.shape == image.shape and x.local.data_ptr() == there.data_ptr()
    loss = _loss(x, w_there)
    loss.backward()
    assert there.grad is not None and here.grad is not None and w_here.grad is not None and w_there.grad is not None
    errors = {
        "value": relative(image, x.full().detach()),
        "gradient of a leaf": relative(here.grad[mine], there.grad),
    }

    whole = image.clone().requires_grad_()
    split = ff.shard(whole, on)
    again = ff.from_local(split.local, on, like=split)
    assert again.spec is split.spec
    _loss(again, weight).backward()
    assert whole.grad is not None
    errors["gradient of x.local"] = relative(here.grad, whole.grad)

    gain = torch.nn.Parameter(_image(2, 1, 1))
    model = ff.parallelize(_Through(gain, on), on)
    _loss(model(ff.shard(image, on)), weight).backward()
    expected = gain.detach().clone().requires_grad_()
    _loss((image * expected).tanh(), weight).backward()
    assert gain.grad is not None and expected.grad is not None
    errors["gradient of a parameter"] = relative(expected.grad, gain.grad)

    labels = ff.from_local(split.local[:, :1].detach() > 0, on, like=split)
    errors["like"] = relative((image[:, :1] > 0).double(), labels.full().double())
    tokens = split.flatten(2).detach()  # merged: each rank's columns of every row
    like_merged = ff.from_local(tokens.local * 2, on, like=tokens)
    errors["like merged"] = relative(image.flatten(2) * 2, like_merged.full())
    moved = ff.from_local(image[mine].movedim(1, -1), on, placements={"width": 2, "height": 1})
    errors["channels last"] = relative(image.movedim(1, -1), moved.full())
    return errors


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_own_parts_make_the_whole(height: int, width: int) -> None:
    for found in rank_group(height * width).run(_made, height, width):
        assert {name: error for name, error in found.items() if not error < 1e-11} == {}


def _corners() -> list[Any]:
    on, rank = mesh(1, 2), dist.get_rank()
    image = _image(1, 2, 4, 5)
    found = [
        # an empty part; one rank alone wants a gradient; nothing is cut; as whole as a small tensor is
        ff.from_local(image[..., : 5 * rank], on).full(),
        ff.from_local(image[..., :2].clone().requires_grad_(rank == 0), on).sin().sum(),
        ff.from_local(image, on, placements={"height": 2}),
        ff.from_local(image[..., :1], on, like=ff.shard(image[..., :1], on)),
    ]
    found[1].backward()
    with torch.no_grad():
        found.append(ff.from_local(image.clone().requires_grad_(), on).full()[..., :5])
    return [t.detach() for t in found]


def test_corners() -> None:
    image = _image(1, 2, 4, 5)
    for empty, mixed, whole, small, no_grad in rank_group(2).run(_corners):
        assert torch.equal(empty, image) and torch.equal(whole, image) and torch.equal(no_grad, image)
        assert torch.equal(small, image[..., :1])
        torch.testing.assert_close(mixed, image[..., :2].sin().sum() * 2)


def _refused(what: str) -> None:
    on, second = mesh(1, 2), dist.get_rank() == 1
    part, x = torch.zeros(1, 2, 4, 3), ff.shard(torch.zeros(1, 2, 4, 7), mesh(1, 2))
    if what == "dtype":
        ff.from_local(part.double() if second else part, on)
    elif what == "channels":
        ff.from_local(part[:, : 1 + second], on)
    elif what == "dims":
        ff.from_local(part[0] if second else part, on)
    elif what == "rows of like":
        ff.from_local(part, on, like=x)
    elif what == "another like":
        ff.from_local(x.local, on, like=x if second else x.relu().flip(0)[..., :6])
    elif what == "one rank's argument":
        ff.from_local(x if second else part, on)
    elif what == "both":
        ff.from_local(part, on, like=x, placements={"width": 3})
    elif what == "axis":
        ff.from_local(part, on, placements={"depth": 2})
    elif what == "dim":
        ff.from_local(part, on, placements={"width": 4})
    elif what == "twice":
        ff.from_local(part, on, placements={"width": 2, "height": 2})
    elif what == "other values":
        ff.from_local(part + second, on, placements={"height": 2})
    elif what == "parameter":
        ff.from_local(torch.nn.Parameter(part), on)
    elif what == "nothing to scatter":
        ff.scatter(None, on)
    elif what == "other sources":
        ff.scatter(part, on, src=int(second))
    elif what == "no such rank":
        ff.scatter(part, on, src=2)
    elif what == "a word for a rank":
        ff.scatter(part, on, src="1" if second else 0)  # type: ignore[arg-type]
    elif what == "no rows":
        ff.scatter(torch.zeros(3), on, src=1)


REFUSED = {
    "dtype": "differ in dims or dtype (rank 0: (1, 2, 4, 3), rank 1: (1, 2, 4, 3))",
    "channels": "differ in dim 1, which is not cut (rank 0: (1, 1, 4, 3), rank 1: (1, 2, 4, 3))",
    "dims": "differ in dims or dtype",
    "rows of like": "rank 0 holds 3 rows of dim 3, where like is cut in such a way that it has 4",
    "another like": "a different like",
    "one rank's argument": "",
    "both": "not both",
    "axis": "placements names ['depth']",
    "dim": "does not have the dims [4]",
    "twice": "one dim cannot be cut over two axes",
    "other values": "ranks along another axis hold other values",
    "parameter": "a parameter is equal on all ranks",
    "nothing to scatter": "rank 0 of the replica must pass a plain tensor",
    "other sources": "the same on all; got [0, 1]",
    "no such rank": "src is one of the replica's ranks 0 to 1",
    "a word for a rank": "src is one of the replica's ranks 0 to 1, the same on all; got",
    "no rows": "with dims (..., H, W), passed",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_part_is_refused_on_all_ranks(what: str) -> None:
    with pytest.raises(RankFailure) as caught:
        rank_group(2).run(_refused, what)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["ShapeError"] * 2
    assert all(REFUSED[what] in text for _, _, text, _ in caught.value.errors)


def _uneven_rows() -> None:
    ff.from_local(torch.zeros(1, 4 + (dist.get_rank() == 3), 5), mesh(2, 2))


def test_rows_that_do_not_meet_are_refused() -> None:
    with pytest.raises(RankFailure) as caught:
        rank_group(4).run(_uneven_rows)
    assert [kind for _, kind, _, _ in caught.value.errors] == ["ShapeError"] * 4
    assert "(1, 5, 5)], and those of one height coordinate must have equal numbers of rows in dim 1" in str(
        caught.value
    )


def _scattered(height: int, width: int, src: int, size: tuple[int, int]) -> tuple[dict[str, float], bool, int]:
    """Errors; whether the memory format is kept; bytes that this rank sent."""
    on, image, weight = mesh(height, width), _image(1, 2, *size), _image(2, 2, 3, 3)
    here = image.clone().requires_grad_()
    _loss(here, weight).backward()
    is_here = dist.get_rank() % (height * width) == src
    full = image.to(memory_format=torch.channels_last).requires_grad_() if is_here else None
    sent = 0
    original = InFlight._send

    def counting(self: InFlight, rank: int, tensor: Tensor, head: bytes) -> None:
        nonlocal sent
        sent += tensor.nbytes
        original(self, rank, tensor, head)

    InFlight._send = counting  # type: ignore[method-assign]
    try:
        x = ff.scatter(full, on, src=src)
    finally:
        InFlight._send = original  # type: ignore[method-assign]
    shell = ff.shard(image.to(memory_format=torch.channels_last), on)
    if isinstance(shell, ff.SpatialTensor):
        assert x.spec is shell.spec
        local = x.local
        if local.numel():
            assert local.is_contiguous(memory_format=torch.channels_last)
    whole = x.full() if isinstance(x, ff.SpatialTensor) else x
    errors = {"value": relative(image, whole.detach())}
    _loss(x, weight).backward()
    if full is not None:
        assert full.grad is not None and here.grad is not None
        errors["gradient"] = relative(here.grad, full.grad)
    return errors, whole.dtype == image.dtype, sent


@pytest.mark.parametrize("size", [(9, 13), (1, 6), (1, 1)])
@pytest.mark.parametrize(("height", "width"), [(1, 1), *MESHES])
def test_one_rank_s_image_is_scattered(height: int, width: int, size: tuple[int, int]) -> None:
    ranks = height * width
    for src in {0, ranks - 1}:
        found = rank_group(max(2, ranks)).run(_scattered, height, width, src, size)  # alone: two replicas
        for errors, same, sent in found:
            assert max(errors.values()) < 1e-11 and same
            if size == (9, 13) and 1 in (height, width):
                assert sent <= 2 * 9 * 13 * 8, "parts alone are sent, and by one rank"
        if size == (9, 13) and ranks > 1 and 1 in (height, width):
            assert sum(sent > 0 for *_, sent in found) == 1
            assert sum(sent for *_, sent in found) < 2 * 9 * 13 * 8


def _whole_types() -> list[bool]:
    on, found = mesh(1, 2), []
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64):
        values = (torch.arange(24).view(2, 3, 4) % 3).to(dtype)
        found.append(torch.equal(ff.scatter(values if dist.get_rank() else None, on, src=1).full(), values))
    return found


def test_any_dtype_is_scattered() -> None:
    assert rank_group(2).run(_whole_types) == [[True] * 5] * 2
