"""One exact optimizer step: accumulate microbatches, divide by the true count of the whole job's batch, update.

Gradients of sums are accumulated and averaged over all ranks by `parallelize`; what turns that average into the
gradient of the mean loss is one factor, ranks / (count added over all ranks), because the ranks of a replica each hold
their replica's full count.
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.arguments import checked
from fullframe.errors import GradientError, RecipeError, StrategyError
from fullframe.model.attributes import kept_attributes
from fullframe.model.buffers import KeptBuffers
from fullframe.model.compiled.blocks import compiled_blocks
from fullframe.model.forward_patch import restore
from fullframe.model.parallelize import ParallelModel
from fullframe.model.parallelize_for import require_parallelized_for
from fullframe.model.sharding.taken import naming_shards
from fullframe.model.sharding.values import whole_value
from fullframe.model.sync_batchnorm import synchronize_batchnorm
from fullframe.model.trained import sparse_tables
from fullframe.ranks.waiting import naming_lost_ranks
from fullframe.strategy import Strategy, multiplied
from fullframe.techniques.budget import Costs
from fullframe.techniques.ema import ParameterAverage
from fullframe.techniques.likeness import Differences
from fullframe.techniques.optimizers import naming_optimizer
from fullframe.techniques.precision import Fp32Math, LossScale, computing, fp32_math
from fullframe.techniques.recompute import Recomputation
from fullframe.techniques.separable import require_separable
from fullframe.techniques.stages.models import staged
from fullframe.techniques.unrolling.models import keep_states
from fullframe.techniques.update_in_backward import UpdateInBackward
from fullframe.training.changes import Changes
from fullframe.training.host import RealHost, StepHost
from fullframe.training.microbatches import Cut, fresh, microbatches
from fullframe.training.phases import Phases
from fullframe.training.same_step import SameStep
from fullframe.wording import plural

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step did; equal on all ranks but for `seconds`."""

    loss: float  # mean over the whole job's batch; NaN when nothing was counted
    grad_norm: float  # 2-norm of the gradient of `loss`, before clipping
    skipped: bool  # not finite (loss, count, gradient), or nothing counted: no trained parameter or buffer has changed
    seconds: float
    hands: int = 0  # ranks that raised theirs


