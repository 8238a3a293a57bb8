"""Buffers replaced by copies for a while."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullframe as ff
from fullframe.errors import MeshError
from fullframe.model.attributes import kept_attributes
from fullframe.model.buffers import (
    KeptBuffers,
    borrow_buffers,
    buffers_of,
    copies,
    require_whole_buffers,
    return_buffers,
    writable_buffers,
)
from tests.rank_group import rank_group


def shared() -> nn.Module:
    """Two batch norms of which the second has the first one's running mean."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    model[1].running_mean = model[0].running_mean
    return model


def test_every_buffer_is_named_with_its_module() -> None:
    model = shared()
    with torch.inference_mode():
        model[0].register_buffer("inference", torch.zeros(1))
    model[0].register_buffer("nothing", None)
    named = [(owner is model[0], name) for owner, name, _ in buffers_of(model)]
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert named == [(True, name) for name in names] + [(False, name) for name in names]


def test_what_is_written_meanwhile_is_forgotten() -> None:
    model = shared()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    addresses = [buffer.data_ptr() for _, _, buffer in buffers_of(model)]
    there = borrow_buffers(model, {})
    model(torch.randn(4, 2, 3, 3))
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    return_buffers(there)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [buffer.data_ptr() for _, _, buffer in buffers_of(model)] == addresses


def test_copies_take_the_values_given_and_stay_shared() -> None:
    model, value = shared(), torch.full((2,), 7.0)
    there = borrow_buffers(model, {(model[0], "running_mean"): value})
    assert model[0].running_mean is model[1].running_mean
    model[1].running_mean.add_(1)
    assert model[0].running_mean.tolist() == [8, 8] and value.tolist() == [7, 7]
    return_buffers(there)
    assert model[0].running_mean.tolist() == [0, 0]


class Keeper(nn.Module):
    """Its forward writes into, replaces, resizes, makes and adds buffers, as caches, memory banks and observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([5.0]))
        self.register_buffer("bank", torch.ones(1))
        self.register_buffer("range", torch.ones(0))
        self.register_buffer("center", None)
        self.same = nn.Module()
        self.same.register_buffer("range", self.range)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "grid"):
            self.register_buffer("grid", torch.zeros(3))
            self.register_buffer("first", x.clone())
        self.seen += x.sum()
        self.bank = torch.cat([self.bank, x])
        self.range.resize_(1).copy_(x[:1])
        self.center = x
        self.norm.running_mean.fill_(7)
        return x


def test_what_a_step_in_vain_made_of_buffers_is_undone() -> None:
    model = Keeper()
    kept = KeptBuffers(model)
    before = {name: value.clone() for name, value in model.named_buffers(remove_duplicate=False)}
    kept.keep()
    model(torch.tensor([1.0, float("nan")]))
    kept.restore()
    assert model.center is None and model.same.range is model.range and not hasattr(model, "first")
    after = dict(model.named_buffers(remove_duplicate=False))
    assert torch.equal(after.pop("grid"), torch.zeros(3))
    torch.testing.assert_close(after, before)


def test_a_buffer_that_has_grown_or_is_finer_since_is_kept_as_it_is_by_now() -> None:
    model = nn.Module()
    model.register_buffer("queue", torch.zeros(2))
    kept = KeptBuffers(model)
    kept.keep()
    for value in (torch.full((5,), 1.0), torch.full((5,), 1 / 3, dtype=torch.float64)):  # by steps that count
        model.queue = value.clone()
        kept.keep()
        for _ in range(2):  # steps in vain, of which the first makes it longer in place
            model.queue.data = torch.cat((model.queue, model.queue))
            kept.restore()
            kept.keep()
            model.queue.zero_()
            kept.restore()
            assert torch.equal(model.queue, value)


def test_a_rehearsal_that_puts_hooks_back_leaves_none_for_good() -> None:
    model = nn.BatchNorm1d(3)
    kept = KeptBuffers(model)
    kept.keep()
    with kept_attributes(model):  # as where the blocks' costs are measured, within a step
        model(torch.randn(4, 3))
    model.reset_running_stats()
    for _ in range(2):  # steps in vain
        for _ in range(3):  # microbatches
            model(torch.full((4, 3), float("nan")))
        kept.restore()
        assert not model.num_batches_tracked
        assert not model._forward_pre_hooks
        kept.keep()


@pytest.mark.parametrize("recompute", [{}, {"recompute": "budget", "recompute_budget_bytes": 10**6}])
def test_a_skipped_step_of_several_microbatches_leaves_no_statistics(recompute: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    strategy = ff.Strategy(microbatches=3, recompute_modules=("0",) if recompute else (), **recompute)
    take = ff.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1), strategy)
    assert not take(torch.randn(3, 1, 4, 4)).skipped
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert take(torch.full((3, 1, 4, 4), float("inf"))).skipped
    torch.testing.assert_close(dict(model.named_buffers()), before)


class Grid(nn.Module):
    """Weighs an image by its place on a grid, as `meshgrid` gives it: tensors that are expanded along one dim each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        rows, columns = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x * self.rows + self.columns)  # type: ignore[no-any-return]


