"""Synchronised batch norm: replicas together are one process with the whole batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

import fullframe as ff
from fullframe.model.forward_patch import restore
from fullframe.model.sync_batchnorm import synchronize_batchnorm
from tests.other_sizes import OTHER_SIZES, in_one_process, of_one_size_each
from tests.rank_group import RankFailure, rank_group
from tests.techniques.test_recompute import on_ranks, steps
from tests.training import blocks

STRATEGIES = [
    ff.Strategy(data=2, sync_batchnorm=True),
    ff.Strategy(data=2, sync_batchnorm=True, recompute="blocks"),
    ff.Strategy(data=2, sync_batchnorm=True, shard_parameters=True),
    ff.Strategy(data=2, width=2, sync_batchnorm=True),
    ff.Strategy(data=2, height=2, sync_batchnorm=True, recompute="blocks"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.data}x{s.height}x{s.width}-{s.recompute}")
def test_replicas_are_one_process_with_the_whole_batch(strategy: ff.Strategy) -> None:
    expected = steps(ff.Strategy())
    for found in rank_group(strategy.ranks).run(steps, strategy):
        for kind in ("losses", "parameters", "buffers"):
            torch.testing.assert_close(found[kind], expected[kind], rtol=1e-9, atol=1e-13)


def test_without_it_they_are_not() -> None:
    expected = steps(ff.Strategy())
    found = rank_group(2).run(steps, ff.Strategy(data=2))[0]
    name = "blocks.0.norm.running_var"
    assert not torch.allclose(found["buffers"][name], expected["buffers"][name])


class Odd(nn.Module):
    """Batch norm of every dimension: of split maps, of what was pooled and is whole, without statistics or weights."""

    def __init__(self, kind: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first = kind(3)
        self.whole = nn.BatchNorm1d(3, momentum=None)
        self.bare = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
        self.frozen = nn.BatchNorm2d(3).eval()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.bare(self.first(x).sin())
        pooled = self.whole(x.square().mean((2, 3)))
        return self.frozen(x * pooled[:, :, None, None])


def odd_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    out = model(batch["image"])
    return (out * batch["image"]).square().sum(), torch.tensor(out.numel())


def odd_step(strategy: ff.Strategy, kind: Any, uneven: bool = False) -> Any:
    torch.manual_seed(0)
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    plain = Odd(kind)
    plain.frozen.eval()
    batch = {"image": blocks.batch()["image"]}
    if uneven:  # replicas of 1 and 3 samples
        share = slice(0, 1) if mesh.get_local_rank("data") == 0 else slice(1, 4)
        batch = {"image": batch["image"][share]}
    else:
        batch = on_ranks(batch, mesh, ("image",))
    model = ff.parallelize(plain, mesh, shard_parameters=strategy.shard_parameters)
    step = ff.TrainStep(model, odd_loss, torch.optim.SGD(model.parameters(), lr=0.0), strategy)
    record = step(batch)
    gradients = {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in plain.named_parameters()}
    return record.loss, gradients, dict(plain.named_buffers())


@pytest.mark.parametrize(("width", "uneven"), [(1, False), (1, True), (2, False)])
def test_every_kind(width: int, uneven: bool) -> None:
    expected = odd_step(ff.Strategy(), nn.BatchNorm2d)
    strategy = ff.Strategy(data=2, width=width, sync_batchnorm=True)
    for found in rank_group(strategy.ranks).run(odd_step, strategy, nn.BatchNorm2d, uneven):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_sync_batchnorm_of_the_users_runs_on_a_cpu_and_on_split_tensors() -> None:
    """With sharded parameters; tests/model/test_door.py has it with DDP."""
    expected = odd_step(ff.Strategy(), nn.BatchNorm2d)[2]
    strategy = ff.Strategy(data=2, width=2, shard_parameters=True)
    for _, _, buffers in rank_group(4).run(odd_step, strategy, nn.SyncBatchNorm):
        for name in ("first.running_mean", "first.running_var", "first.num_batches_tracked"):
            torch.testing.assert_close(buffers[name], expected[name], rtol=1e-9, atol=1e-13)


def shared_by_two() -> list[Tensor]:
    """Two parallel models in turn, of two images a rank: the loss, and the statistics of the norm they share."""
    mesh = ff.init_mesh()
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4)).double()
    first = ff.parallelize(nn.Sequential(trunk, nn.Conv2d(4, 1, 1)).double(), mesh)
    images = torch.randn(4, 3, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    part = images.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    with torch.no_grad():
        before = first(part)
    second = ff.parallelize(nn.Sequential(trunk, nn.Conv2d(4, 2, 1)).double(), mesh)
    second(part).square().mean().backward()
    with torch.no_grad():
        torch.testing.assert_close(first(part), before)
    whole = nn.BatchNorm2d(4).double()
    for _ in range(3):
        whole(trunk[0](images))
    return [trunk[1].running_mean - whole.running_mean, trunk[1].running_var - whole.running_var]


def test_two_models_may_share_one() -> None:
    for off in rank_group(2).run(shared_by_two):
        torch.testing.assert_close(off, [torch.zeros_like(each) for each in off], rtol=0, atol=1e-13)


class BeforeStages(nn.Module):
    """A norm in training, of maps and of what is pooled, before layers that can be on stages."""

    def __init__(self, kind: Any = nn.SyncBatchNorm) -> None:
        super().__init__()
        self.norm, self.pooled = kind(3), nn.BatchNorm1d(3) if kind is nn.BatchNorm2d else kind(3)
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.norm(x) * self.pooled(x.square().mean((2, 3)))[:, :, None, None])


def statistics_on_stages(strategy: ff.Strategy, kind: Any = nn.SyncBatchNorm) -> list[Tensor]:
    """After a pass of the model alone, and a step."""
    torch.manual_seed(0)
    batch, plain = {"image": blocks.batch()["image"]}, BeforeStages(kind)
    mesh = ff.init_mesh(strategy.height, strategy.width, stages=strategy.stages)
    model = ff.parallelize(plain, mesh)
    batch = on_ranks(batch, mesh, ("image",))
    model(batch["image"])
    found = [buffer.clone() for buffer in plain.buffers()]
    ff.TrainStep(model, odd_loss, torch.optim.SGD(model.parameters(), lr=0.0), strategy)(batch)
    return [*found, *plain.buffers()]


@pytest.mark.parametrize("strategy", [ff.Strategy(data=2, stages=2), ff.Strategy(stages=2, width=2)], ids=str)
def test_stages_hold_the_same_samples(strategy: ff.Strategy) -> None:
    """So that the running variance counts them once."""
    expected = statistics_on_stages(ff.Strategy(), nn.BatchNorm2d)
    for found in rank_group(4).run(statistics_on_stages, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


def statistics_of(synced: bool, plain: bool = False) -> list[Tensor]:
    """What `update_bn` finds in six images, one step; of `plain` torch, or on these ranks."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    images = [torch.randn(3, 6, 9, dtype=torch.float64) * (n + 1) for n in range(6)]
    loader: Any = DataLoader(images, batch_size=6)  # type: ignore[arg-type]
    if not plain:
        mesh = ff.init_mesh()
        model = ff.parallelize(nn.SyncBatchNorm.convert_sync_batchnorm(model) if synced else model, mesh)
        loader = ff.ShardedLoader(loader, mesh)
    update_bn(loader, model)
    return [buffer.clone() for buffer in model.buffers()]


