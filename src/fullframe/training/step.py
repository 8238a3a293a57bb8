"""One exact optimizer step: accumulate microbatches, divide by the true count of the whole job's batch, update.

Gradients of sums are accumulated and averaged over all ranks by `parallelize`; what turns that average into the
gradient of the mean loss is one factor, ranks / (count added over all ranks), because the height x width ranks of a
replica each hold their replica's full count.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullframe.errors import RecipeError, ShapeError, StrategyError
from fullframe.strategy import Strategy
from fullframe.training.average import ParameterAverage
from fullframe.training.precision import LossScale, computing

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step did; equal on all ranks but for `seconds`."""

    loss: float  # mean over the whole job's batch; NaN when nothing was counted
    grad_norm: float  # 2-norm of the gradient of `loss`, before clipping
    skipped: bool  # the loss or a gradient was not finite, or nothing was counted: no parameter changed
    seconds: float


class TrainStep:
    """`record = step(batch)`: one update from this rank's batch, split over `strategy.microbatches` slices.

    `model` is what `parallelize` returned (in one process a plain module will do). `loss(model, batch)` returns a
    scalar mean, or (sum, count). Gradients are sent on the last microbatch only. Afterwards `parameter.grad` holds
    the gradient of the whole batch's mean loss, clipped.

    Raises StrategyError when the strategy does not match the ranks or the model is not parallelized; calling it
    raises ShapeError when the batch cannot be cut into the microbatches, RecipeError when the loss is no scalar.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, strategy: Strategy):
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        if strategy.ranks != self._ranks:
            raise StrategyError(
                f"the strategy needs data {strategy.data} x height {strategy.height} x width {strategy.width} = "
                f"{strategy.ranks} ranks, this job has {self._ranks}; start {strategy.ranks} ranks or change it"
            )
        if self._ranks > 1 and not hasattr(model, "no_sync"):
            raise StrategyError(
                f"{type(model).__name__} averages no gradients over the {self._ranks} ranks; "
                "pass fullframe.parallelize(model, mesh)"
            )
        self._model, self._loss, self._optimizer, self._strategy = model, loss, optimizer, strategy
        parameter = next(model.parameters(), None)
        self._device_type = "cpu" if parameter is None else parameter.device.type
        self.scale = LossScale() if strategy.precision == "fp16" else None
        plain = getattr(model, "module", model)
        self.average = None if strategy.ema_decay is None else ParameterAverage(plain, strategy.ema_decay)

    def __call__(self, batch: Any) -> StepRecord:
        started = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        loss_sum, count = self._accumulate(batch)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        broken = ~(torch.isfinite(norm) & torch.isfinite(loss_sum))
        totals = torch.stack([loss_sum, count, broken.to(loss_sum)])
        if self._ranks > 1:
            dist.all_reduce(totals)
        loss_sum_of_all, count_of_all, broken_ranks, scaled_norm = self._read(*totals, norm)
        skipped = broken_ranks > 0 or count_of_all <= 0
        factor = self._ranks / count_of_all if count_of_all > 0 else math.nan
        if self.scale is not None and self.scale.value is not None:
            factor /= self.scale.value
            self.scale.update(overflowed=broken_ranks > 0)
        grad_norm = scaled_norm * factor
        if not skipped:
            torch._foreach_mul_(gradients, factor * self._clipping(grad_norm))
            self._optimizer.step()
            if self.average is not None:
                self.average.update()
        return StepRecord(
            loss=loss_sum_of_all / count_of_all if count_of_all > 0 else math.nan,
            grad_norm=grad_norm,
            skipped=skipped,
            seconds=time.perf_counter() - started,
        )

    def rehearse(self, batch: Any) -> None:
        """Forward and backward as in a step, without an update; the gradients are thrown away."""
        self._accumulate(batch)
        self._model.zero_grad(set_to_none=True)

    def _accumulate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Backward through every microbatch; this rank's loss sum and count, float64."""
        totals = []
        pieces = self._strategy.microbatches
        no_sync = getattr(self._model, "no_sync", nullcontext)
        for number, microbatch in enumerate(microbatches(batch, pieces), start=1):
            with nullcontext() if number == pieces else no_sync():
                with computing(self._strategy.precision, self._device_type):
                    loss_sum, count = _sum_and_count(self._loss(self._model, microbatch))
                self._scaled(loss_sum, count).backward()
            totals.append(torch.stack([loss_sum.detach().double(), count]))
        loss_sum, count = torch.stack(totals).sum(0).unbind()
        return loss_sum, count

    def _scaled(self, loss_sum: Tensor, count: Tensor) -> Tensor:
        """The loss times the scale that fp16 needs, on which the ranks agree at the first microbatch."""
        if self.scale is None:
            return loss_sum
        if self.scale.value is None:
            largest = count * self._strategy.microbatches
            if self._ranks > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self.scale.start(self._read(largest)[0])
        return loss_sum.float() * self.scale.start(1)

    def _clipping(self, grad_norm: float) -> float:
        """What the gradients are multiplied by, so that their norm is at most `clip_norm`."""
        most = self._strategy.clip_norm
        return 1.0 if most is None or grad_norm <= most else most / grad_norm

    def _read(self, *scalars: Tensor) -> list[float]:
        """The numbers on the host: what the whole job decides by. A simulation, which has none, overrides this."""
        return torch.stack([scalar.double() for scalar in scalars]).tolist()


def _sum_and_count(output: Any) -> tuple[Tensor, Tensor]:
    """A mean counts as the sum over one element, so that microbatches and replicas weigh alike."""
    value, count = output if isinstance(output, tuple) and len(output) == 2 else (output, 1)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(f"the loss must be a scalar tensor or a pair (sum, count), got {got}; reduce it with .sum()")
    if isinstance(count, Tensor) and count.dim() != 0:
        raise RecipeError(f"the loss's count must be one number, got shape {tuple(count.shape)}; reduce it with .sum()")
    return value, torch.as_tensor(count, dtype=torch.float64, device=value.device).detach()


def microbatches(batch: Any, count: int) -> Iterator[Any]:
    """`count` equal slices of a nested batch along its first dim; scalars and strings go to every slice.

    Raises ShapeError when the tensors' first dims differ or are no multiple of `count`.
    """
    if count == 1:
        yield batch
        return
    sizes = {name: length for name, length in _lengths(batch, "batch")}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name}: {length}" for name, length in sizes.items()) or "no tensor"
        raise ShapeError(f"microbatches need one common first dim, got {found}; use microbatches=1")
    samples = next(iter(sizes.values()))
    if samples % count:
        raise ShapeError(f"{samples} samples a replica cannot be cut into {count} equal microbatches")
    size = samples // count
    for start in range(0, samples, size):
        yield _cut(batch, start, start + size, samples)


def _lengths(value: Any, name: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, Tensor):
        if value.dim():
            yield name, value.shape[0]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(item, str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _lengths(item, f"{name}[{number}]")


def _cut(value: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _cut(item, start, stop, samples) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # A list without tensors, one entry a sample (names, paths), is cut as the tensors are.
        if len(value) == samples and not any(_lengths(value, "")):
            return value[start:stop]
        items = [_cut(item, start, stop, samples) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