def test_a_skipped_step_leaves_expanded_buffers() -> None:
    model = Grid()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    take = ff.TrainStep(model, lambda m, x: m(x).square().mean(), sgd, ff.Strategy(microbatches=2))
    assert take(torch.full((2, 1, 4, 6), float("nan"))).skipped
    assert model.rows.stride() == (1, 0) and model.rows[:, 0].tolist() == [0, 1, 2, 3]


def test_a_state_is_loaded_into_expanded_buffers() -> None:
    model, other = Grid(), Grid()
    rows, other.rows = model.rows, other.rows + 1
    with writable_buffers(model):
        model.load_state_dict(other.state_dict())
    assert model.rows is rows and torch.equal(rows, other.rows) and rows.stride() == (1, 0)


class LateGrid(Grid):
    """Makes the grid when it is first called, and expands what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.later = self.rows, self.columns
        del self.rows, self.columns
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("first", torch.zeros(()).expand(6))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "rows"):
            for name, grid in zip(("rows", "columns"), self.later, strict=True):
                self.register_buffer(name, grid)
        result = super().forward(x + self.first)
        self.first = (self.first[:1] + x.detach()[0].mean()).expand(6)  # all take the first replica's, at the next pass
        return result


def _replicas(kind: type[Grid]) -> float:
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    spread = ff.parallelize(model, ff.init_mesh(height=1, width=1))
    images = torch.randn(4, 1, 4, 6, dtype=torch.float64)
    for _ in range(2):
        plain(images).square().mean().backward()
        spread(images.chunk(2)[torch.distributed.get_rank()]).square().mean().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("kind", [Grid, LateGrid])
def test_replicas_have_expanded_buffers(kind: type[Grid]) -> None:
    assert max(rank_group(2).run(_replicas, kind)) < 1e-12


def test_copies_share_memory_as_what_was_copied_does() -> None:
    whole = torch.arange(6.0)
    alone, tail, every_other = torch.zeros(2), whole[4:], whole[::2]
    first, again, end, apart, odd = copies([whole, whole, tail, alone, every_other])
    assert first is again and not {id(first), id(end)} & {id(whole), id(tail)}
    end += 10
    assert first.tolist() == [0, 1, 2, 3, 14, 15] and odd.tolist() == [0, 2, 14]
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and apart.data_ptr() not in (alone.data_ptr(), first.data_ptr())


def test_a_sparse_buffer_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    require_whole_buffers(model)
    model[0].register_buffer("matrix", torch.eye(3).to_sparse())
    with pytest.raises(MeshError, match=r"the buffer matrix of Linear is sparse \(torch\.sparse_coo\)"):
        require_whole_buffers(model)
