"""What torch's own kernels take beside their results: by hand, and as torch's profiler counts it of the real ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.simulation.memory.cpu_copies import cpu_copies
from fullframe.simulation.memory.cuda_scratch import cuda_scratch
from fullframe.simulation.memory.scratch import cpu_scratch
from fullframe.simulation.memory.trace import Tracer
from tests.simulation.real_steps import held_bytes

aten = torch.ops.aten
SHAPE = 2, 8, 40, 36
N = 2 * 8 * 40 * 36


def maps(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(SHAPE).mul(8).to(dtype)


class Taken(TorchDispatchMode):
    """The bytes that each op is said to take beside its results."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += cpu_copies(func, args, out)
        return out


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda: maps() * (maps() > 3), 4 * N),
        (lambda: maps() - F.one_hot(maps().long()[:, 0], 8).permute(0, 3, 1, 2), 4 * N),
        (lambda: maps(torch.bfloat16) + maps(), 4 * N),
        (lambda: maps(torch.bfloat16).add_(maps()), 8 * N),
        (lambda: maps(torch.int32) / 3, 4 * N),
        (lambda: maps(torch.int32) > 2.5, 4 * N),
        (lambda: maps(torch.int32) > 2, 0),
        (lambda: maps().eq(maps(torch.bfloat16)), 4 * N),
        (lambda: torch.complex(maps(), maps()).abs(), 8 * N),
        (lambda: torch.where(maps() > 3, maps(), maps(torch.bfloat16)), 4 * N),
        (lambda: maps().masked_fill_(maps() > 3, 0), 0),
        (lambda: maps() * torch.tensor(2.0, dtype=torch.float64), 0),
        (lambda: maps(torch.bfloat16) * 2, 0),
        (lambda: maps(torch.bfloat16).mean(), 4 * N),
        (lambda: maps() + maps(), 0),
    ],
)
def test_operands_of_another_dtype_are_converted_whole(program: Callable[[], Tensor], expected: int) -> None:
    with Taken() as taken:
        program()
    assert taken.bytes == expected


def test_a_converting_kernel_is_the_cpus_alone() -> None:
    x, mask = maps(), maps() > 3
    assert cpu_scratch(aten.mul.Tensor, (x, mask), x) == 4 * N
    assert cuda_scratch(aten.mul.Tensor, (x, mask), x) == 0
    assert cuda_scratch(aten.mse_loss.default, (x, x), x.sum()) == 4 * N


def logits(**more: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, target: F.binary_cross_entropy_with_logits(x, target, **more)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse of each": lambda x, target: F.mse_loss(x, target, reduction="none"),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce": lambda x, target: F.binary_cross_entropy(x, target),
    "logits": logits(),
    "logits, pos_weight": logits(pos_weight=torch.full((16, 1, 1), 2.0)),
    "soft margin": F.soft_margin_loss,
    "dice": lambda x, target: (x * (target > 0.5)).sum() / ((target > 0.5).sum() + x.sum()),
    "batch norm": lambda x, target: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x, target: F.layer_norm(x.permute(0, 2, 3, 1), (16,)),
    "roll": lambda x, target: x.roll((3, 3), (2, 3)),
    "index_select": lambda x, target: x.index_select(1, torch.arange(16)),
    "masked": lambda x, target: x[torch.ones(2, 16, 128, 128, dtype=torch.bool)],
    "bilinear": lambda x, target: F.bilinear(rows(x)[:999], rows(target)[:999], torch.ones(9, 64, 64)),
    "embedding_bag": lambda x, target: F.embedding_bag(torch.arange(2048).view(-1, 8), rows(x), mode="max"),
    "a fixed grid": lambda x, target: F.grid_sample(x, target[:, :2].permute(0, 2, 3, 1), align_corners=False),
    "fixed maps": lambda x, target: F.grid_sample(target, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
    "ctc": lambda x, target: ctc(x, torch.full((32,), 20)),
    "ctc, known to be shorter": lambda x, target: ctc(x, torch.full((32,), 5)),
    "lstsq": lambda x, target: torch.linalg.lstsq(rows(x), rows(target)[:, :32]).solution,
}


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, 64)


def ctc(x: Tensor, lengths: Tensor) -> Tensor:
    targets = torch.ones(32, 20, dtype=torch.int64)
    return F.ctc_loss(x.reshape(128, 32, -1).log_softmax(-1), targets, torch.full((32,), 128), lengths)


def step(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, target: Tensor) -> None:
    out = loss(x, target)
    torch.autograd.grad(out, x, torch.ones_like(out))


def peak(trace: Any) -> int:
    held = most = 0
    for number, block in enumerate(trace.events):
        held += block.bytes if number == block.born else -block.bytes
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_derivative_hold_what_the_real_ones_do(name: str) -> None:
    loss, x, target = LOSSES[name], torch.rand(2, 16, 128, 128, requires_grad=True), torch.rand(2, 16, 128, 128)
    step(loss, x, target)  # what torch makes once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(loss, x, target)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        fakes = torch.empty(2, 16, 128, 128, requires_grad=True), torch.empty(2, 16, 128, 128)
    with Tracer({}, {}, Outcomes(fake), cpu_scratch) as tracer, fake:
        step(loss, *fakes)
    measured = max(held_bytes(profiled))
    assert abs(peak(tracer.trace) - measured) <= 0.01 * measured + 4096