def test_update_bn_over_replicas_is_one_process_s_with_sync_batchnorm_alone() -> None:
    expected = statistics_of(False, plain=True)
    for found in rank_group(2).run(statistics_of, True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert not any(torch.allclose(found[1], expected[1]) for found in rank_group(2).run(statistics_of, False))


@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=str)
def test_replicas_need_not_have_images_of_one_size(sizes: Any) -> None:
    expected = in_one_process(sizes)
    for found in rank_group(4).run(of_one_size_each, sizes):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class SyncActivated(nn.SyncBatchNorm):
    """As in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class ByItself(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) * self.weight[:, None, None]


def test_a_forward_of_its_own_around_batch_norms_runs() -> None:
    expected = odd_step(ff.Strategy(), Activated)
    for found in rank_group(4).run(odd_step, ff.Strategy(data=2, width=2), SyncActivated):
        torch.testing.assert_close(found[2]["first.running_var"], expected[2]["first.running_var"], rtol=1e-9, atol=0)
    for found in rank_group(2).run(odd_step, ff.Strategy(width=2), SyncActivated):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for found in rank_group(2).run(odd_step, ff.Strategy(data=2, sync_batchnorm=True), Activated):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_statistics_that_are_not_batch_norms_are_refused() -> None:
    rank_group(2).run(odd_step, ff.Strategy(data=2), ByItself)
    with pytest.raises(RankFailure, match="ByItself takes its statistics by itself"):
        rank_group(2).run(odd_step, ff.Strategy(data=2, sync_batchnorm=True), ByItself)


def test_evaluation_and_a_group_of_its_own_are_left_as_they_are() -> None:
    alone, grouped = ByItself(3).eval(), nn.SyncBatchNorm(3, process_group=object())
    synchronize_batchnorm(nn.ModuleList([alone, grouped]), 1, every=True)
    assert alone(torch.ones(1, 3, 2, 2)).shape == (1, 3, 2, 2) and "forward" not in vars(grouped)


def single_values() -> str:
    norm = nn.BatchNorm1d(3)
    synchronize_batchnorm(norm, 2, every=True)
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        norm(torch.randn(1, 3))
    restore(norm)
    synchronize_batchnorm(norm, 1, every=True)
    assert norm(torch.ones(1, 3) * torch.distributed.get_rank()).abs().sum() > 0
    return str(raised.value)


def test_one_value_per_channel_is_refused_only_where_no_other_rank_has_one() -> None:
    assert len(set(rank_group(2).run(single_values))) == 1


def test_it_is_taken_out_again_and_not_copied() -> None:
    model = blocks.network()
    synchronize_batchnorm(model, 1, every=True)
    assert "forward" in vars(model.stem[1])
    fresh = copy.deepcopy(model)
    assert fresh.stem[1].forward.__func__ is nn.BatchNorm2d.forward
    restore(model)
    assert all("forward" not in vars(module) for module in model.modules())


def in_bf16(rank_width: int) -> Any:
    strategy = ff.Strategy(data=2, width=rank_width, precision="bf16", sync_batchnorm=True)
    return steps(strategy)


def test_under_autocast() -> None:
    one = steps(ff.Strategy(precision="bf16"))
    exact = steps(ff.Strategy())
    for found in rank_group(2).run(in_bf16, 1):
        for name in ("blocks.0.norm.running_var", "blocks.2.norm.running_mean"):
            scale = exact["buffers"][name].abs().max().item()
            torch.testing.assert_close(found["buffers"][name], one["buffers"][name], rtol=0, atol=0.03 * scale)
