"""The optimizer a strategy asks for: the recipe's own, or a leaner one in its place."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from fullframe.errors import FullframeError, RecipeError, StrategyError
from fullframe.model.parallelize import ParallelModel
from fullframe.model.sharding.values import is_sharded
from fullframe.recipe import Parameters
from fullframe.strategy import Strategy
from fullframe.technique import OptimizerName
from fullframe.techniques.evaluation_point import has_evaluation_point, to_training_point
from fullframe.techniques.zero import shard_state, trainable
from fullframe.wording import described

_MOMENTUM = 0.9  # of "sgd" in the place of an optimizer that has none


def build_optimizer(make: Callable[[Parameters], Optimizer], model: nn.Module, strategy: Strategy) -> Optimizer:
    """The optimizer of the parameters of `model`, which `parallelize` returned, as `strategy` wants it.

    `make` is the recipe's; of another optimizer's parameter groups, learning rate and weight decay are kept, of one
    of the same family all options.

    Raises StrategyError when the optimizer is not installed or cannot update what is sharded.
    """
    optimizer = make(Parameters((model.module if isinstance(model, ParallelModel) else model).named_parameters()))
    if not hasattr(optimizer, "param_groups"):
        raise RecipeError(f"recipe.optimizer(parameters) must return an Optimizer, got {described(optimizer)}")
    if strategy.optimizer != "recipe":
        optimizer = _replaced(optimizer, strategy.optimizer)
    if isinstance(optimizer, Adafactor) and any(map(is_sharded, trainable(optimizer))):
        raise StrategyError(
            "torch's Adafactor cannot update sharded parameters (its row and column means are not taken over ranks); "
            "use optimizer 'adamw8bit', or shard_optimizer in the place of shard_parameters"
        )
    to_training_point(optimizer)
    if strategy.shard_optimizer and strategy.ranks > 1:
        if has_evaluation_point(optimizer):
            raise StrategyError(
                f"{type(optimizer).__name__} moves parameters in its train() and eval(), which a rank could do for its "
                "own alone; use shard_parameters, or leave out shard_optimizer"
            )
        shard_state(optimizer)
    return optimizer


@contextmanager
def naming_optimizer(optimizer: Optimizer, shards_parameters: bool) -> Iterator[None]:
    """Raises StrategyError where an optimizer that is not torch's does to parameters what sharded ones do not take."""
    try:
        yield
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
        others = FullframeError, torch.OutOfMemoryError, dist.DistError
        if not shards_parameters or is_torchs or isinstance(error, others):
            raise
        raise StrategyError(
            f"{type(optimizer).__name__} cannot update sharded parameters, on which its step raised "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; use shard_optimizer in the place of "
            "shard_parameters, or an optimizer of torch.optim"
        ) from error


def set_learning_rate(optimizer: Optimizer, factor: float | Tensor) -> None:
    """Set every group's learning rate to `factor`, which may be a tensor, times the one it began with.

    Raises RecipeError where that is no finite number.
    """
    try:
        finite = math.isfinite(factor)
    except (TypeError, ValueError, RuntimeError):
        finite = False
    if not finite:
        raise RecipeError(f"recipe.schedule(step) must return a finite number, got {factor!r}")
    for group in optimizer.param_groups:  # all of them first, for groups may share a tensor
        group.setdefault("initial_lr", float(group["lr"]))
    for group in optimizer.param_groups:
        rate, value = group["lr"], group["initial_lr"] * float(factor)
        if isinstance(rate, Tensor):  # compiled optimizers keep the tensor they were compiled with
            rate.fill_(value)
        else:
            group["lr"] = value


_FAMILIES: dict[str, tuple[tuple[type[Optimizer], ...], tuple[str, ...]]] = {  # and the options they share
    "sgd": ((SGD,), ("momentum", "dampening", "nesterov")),
    "adamw": ((Adam, AdamW), ("betas", "eps", "amsgrad")),
    "adamw8bit": ((Adam, AdamW), ("betas", "eps", "amsgrad")),
    "adafactor": ((Adafactor,), ("beta2_decay", "eps", "d")),
}


def _replaced(source: Optimizer, name: OptimizerName) -> Optimizer:
    """The optimizer called `name` for the parameter groups of `source`."""
    family, options = _FAMILIES[name]
    kept = ["params", "lr", "weight_decay", "maximize", *(options if isinstance(source, family) else ())]
    groups = [{key: group[key] for key in kept if key in group} for group in source.param_groups]
    parameters = trainable(source)
    # Fused kernels need no temporary of the parameters' size; torch has none of SGD for sharded parameters.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters) or None
    if name in ("adafactor", "adamw8bit") and any(p.is_complex() for p in parameters):
        raise StrategyError(f"optimizer '{name}' cannot update complex parameters; use 'adamw', or the recipe's own")
    if name == "sgd":
        return SGD(groups, momentum=_MOMENTUM, fused=None if any(map(is_sharded, parameters)) else fused)
    if name == "adamw":
        return AdamW(groups, fused=fused)
    if name == "adafactor":
        return Adafactor(groups)
    if any(group.get("maximize") for group in groups):
        raise StrategyError("optimizer 'adamw8bit' cannot maximize; return the negative loss")
    return _adamw8bit(groups)


def _adamw8bit(groups: list[dict[str, Any]]) -> Optimizer:
    try:
        import torchao.optim  # type: ignore[import-untyped]
    except ImportError as error:
        raise StrategyError(
            f"optimizer 'adamw8bit' needs torchao ({error}): pip install 'fullframe[adamw8bit]'"
        ) from error

    # Without torch's wrapper, which an earlier optimizer of that class has left there: it would run the hooks again.
    of_torchao = inspect.unwrap(torchao.optim.AdamW8bit.step, stop=lambda step: not getattr(step, "hooked", False))

    class AdamW8bit(torchao.optim.AdamW8bit):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            with torch.compiler.set_stance("force_eager"):  # CPUs would take minutes to compile a kernel for each shape
                return of_torchao(self, closure)

    on_host = all(p.device.type == "cpu" for group in groups for p in group["params"])
    optimizer: Optimizer = (AdamW8bit if on_host else torchao.optim.AdamW8bit)(groups)
    return optimizer