@checked
class TrainStep:
    """`record = step(batch)`: one update from this rank's batch, split over `strategy.microbatches` slices.

    `model` is what `parallelize` returned (in one process a plain module will do). `loss(model, batch)` returns a
    scalar mean, or (sum, count). `optimizer` has the model's parameters. Gradients are sent on the last microbatch
    only. Afterwards `parameter.grad` holds the gradient of the whole batch's mean loss, clipped. `cut` is as the
    recipe's. `host` is where the step runs: here, unless a simulation says otherwise.

    Raises StrategyError when the strategy does not match the ranks, the model is not parallelized, or the optimizer
    cannot be given some of the parameters at a time as it asks, RecipeError for an optimizer that needs a closure, and
    for sparse gradients; calling it raises ShapeError when the batch cannot be cut into the microbatches, RecipeError
    when the loss is no scalar or requires no gradient, DivergenceError on all ranks where their strategies or
    optimizers differ, or the losses that a replica's ranks compute.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        *,
        host: StepHost | None = None,
        cut: Cut | None = None,
    ):
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        if strategy.ranks != self._ranks:
            needed = plural(strategy.ranks, "rank")
            raise StrategyError(
                f"the strategy needs {multiplied(strategy.mesh)} = {needed}, this job has {self._ranks}; start "
                f"{needed} or change it"
            )
        if self._ranks > 1 and not hasattr(model, "no_sync"):
            raise StrategyError(
                f"{type(model).__name__} averages no gradients over the {self._ranks} ranks; "
                "pass fullframe.parallelize(model, mesh)"
            )
        if self._ranks > 1:
            require_parallelized_for(strategy, model)
        _require_no_closure(optimizer)
        if host is None and strategy.shard_optimizer and strategy.ranks > 1:
            require_separable(optimizer, "shard_optimizer")
        if host is None and strategy.update_in_backward:
            require_separable(optimizer, "update_in_backward")
        self._model, self._loss, self._optimizer, self._strategy = model, loss, optimizer, strategy
        self._cut = cut
        parameter = next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self._device_type = device.type
        self._host = RealHost(device, self._ranks, strategy.offload) if host is None else host
        self.scale = LossScale() if strategy.precision == "fp16" else None
        self._plain = plain = model.module if isinstance(model, ParallelModel) else model
        _require_of_model(optimizer, plain)
        self.average = None if strategy.ema_decay is None else ParameterAverage(plain, strategy.ema_decay)
        in_backward, replicas = strategy.update_in_backward, strategy.data
        self._in_backward = UpdateInBackward(plain, optimizer, self._ranks, replicas) if in_backward else None
        self._buffers = KeptBuffers(plain)
        restore(plain)  # what an earlier step has put in
        compiled = getattr(model, "compiled", None)
        if compiled is not None:
            compiled.put_on(plain)
        elif strategy.compile:
            compiled_blocks(plain, strategy.compile)
        if self._ranks > 1:
            synchronize_batchnorm(plain, strategy.parts * strategy.stages, every=strategy.sync_batchnorm)
        keep_states(plain, strategy)
        self._recomputation = Recomputation(plain, strategy)
        self._differences = Differences()  # between blocks and the same recomputed
        self.staged = staged(plain, strategy)
        self.updating = False  # parameters may be neither those before the step nor those after it
        are_real = self._ranks > 1 and isinstance(self._host, RealHost)  # others, which may differ
        self._same = SameStep(strategy, optimizer) if are_real else None
        self._is_compared = False

    @naming_lost_ranks()
    def __call__(self, batch: Any, hand: bool = False) -> StepRecord:
        """Take the step. With `hand` this rank asks for the others' attention: all learn how many did."""
        started = time.perf_counter()
        if self._same is not None and not self._is_compared:
            self._is_compared = True
            self._same.require_alike(self._strategy)
        self.begin()
        take = self._update_after_backward if self._in_backward is None else self._update_in_backward
        math_of_all = fp32_math(Fp32Math.of(self._strategy.precision))  # backward as forward
        with math_of_all, self._differences.collecting():
            loss_sum, count, grad_norm, skipped, hands = take(batch, hand)
        if skipped:
            self._buffers.restore()  # batch norm would keep what is not finite for ever
        elif self.average is not None:
            self.average.update()
        self.updating = False
        self._host.phase("")
        return StepRecord(
            loss=loss_sum / count if count > 0 else math.nan,
            grad_norm=grad_norm,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            hands=round(hands),
        )

    @property
    def phases(self) -> Phases | None:
        """How long each part of a step takes; None in a simulation, which has a clock of its own."""
        return self._host.phases if isinstance(self._host, RealHost) else None

    def begin(self) -> None:
        """How every step begins: gradients are let go, buffers kept."""
        self._model.zero_grad(set_to_none=True)
        self._buffers.keep()

    def _update_after_backward(self, batch: Any, hand: bool) -> tuple[float, float, float, bool, float]:
        """The whole job's loss sum and count, gradient norm, whether nothing was updated, and the hands raised."""
        loss_sum, count = self._accumulate(batch)
        self._host.phase("optimizer")
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = whole_value(nn.utils.get_total_norm(gradients))
        broken = ~torch.isfinite(norm + loss_sum + count)
        loss_sum_of_all, count_of_all, broken_ranks, hands, scaled_norm = self._agree(
            loss_sum, count, broken, torch.full_like(count, hand), alike=norm
        )
        skipped = broken_ranks > 0 or count_of_all <= 0
        factor = self._ranks / count_of_all if count_of_all > 0 else math.nan
        if self.scale is not None:
            factor /= self.scale.value
            self.scale.update(overflowed=broken_ranks > 0, counted=0 < count_of_all < math.inf)
        grad_norm = scaled_norm * factor
        if not skipped:
            factor *= self._clipping(grad_norm)
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self.updating = True
            with naming_optimizer(self._optimizer, self._strategy.shard_parameters):
                self._host.update(self._optimizer.step)
        return loss_sum_of_all, count_of_all, grad_norm, skipped, hands

    def _update_in_backward(self, batch: Any, hand: bool) -> tuple[float, float, float, bool, float]:
        """The same; whether to update, and by what to divide, is agreed before backward."""
        assert self._in_backward is not None
        new = self._in_backward.begin()
        if isinstance(self._model, ParallelModel):
            self._model._leave_shares(new)
        self._host.phase("forward")
        summed, count = self._forward(batch)
        self._host.phase("backward")
        mine = self._in_backward.reached(summed)
        loss_sum, count_of_all, broken_ranks, hands = self._agree(
            summed.detach().double(), count, ~torch.isfinite(summed.detach() + count), torch.full_like(count, hand)
        )
        if broken_ranks > 0 or count_of_all <= 0:
            return loss_sum, count_of_all, math.nan, True, hands
        turns = self._host.agree_order(mine, len(self._in_backward.names))
        self.updating = True
        (grad_norm,) = self._host.read([self._in_backward.backward(summed, count_of_all, turns, mine)])
        if not math.isfinite(grad_norm):
            raise GradientError(
                f"the gradient's norm is {grad_norm}, and update_in_backward has applied it; go on from the last "
                "checkpoint, without update_in_backward where gradients are not finite now and then"
            )
        return loss_sum, count_of_all, grad_norm, False, hands

    def _agree(self, *summed: Tensor, alike: Tensor | None = None) -> list[float]:
        """The sums over all ranks of some scalars, and one that is equal on all, on the host.

        Raises StrategyError on all ranks where a block was not the same when it was recomputed since the last time,
        DivergenceError where their optimizers have other options, or a replica's another loss each.
        """
        scalars = [*summed, self._differences.count(summed[0])]
        totals = torch.stack([scalar.double() for scalar in scalars])
        if self._same is not None:
            totals = torch.cat([totals, self._same.told(*summed[:2])])
        self._host.phase("all_reduce")
        if self._ranks > 1:
            dist.all_reduce(totals)
        read = self._host.read([*totals, *([] if alike is None else [alike])])
        different, *told = read[len(summed) : len(totals)]
        del read[len(summed) : len(totals)]
        if self._same is not None:
            self._same.require(told, self._strategy)
        if different > 0:
            self._differences.refuse()
        self._host.phase("backward" if self._in_backward is not None else "optimizer")
        return read

    def rehearse(self, batch: Any) -> None:
        """Forward and backward as in a step, without an update; gradients, buffers and attributes are as before."""
        self._buffers.keep()
        first = next(microbatches(batch, self._slices, self._cut))
        self._recomputation.settle(lambda names: self._block_costs(names, first))  # of which nothing is taken back
        with kept_attributes(self._plain), fp32_math(Fp32Math.of(self._strategy.precision)):
            self._accumulate(batch)
        self.abandon()

    def forward(self, batch: Any) -> None:
        """The forward passes of a step alone; buffers are as before."""
        self._buffers.keep()
        with torch.no_grad(), computing(self._strategy.precision, self._device_type):
            for microbatch in microbatches(batch, self._slices, self._cut):
                self._loss(self._model, microbatch)
        self._buffers.restore()

    def abandon(self) -> None:
        """After an exception: let go of what the step held; the model is as before the step unless `updating`."""
        self._model.zero_grad(set_to_none=True)
        self._buffers.restore()

    def slice_finer(self, count: int) -> None:
        """Go through batches in `count` microbatches from now on."""
        self._strategy = replace(self._strategy, microbatches=count)
        if self.staged is not None:
            self.staged.slice(count)

    @property
    def _slices(self) -> int:
        """In which the batch goes through the model; on stages it goes as a whole, and they slice it."""
        return self._strategy.microbatches if self.staged is None else 1

    @naming_shards()
    def _accumulate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Backward through every microbatch; this rank's loss sum and count, float64."""
        totals, pieces = [], self._slices
        # Until they are sent, sharded gradients are whole on every rank.
        among = "_keeping_buffers" if self._strategy.shard_parameters else "no_sync"
        for number, microbatch in self._host.numbered(microbatches(batch, pieces, self._cut)):
            with nullcontext() if number == pieces else getattr(self._model, among, nullcontext)():
                self._host.phase("forward")
                loss_sum, count = self._forward(microbatch)
                self._host.backward(self._scaled(loss_sum, count))
            totals.append(torch.stack([loss_sum.detach().double(), count]))
        if isinstance(self._model, ParallelModel):
            self._model._average_left()
        loss_sum, count = torch.stack(totals).sum(0).unbind()
        return loss_sum, count

    def _forward(self, microbatch: Any) -> tuple[Tensor, Tensor]:
        self._recomputation.settle(lambda names: self._block_costs(names, microbatch))
        with computing(self._strategy.precision, self._device_type), self._host.saving():
            loss_sum, count = sum_and_count(self._loss(self._model, microbatch))
        if self.staged is None:  # of whose blocks each stage calls some, and whose last alone has the loss
            if not loss_sum.requires_grad:
                raise RecipeError(
                    "the loss requires no gradient: it was detached or computed under no_grad, or no parameter that it "
                    "depends on is trained (requires_grad=False)"
                )
            self._recomputation.check()
        return loss_sum, count

    def _block_costs(self, names: Sequence[str], microbatch: Any) -> Costs:
        def forward() -> None:
            with getattr(self._model, "no_sync", nullcontext)(), computing(self._strategy.precision, self._device_type):
                self._loss(self._model, fresh(microbatch))

        changes = Changes(microbatch, self._plain, "all" if isinstance(self._host, RealHost) else "none")
        costs = self._host.block_costs(self._plain, names, forward)
        if changes.of_batch() or changes.of_parameters():
            what = "writes into its batch" if changes.of_batch() else "writes to parameters"
            raise StrategyError(
                f"recompute='budget' runs the loss once before the first step, and it {what}; use recompute='blocks', "
                "or do that outside of the loss"
            )
        return costs

    def _scaled(self, loss_sum: Tensor, count: Tensor) -> Tensor:
        """The loss times the scale that fp16 needs, on which the ranks agree at the first microbatch."""
        if self.scale is None:
            return loss_sum
        if not self.scale.started:
            largest = count * self._slices
            if self._ranks > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self.scale.start(*self._host.read([largest]))
        return loss_sum.float() * self.scale.value

    def _clipping(self, grad_norm: float) -> float:
        """What the gradients are multiplied by, so that their norm is at most `clip_norm`; as torch does it."""
        most = self._strategy.clip_norm
        return 1.0 if most is None else min(1.0, most / (grad_norm + 1e-6))


