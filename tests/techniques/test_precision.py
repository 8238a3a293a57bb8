"""Autocast, the loss scale of fp16, clipping, and the average of the parameters."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import fullframe as ff
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.precision import Fp32Math, LossScale, computing
from fullframe.techniques.recompute import recompute
from tests.rank_group import rank_group
from tests.training.test_step import Spike, network, whole_batch
from tests.training.tiny import loss, mean_loss


def single_batch():
    batch = whole_batch()
    return batch | {"image": batch["image"].float()}


def gradients_of_one_step(strategy, optimizer=torch.optim.SGD):
    mesh = ff.init_mesh(height=strategy.height, width=strategy.width)
    model = ff.parallelize(network().float(), mesh)
    batch = single_batch()
    if strategy.width * strategy.height > 1:
        batch |= {name: ff.shard(batch[name], mesh) for name in ("image", "target")}
    step = ff.TrainStep(model, loss, optimizer(model.parameters(), lr=0.5), strategy)
    record = step(batch)
    assert not record.skipped
    return record.loss, [p.grad for p in model.parameters()], step.scale and step.scale.value


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 8e-2), ("fp16", 1e-2)])
def test_half_precision_is_that_of_one_process_to_its_rounding(precision, tolerance):
    """Numbers are rounded by 2^-9 and 2^-12; a gradient is a sum of both signs, a tenth of its terms in size."""
    exact = gradients_of_one_step(ff.Strategy())
    for strategy in (ff.Strategy(precision=precision), ff.Strategy(precision=precision, width=2, microbatches=2)):
        for value, gradients, scale in rank_group(strategy.ranks).run(gradients_of_one_step, strategy):
            assert scale == (2.0**16 / 1024 if precision == "fp16" else None)  # by the count of the whole batch
            assert value == pytest.approx(exact[0], rel=tolerance)
            for found, wanted in zip(gradients, exact[1], strict=True):
                assert found.dtype == torch.float32
                assert (found - wanted).norm() <= tolerance * wanted.norm()
            # Half precision was really used: fp32 on two ranks agrees to 1e-6.
            assert max((f - w).norm() / w.norm() for f, w in zip(gradients, exact[1], strict=True)) > 1e-5


class Seen(torch.autograd.Function):
    """Writes down torch's settings for fp32 numbers on GPUs, in forward and in backward."""

    settings: ClassVar = []

    @staticmethod
    def note(when):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32  # noqa: B018  would raise if mixed up
        Seen.settings.append((when, *Fp32Math.now().kinds[:3]))

    @staticmethod
    def forward(ctx, x):
        Seen.note("recompute" if torch._C._current_graph_task_id() != -1 else "forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Seen.note("backward")
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))

    def forward(self, x):
        return self.layers[1](Seen.apply(self.layers[0](x)))


def watched(precision, **options):
    model = nn.Sequential(Block(), Block())
    strategy = ff.Strategy(precision=precision, recompute="blocks", recompute_modules=("0", "1"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ff.TrainStep(model, lambda model, batch: model(batch).square().mean(), optimizer, strategy)


@pytest.fixture
def settings():
    """Those of this process, which a test may change."""
    before = Fp32Math.now()
    Seen.settings.clear()
    yield
    before.set()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}], ids=str)
def test_fp32_numbers_are_multiplied_alike_in_forward_recompute_and_backward(settings, precision, options):
    if precision == "fp16":
        options = {}  # a scaled loss cannot be updated from in backward
    kind = "ieee" if precision == "fp32" else "tf32"
    before = Fp32Math.now()
    step = watched(precision, **options)
    for run in (step, step.rehearse) if not options else (step,):
        Seen.settings.clear()
        run(torch.randn(1, 2, 12, 12))
        assert set(Seen.settings) == {(when, kind, kind, kind) for when in ("forward", "recompute", "backward")}
        assert Fp32Math.now() == before


def test_recompute_outside_a_step_follows_its_forward(settings):
    model = nn.Sequential(Block(), Block())
    recompute(model, ["0", "1"])
    with computing("fp32", "cpu"):
        value = model(torch.randn(1, 2, 12, 12)).sum()
    with computing("tf32", "cpu"):
        value.backward()
    assert set(Seen.settings) == {
        (when, kind, kind, kind) for when, kind in (("forward", "ieee"), ("recompute", "ieee"), ("backward", "tf32"))
    }


def legacy():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False


def new():
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # after which allow_tf32 cannot be read
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.mkldnn.conv.fp32_precision = "bf16"


