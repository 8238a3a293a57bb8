"""Means and variances over ranks: as of all values together, from counts that are known and from counts that travel."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.ranks.mesh import spatial_of
from fullframe.simulation.fake.replaced import replaced
from fullframe.simulation.fake.world import fake_job
from fullframe.spatial.gradients import manage
from fullframe.spatial.rules import channel_statistics
from fullframe.spatial.rules.channel_statistics import Holders, sizes_on_ranks, statistics
from fullframe.spatial.spec import spec_of
from fullframe.spatial.tensor import wrap
from tests.exactness import differences_from, mesh, one_process
from tests.rank_group import rank_group
from tests.spatial.cases import Op
from tests.spatial.corners import last, noise

ROWS = (3, 0, 5)  # of the ranks


def found() -> list[Any]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    start = sum(ROWS[:rank])
    answers = []
    for m in (1, 2):
        x = noise(1, 4, sum(ROWS), 7)[:, :, start : start + ROWS[rank]]
        for elements in (tuple(rows * 7 for rows in ROWS), None):
            answers.append(statistics(x, m, Holders(group, elements)))
    x = last(noise(2, 4, 3, 7)) * (1 + rank)
    answers.append(statistics(x, 1, Holders(group, (42,) * 3)))
    whole = statistics(noise(2, 4, 3, 7), 1, Holders(group, None, copies=3, counts=rank == 0))
    return [(mean, var, float(elements)) for mean, var, elements in (*answers, whole)]


def expected(x: Tensor, m: int = 1) -> tuple[Tensor, Tensor, float]:
    grouped = x.transpose(0, 1).reshape(4 // m, -1)
    var, mean = torch.var_mean(grouped, 1, correction=0)
    return mean.repeat_interleave(m), var.repeat_interleave(m), float(grouped.shape[1])


def test_as_of_all_values_together() -> None:
    rows, samples = noise(1, 4, sum(ROWS), 7), noise(2, 4, 3, 7)
    together = torch.cat([samples * (1 + rank) for rank in range(3)])
    wanted = [expected(rows), expected(rows), expected(rows, 2), expected(rows, 2), expected(together)]
    mean, var, elements = expected(samples)
    for answers in rank_group(3).run(found):
        torch.testing.assert_close(answers, [*wanted, (mean, var, elements)], rtol=1e-13, atol=1e-13)


def shares() -> list[tuple[int, ...]]:
    """What each rank holds of tensors cut along three axes, along one, and along two as one beside the third."""
    spatial = spatial_of(ff.init_mesh(2, 2, depth=2))
    rows, columns, slices = Extents((0, 3, 5)), Extents((0, 4, 7)), Extents((0, 2, 3))
    cuts = [Placement("depth", 2, slices), Placement("height", 3, rows), Placement("width", 4, columns)]
    one = spec_of(spatial, (1, 2, 3, 5, 7), tuple(cuts), False, None)
    two = one.with_((1, 2, 3, 5, 7), (cuts[2],))
    pair = Placement("depth and width", 0, Extents((0, 1, 3, 6, 10)))
    three = one.with_((10, 2, 1, 5, 1), (pair, cuts[1]))
    return [sizes_on_ranks(spec) for spec in (one, two, three)]


def test_what_each_rank_of_a_group_holds() -> None:
    with fake_job(0, 8):
        each, along_width, beside = shares()
    assert each == tuple(2 * d * h * w for d in (2, 1) for h in (3, 2) for w in (4, 3))
    assert along_width == (2 * 3 * 5 * 4, 2 * 3 * 5 * 3)
    assert beside == tuple(2 * held * h for d in (0, 1) for h in (3, 2) for held in (1, 2, 3, 4)[2 * d : 2 * d + 2])


def of_large_maps() -> list[float]:
    """Norms of maps that are small, whose gradient is computed as of large ones."""
    x, w, b = noise(2, 4, 9, 7) + 3, noise(4), noise(4)
    norms: dict[str, Op] = {
        "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        "group": lambda x, w, b: F.group_norm(x, 2, w, b),
        "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
        "layer": lambda x, w, b: F.layer_norm(x, (9, 7)) * w.sum() + b.sum(),
        "without": lambda x, w, b: F.batch_norm(x, None, None, None, None, True) * w.sum() + b.sum(),
    }
    found = []
    with replaced(channel_statistics, "_LARGE", 0):
        for norm, lay, split in product(norms.values(), (lambda t: t, last), ((2, 1), (1, 2))):
            op = lambda x, w, b, norm=norm: norm(x, w, b).square() * 0.1  # noqa: E731
            whole = one_process(op, [lay(x)], [w, b])
            found += differences_from(whole, op, [lay(x)], [w, b], *split).values()
    return found


def test_gradients_of_large_maps() -> None:
    for differences in rank_group(2).run(of_large_maps):
        assert len(differences) == 80 and max(differences) < 1e-12, differences


VIEWS = ("view", "squeeze", "detach", "split", "expand", "empty", "slice", "select", "unbind")


class Launches(TorchDispatchMode):
    """Counts the ops that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not any(view in name for view in VIEWS):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("channels_last", "most"), [(False, 17), (True, 15)])
def test_few_kernels_are_launched(channels_last: bool, most: int) -> None:
    """Batch norm on an inner rank, forward and backward, beside one message each way."""
    with fake_job(1, 4):
        x = ff.shard(noise(1, 8, 16, 16), mesh(4, 1), check=False)
        weight, bias = (noise(8).requires_grad_() for _ in range(2))
        manage(weight, None)
        manage(bias, None)
        local = last(x.local) if channels_last else x.local
        source = local.requires_grad_() * 1
        given, buffers = wrap(source, x.spec), (torch.zeros(8).double(), torch.ones(8).double())
        with Launches() as launches:
            made = F.batch_norm(given, *buffers, weight, bias, True)
            torch.autograd.grad(made.local, (source, weight, bias), torch.ones_like(source))  # type: ignore[attr-defined]
    launches.counts["ones_like"] -= 1
    assert launches.counts["_allgather_base_"] == launches.counts["allreduce_"] == 1
    assert launches.counts.total() - 2 <= most, launches.counts