def _require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises RecipeError for an optimizer that calls the loss itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise RecipeError(
            f"{type(optimizer).__name__} computes the loss again and again in a step (its closure), which a "
            "TrainStep does once; choose an optimizer whose step() needs no closure"
        )


def _require_of_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises RecipeError where gradients are sparse, or of parameters that no one zeroes, scales or averages."""
    for name, table in sparse_tables(model).items():
        raise RecipeError(
            f"{type(table).__name__} {name!r} gives sparse gradients, whose norm a step cannot take; build it with "
            "sparse=False, and take an optimizer for dense ones"
        )
    known = set(map(id, model.parameters()))
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise RecipeError(
                    f"the optimizer's group {number} has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's; make it one (a learned loss weight, say: model.weight = nn.Parameter(...)), so that its "
                    "gradient is averaged as the others are"
                )


def sum_and_count(output: Any) -> tuple[Tensor, Tensor]:
    """A mean counts as the sum over one element, so that microbatches and replicas weigh alike."""
    value, count = output if isinstance(output, tuple) and len(output) == 2 else (output, 1)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got, remedy = type(value).__name__, "return one"
        if isinstance(value, Mapping):
            remedy = f"return one of {', '.join(map(str, value))}"
        elif isinstance(value, Tensor):
            got, remedy = f"shape {tuple(value.shape)}", "take its .mean(), or return (its .sum(), its .numel())"
        raise RecipeError(f"the loss must be a scalar tensor or a pair (sum, count), got {got}; {remedy}")
    if value.is_complex():
        raise RecipeError("the loss is a complex number, which has no gradient; return its .abs() or .real")
    if not isinstance(count, (Tensor, Real)):
        raise RecipeError(f"the loss's count must be one number, got {type(count).__name__}; return (sum, count)")
    if isinstance(count, Tensor) and count.dim() != 0:
        raise RecipeError(f"the loss's count must be one number, got shape {tuple(count.shape)}; reduce it with .sum()")
    if not isinstance(count, Tensor):  # made on the device: to send it there would wait for the forward pass
        return value, torch.full((), float(count), dtype=torch.float64, device=value.device)
    return value, count.detach().to(value.device, torch.float64)