@pytest.mark.parametrize("of_the_user", [lambda: None, legacy, new])
def test_what_the_user_has_set_holds_again_afterwards(settings, of_the_user):
    of_the_user()
    before = Fp32Math.now()
    for precision, kind in (("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32")):
        with computing(precision, "cpu"):
            inside = Fp32Math.now()
            assert inside.kinds[:3] == (kind,) * 3
            assert inside.kinds[3:] == (("ieee",) * 3 if precision == "fp32" else before.kinds[3:])
            assert inside.cudnn is (kind == "tf32")
            assert inside.matmul in (("highest",) if kind == "ieee" else ("high", "medium"))  # alike on a GPU
        assert Fp32Math.now().kinds == before.kinds
        if before.cudnn is not None:
            assert Fp32Math.now() == before


def spiked(model, batch):
    return Spike.apply(mean_loss(model, batch))


def overflow_on_the_second_rank():
    strategy = ff.Strategy(data=2, precision="fp16")
    model = ff.parallelize(network().float(), ff.init_mesh())
    torch.manual_seed(torch.distributed.get_rank())  # what the ranks sum differs, the scale must not
    losses = [loss, spiked if torch.distributed.get_rank() == 1 else mean_loss, loss]
    scales, skipped = [], []
    scale = None
    for loss_of in losses:
        step = ff.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.5), strategy)
        if scale is not None:
            step.scale.load_state_dict(scale)
        batch = single_batch()
        if torch.distributed.get_rank() == 1:
            batch["target"][:5] = -1
        skipped.append(step(batch).skipped)
        scale = step.scale.state_dict()
        scales.append(step.scale.value)
    return scales, skipped


def test_ranks_scale_and_skip_together():
    first, second = rank_group(2).run(overflow_on_the_second_rank)
    assert first == second
    scales, skipped = first
    assert skipped == [False, True, False]
    assert scales[1] == scales[2] == scales[0] / 2


def test_a_small_gradient_survives_fp16_only_with_the_scale():
    """1e-8 is below the smallest fp16 number, 6e-8."""
    weight = nn.Linear(4, 1, bias=False)

    def tiny(model, batch):
        return model(batch).float().sum() * 1e-8  # the gradient enters the fp16 product as 1e-8 * scale

    step = ff.TrainStep(weight, tiny, torch.optim.SGD(weight.parameters(), lr=1.0), ff.Strategy(precision="fp16"))
    step(torch.ones(1, 4))
    torch.testing.assert_close(weight.weight.grad, torch.full((1, 4), 1e-8), rtol=1e-3, atol=0)
    weight.zero_grad()
    with computing("fp16", "cpu"):
        value = tiny(weight, torch.ones(1, 4))
    value.backward()
    assert (weight.weight.grad == 0).all()


def test_the_scale_starts_by_the_count_falls_and_grows(monkeypatch):
    scale = LossScale()
    assert scale.start(1000) == 2.0**16 / 1024 == scale.start(1)
    scale.update(overflowed=True)
    assert scale.value == 32.0
    monkeypatch.setattr(LossScale, "_GROWTH_STEPS", 3)
    for expected in (32.0, 32.0, 64.0, 64.0, 64.0, 128.0):
        scale.update(overflowed=False)
        assert scale.value == expected
    resumed = LossScale()
    resumed.load_state_dict(scale.state_dict())
    assert resumed.state_dict() == scale.state_dict()


@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_clipping_is_torchs(most):
    plain = network()
    value, count = loss(plain, whole_batch())
    (value / count).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), most)
    model = network()
    strategy = ff.Strategy(clip_norm=most, microbatches=2)
    record = ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), strategy)(whole_batch())
    assert record.grad_norm == pytest.approx(norm.item(), rel=1e-10)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=0)


def test_the_average_of_the_parameters():
    model = network()
    decay, strategy = 0.75, ff.Strategy(ema_decay=0.75)
    step = ff.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.5), strategy)
    expected = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        step(whole_batch())
        expected = [decay * e + (1 - decay) * p.detach() for e, p in zip(expected, model.parameters(), strict=True)]
    own = [p.detach().clone() for p in model.parameters()]
    with step.average.applied():
        torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(list(model.parameters()), own, rtol=0, atol=0)
    other = ParameterAverage(network(), decay)
    other.load_state_dict(step.average.state_dict())
    torch.testing.assert_close(other.state_dict(), step.average.state_dict(), rtol=0, atol=0)


def test_a_skipped_step_leaves_the_average():
    model = network()
    step = ff.TrainStep(model, spiked, torch.optim.SGD(model.parameters(), lr=0.5), ff.Strategy(ema_decay=0.5))
    before = {name: value.clone() for name, value in step.average.state_dict().items()}
    assert step(whole_batch()).skipped
    torch.testing.assert_close(step.average.state_dict(), before, rtol=0, atol=0)
