"""Ranks that hold different numbers are named, and what may differ is not."""

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import RunError
from fullframe.ranks.agreement import from_all_ranks
from fullframe.training.faults import divergence
from tests.rank_group import rank_group
from tests.training.tiny import Network, recipe


class Drifting(torch.optim.SGD):
    """In step 3 one rank gets one bit wrong."""

    def __init__(self, model_values, rank):
        super().__init__(model_values, lr=0.1)
        self.rank, self.steps = rank, 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == 3 and dist.get_rank() == self.rank:
            weight = self.param_groups[0]["params"][-2]  # head.1.weight
            weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(torch.inf, dtype=weight.dtype))


def drifting_run(strategy, run_dir, rank, check_every=2):
    job = recipe(optimizer=lambda parameters: Drifting(parameters, rank))
    try:
        ff.fit(job, strategy, run_dir, steps=9, check_every=check_every, checkpoint_every=2)
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("check_every", [2, 100])
def test_one_bit_on_one_rank(tmp_path, check_every):
    for error in rank_group(4).run(drifting_run, ff.Strategy(data=2, width=2), tmp_path, 3, check_every):
        assert error.startswith("the ranks have drifted apart: after step 4, head.1.weight on rank 3 differs from ")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002"], "nothing wrong kept"


class Forgetful(Network):
    """Keeps something of its own on each rank of a replica."""

    def forward(self, image):
        if self.training:
            self.body[1].running_mean += dist.get_rank() % 2
        return super().forward(image)


def checked_run(strategy, run_dir, model):
    try:
        ff.fit(recipe(model=model), strategy, run_dir, steps=3, check_every=1)
    except RunError as error:
        return str(error)


def test_a_buffer_that_differs_within_a_replica(tmp_path):
    for error in rank_group(2).run(checked_run, ff.Strategy(height=2), tmp_path, Forgetful):
        assert "after step 1, body.1.running_mean on rank 1 differs" in error


class Rounded(Network):
    """A buffer that follows from values that each rank rounds in its own way."""

    def __init__(self, by=1e-5):
        super().__init__()
        self.by = by

    def forward(self, image):
        if self.training:
            self.body[1].running_var *= 1 + self.by * (dist.get_rank() % 2)
        return super().forward(image)


class Wrong(Rounded):
    def __init__(self):
        super().__init__(by=1e-2)


class NotFinite(Network):
    def forward(self, image):
        if self.training and dist.get_rank() % 2:
            self.body[1].running_var[0] = torch.nan
        return super().forward(image)


def on_gpus(strategy, run_dir, model):
    """What becomes of a run where kernels vary, and whether the buffers are equal at its end."""
    divergence._kernels_vary, before = lambda mesh: True, divergence._kernels_vary
    try:
        plain = ff.fit(recipe(model=model), strategy, run_dir, steps=3, check_every=1)
    except RunError as error:
        return str(error), None
    finally:
        divergence._kernels_vary = before
    everyone = from_all_ranks(plain.body[1].running_var)
    return None, [torch.equal(one, everyone[0]) for one in everyone]


def test_gpus_may_round_a_buffer_each_in_its_own_way(tmp_path):
    for run, strategy in enumerate((ff.Strategy(width=2), ff.Strategy(data=2, width=2))):
        folder = tmp_path / str(run)
        folder.mkdir()
        for error in rank_group(strategy.ranks).run(checked_run, strategy, folder / "cpu", Rounded):
            assert "after step 1, body.1.running_var on rank 1" in error
        for error, equal in rank_group(strategy.ranks).run(on_gpus, strategy, folder / "gpu", Rounded):
            assert error is None and equal[:2] == [True] * 2
        for name in (Wrong, NotFinite):
            for error, _ in rank_group(strategy.ranks).run(on_gpus, strategy, folder / name.__name__, name):
                assert "after step 1, body.1.running_var on rank 1" in error
    for error in rank_group(4).run(drifting_run_on_gpus, ff.Strategy(data=2, width=2), tmp_path / "drift", 3):
        assert "after step 4, head.1.weight on rank 3 differs from" in error


def drifting_run_on_gpus(*args):
    divergence._kernels_vary, before = lambda mesh: True, divergence._kernels_vary
    try:
        return drifting_run(*args)
    finally:
        divergence._kernels_vary = before


@pytest.mark.parametrize("changes", [{}, {"shard_parameters": True}, {"sync_batchnorm": True}], ids=str)
def test_what_may_differ_is_left_alone(tmp_path, changes):
    """Replicas have running statistics of their own after a step, ranks their own shards."""
    strategy = ff.Strategy(data=2, width=2, **changes)
    assert rank_group(4).run(checked_run, strategy, tmp_path, Network) == [None] * 4
