"""Training for int8: rounding by given and learned scales, observers, and a network that `prepare_qat` has made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import Tensor, nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import fullframe as ff
from tests.exactness import mesh, relative
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, one

INT8 = -128, 127


def of_32_bits(func: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As torch asks, numbers of 32 bits; the gradient that comes back through `func` is 1, which 32 bits hold."""

    def op(x: Tensor) -> Tensor:
        y = func(x.float())
        if y.requires_grad:
            y.register_hook(torch.ones_like)
        return y.double()

    return op


def by_columns(x: Tensor) -> Tensor:
    scales = torch.linspace(0.01, 0.05, x.shape[-1])
    return torch.fake_quantize_per_channel_affine(x, scales, torch.arange(x.shape[-1]).int(), x.dim() - 1, *INT8)


def observed(x: Tensor, by_row: bool = False) -> Tensor:
    """What it gives, and all that it remembers, after two looks and one rounding without a look."""
    rows = x.shape[0] if by_row else 1
    on, off, lowest, highest = torch.ones(1).long(), torch.zeros(1).long(), torch.zeros(rows), torch.zeros(rows)
    scale, zero = torch.ones(rows), torch.zeros(rows).int()
    given = [
        torch.fused_moving_avg_obs_fake_quant(
            y, look, on, lowest, highest, scale, zero, 0.3, *INT8, 0 if by_row else -1, by_row, by_row
        )
        for y, look in ((x, on), (x * 3 - 1, on), (x * 2, off))
    ]
    return sum(given) + (lowest + highest * 2 + scale * 3 + zero).sum()  # type: ignore[return-value]


CASES: dict[str, Case] = {
    "one scale": one(of_32_bits(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, 3, *INT8))),
    "a tensor's scale": one(
        of_32_bits(lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.01), torch.tensor(1).int(), *INT8))
    ),
    "of channels": one(
        of_32_bits(
            lambda x: torch.fake_quantize_per_channel_affine(
                x, torch.linspace(0.01, 0.03, 4), torch.arange(4).int(), 1, *INT8
            )
        )
    ),
    "of columns": one(of_32_bits(by_columns)),
    "observed": one(of_32_bits(observed)),
    "observed by row": one(of_32_bits(lambda x: observed(x, by_row=True))),
}

test_as_in_one_process = as_in_one_process(__name__, CASES)


def learned(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if len(scale) == 1:
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, *INT8, 0.5)
    return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 1, *INT8, 0.5)


def _learned(scales: int, shape: tuple[int, int]) -> float:
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 11, 17, requires_grad=True)
        scale, zero = torch.full((scales,), 0.01, requires_grad=True), torch.ones(scales, requires_grad=True)
        y = learned(ff.shard(x, mesh(*shape)) if split else x, scale, zero)
        (y**2).mean().backward()
        y = y.full() if isinstance(y, ff.SpatialTensor) else y
        found.append((y.detach(), x.grad, scale.grad, zero.grad))
    return max(relative(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("scales", [1, 4])
def test_scales_are_learned(scales: int, shape: tuple[int, int]) -> None:
    assert max(rank_group(shape[0] * shape[1]).run(_learned, scales, shape)) < 1e-5


def fake_quantized(observer: Any, **options: Any) -> Any:
    return quantization.FakeQuantize.with_args(observer=observer, quant_min=0, quant_max=255, **options)


ACTIVATIONS: dict[str, Any] = {
    "fused": quantization.default_fused_act_fake_quant,
    "smallest and largest": fake_quantized(quantization.MovingAverageMinMaxObserver),
    "histogram": fake_quantized(quantization.HistogramObserver),
    "learned": _LearnableFakeQuantize.with_args(
        observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, scale=0.02, zero_point=100.0
    ),
}


def network(activation: str) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(block, nn.Conv2d(4, 5, 3, stride=2, padding=1), nn.Upsample(scale_factor=2)).train()
    model = quantization.fuse_modules_qat(model, [["0.0", "0.1", "0.2"]])
    model.qconfig = quantization.QConfig(ACTIVATIONS[activation], quantization.default_per_channel_weight_fake_quant)
    return quantization.prepare_qat(model)


def _trained(activation: str, shape: tuple[int, int]) -> float:
    one_process, split = network(activation), ff.parallelize(network(activation), mesh(*shape))
    worst = 0.0
    for step in range(3):
        x = torch.randn(2, 3, 10, 14, generator=torch.Generator().manual_seed(step))
        losses = []
        for model, image in ((one_process, x), (split, ff.shard(x, mesh(*shape)))):
            model.zero_grad()
            loss = (model(image) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.05) if parameter.grad is not None else None
            losses.append(loss.detach())
        worst = max(worst, relative(*losses))
    buffers = zip(one_process.named_buffers(), split.named_buffers(), strict=True)
    # a histogram has a value that a last bit tipped in another bin
    numbers = [(a, b) for (name, a), (_, b) in buffers if a.numel() and not name.endswith("histogram")]
    return max(worst, *(relative(a.double(), b.double()) for a, b in numbers))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_is_trained_for_int8(activation: str) -> None:
    """In 32 bits, of which a last one may tip a rounding: a part's own extremes would be off by 0.1."""
    assert max(rank_group(3).run(_trained, activation, (1, 3))) < 1e-4
