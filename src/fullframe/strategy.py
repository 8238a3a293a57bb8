"""What to train (`Recipe`) and how to spread it (`Strategy`): plain frozen data, checked once.

A recipe is a Python file with a function `recipe() -> Recipe`; a strategy is JSON. No torch is loaded here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from fullframe.errors import RecipeError, StrategyError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

Batch = Mapping[str, Any]  # what a dataset of dicts gives after collation
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Recompute = Literal["none", "blocks", "budget"]
OptimizerName = Literal["recipe", "sgd", "adamw", "adafactor", "adamw8bit"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one batch is spread and what is done to fit it. The update is that of the whole batch for any of these, but
    for rounding (`precision`) and for batch norm, whose statistics in training are of one replica's microbatch.

    data, height, width: replicas, and the ranks that share a sample's rows and columns
    microbatches:        slices in which a replica goes through its batch; gradients are sent with the last one
    precision:           "fp32" (the model's own dtype), "tf32" (fp32 with TF32 matrix units), "bf16" (autocast), "fp16"
                         (autocast with loss scaling, for devices without bf16)
    recompute:           "none"; "blocks": activations inside the model's repeated blocks are computed again in
                         backward; "budget": the fewest blocks, by seconds per byte, that keep saved activations
                         within `recompute_budget_bytes`
    recompute_modules:   names of the modules to recompute (fnmatch patterns); empty: the repeated blocks are found
    recompute_budget_bytes: saved activations a rank may hold when a microbatch's forward ends; with "budget" only
    offload:             saved activations wait for backward in host memory
    optimizer:           "recipe", or another in its place with the recipe's learning rate: "sgd", "adamw",
                         "adafactor", "adamw8bit"
    shard_optimizer:     each rank keeps and updates its part of the optimizer's state (ZeRO-1)
    shard_parameters:    each rank keeps its part of parameters, gradients and optimizer state (FSDP2)
    update_in_backward:  a parameter is updated as soon as its gradient is there, which is then dropped
    clip_norm:           gradients are scaled down to this global 2-norm
    ema_decay:           an exponential moving average of the parameters is kept, and evaluated
    sync_batchnorm:      batch norm takes its statistics over the data replicas too

    Raises StrategyError when a field is out of range or contradicts another.
    """

    data: int = 1
    height: int = 1
    width: int = 1
    microbatches: int = 1
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_budget_bytes: int | None = None
    offload: bool = False
    optimizer: OptimizerName = "recipe"
    shard_optimizer: bool = False
    shard_parameters: bool = False
    update_in_backward: bool = False
    clip_norm: float | None = None
    ema_decay: float | None = None
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "height", "width", "microbatches"):
            _require_count(StrategyError, f"strategy.{name}", getattr(self, name))
        for name, choices in (("precision", Precision), ("recompute", Recompute), ("optimizer", OptimizerName)):
            _require_choice(f"strategy.{name}", getattr(self, name), get_args(choices))
        for name in ("offload", "shard_optimizer", "shard_parameters", "update_in_backward", "sync_batchnorm"):
            _require_choice(f"strategy.{name}", getattr(self, name), (False, True))
        object.__setattr__(self, "recompute_modules", tuple(self.recompute_modules))  # JSON has lists only
        self._require_agreement()

    def _require_agreement(self) -> None:
        """Fields that contradict each other."""
        if (self.recompute == "budget") != (self.recompute_budget_bytes is not None):
            raise StrategyError(
                f"strategy.recompute is {self.recompute!r} and recompute_budget_bytes {self.recompute_budget_bytes}; "
                "give the bytes with recompute='budget', and only then"
            )
        if self.recompute_budget_bytes is not None:
            _require_count(StrategyError, "strategy.recompute_budget_bytes", self.recompute_budget_bytes, least=0)
        if self.recompute_modules and self.recompute == "none":
            raise StrategyError("strategy.recompute_modules names modules, but recompute is 'none'; use 'blocks'")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise StrategyError(f"strategy.clip_norm must be greater than 0, got {self.clip_norm!r}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise StrategyError(f"strategy.ema_decay must be from 0 to below 1, got {self.ema_decay!r}")
        if self.shard_optimizer and self.shard_parameters:
            raise StrategyError("strategy.shard_parameters shards the optimizer too; leave out shard_optimizer")
        if self.update_in_backward:
            clashes = {
                "microbatches > 1": self.microbatches > 1,
                "clip_norm": self.clip_norm is not None,
                "precision 'fp16'": self.precision == "fp16",
                "shard_optimizer": self.shard_optimizer,
                "shard_parameters": self.shard_parameters,
            }
            if any(clashes.values()):
                names = ", ".join(name for name, clash in clashes.items() if clash)
                raise StrategyError(
                    f"strategy.update_in_backward drops each gradient before the others are known, {names} "
                    "needs all of them; leave one out"
                )

    @property
    def ranks(self) -> int:
        """Ranks the strategy needs: data x height x width."""
        return self.data * self.height * self.width

    def to_json(self) -> str:
        """One JSON object with every field."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The strategy `to_json` wrote; raises StrategyError on broken JSON or an unknown field."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise StrategyError(f"the strategy is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise StrategyError(f"the strategy must be one JSON object, got {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            names = ", ".join(repr(name) for name in unknown)
            raise StrategyError(f"unknown strategy field {names}; the fields are {', '.join(known)}")
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train. Every callable is called on every rank.

    model:           () -> nn.Module, unmodified; its initial values follow from `seed`
    loss:            (model, batch) -> scalar mean, or (sum, count): then the update is divided by the true count of
                     the whole job's batch
    optimizer:       (parameters) -> torch Optimizer
    data:            () -> Dataset of dicts of tensors
    batch_size:      samples of one optimizer step, of the whole job
    sample:          () -> one sample as `data` gives it, of which only shapes and dtypes are used: for `simulate` and
                     `plan` where the data is not at hand
    unsupported:     "error" or "gather": what `parallelize` does with an op that has no exact rule
    find_unused_parameters: whether some parameters get no gradient in a step (DDP's option)
    seed:            initial values, order of the samples, augmentation, dropout
    steps:           optimizer steps of a whole run
    schedule:        (step) -> what the optimizer's learning rates are multiplied by at this step, counted from 1
    workers:         loader processes per rank; 0 reads in the main process
    collate:         (samples) -> batch, as a DataLoader's collate_fn; for training and evaluation
    evaluation_data: () -> Dataset of dicts of tensors, read in order, one sample at a time
    evaluate:        (model, batch) -> {name: (sum, count) or a torchmetrics Metric}, under no_grad in eval mode; the
                     run records sum / count, or what the metric computes, over the whole of `evaluation_data`. A metric
                     is either updated in every batch, and reset by the run, or a new one for each
    evaluate_every:  steps between two evaluations; one more is made after the last step
    finish:          (model, run_dir) -> None, once after the last step on rank 0 with the plain model in eval mode,
                     e.g. to draw pictures; the other ranks are gone by then

    Raises RecipeError when a field does not hold.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor | float]]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    data: Callable[[], Dataset[Any]]
    batch_size: int
    sample: Callable[[], Mapping[str, Any]] | None = None
    unsupported: Literal["error", "gather"] = "error"
    find_unused_parameters: bool = False
    seed: int = 0
    steps: int = 100
    schedule: Callable[[int], float] = lambda step: 1.0
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    evaluation_data: Callable[[], Dataset[Any]] | None = None
    evaluate: Callable[[nn.Module, Batch], Mapping[str, Any]] | None = None
    evaluate_every: int = 100
    finish: Callable[[nn.Module, Path], None] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "data", "schedule"):
            _require_callable(name, getattr(self, name))
        for name, form in (("model", "() -> nn.Module"), ("loss", "(model, batch) -> scalar")):
            _require_no_module(name, form, getattr(self, name))
        for name in ("sample", "collate", "evaluation_data", "evaluate", "finish"):
            if getattr(self, name) is not None:
                _require_callable(name, getattr(self, name))
        if self.unsupported not in ("error", "gather"):
            raise RecipeError(f"recipe.unsupported must be 'error' or 'gather', got {self.unsupported!r}")
        if (self.evaluate is None) != (self.evaluation_data is None):
            given, missing = ("evaluate", "evaluation_data") if self.evaluate else ("evaluation_data", "evaluate")
            raise RecipeError(f"recipe.{given} is given without recipe.{missing}; give both or neither")
        for name in ("batch_size", "steps", "evaluate_every"):
            _require_count(RecipeError, f"recipe.{name}", getattr(self, name))
        for name in ("seed", "workers"):
            _require_count(RecipeError, f"recipe.{name}", getattr(self, name), least=0)


def load_recipe(path: str | Path) -> Recipe:
    """Run the recipe file and return what its `recipe()` gives.

    Files beside the recipe can be imported from it. Raises RecipeError with the line at fault.
    """
    path = Path(path)
    build = getattr(_run_file(path), "recipe", None)
    if not callable(build):
        raise RecipeError(f"{path} has no function recipe(); add 'def recipe() -> fullframe.Recipe: ...'")
    try:
        recipe = build()
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from error
    except Exception as error:
        raise RecipeError(f"{_where(path, error)}: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{path}: recipe() must return a fullframe.Recipe, got {type(recipe).__name__}")
    return recipe


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        remedy = "give the .py file itself" if path.is_dir() else "check the path"
        raise RecipeError(f"there is no recipe file {path}; {remedy}")
    spec = importlib.util.spec_from_file_location(f"fullframe_recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path} is not a Python file; a recipe's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module.__name__]
        what = error.msg if isinstance(error, SyntaxError) else error
        raise RecipeError(f"{_where(path, error)}: {type(error).__name__}: {what}") from error
    return module


def _where(path: Path, error: Exception) -> str:
    """'recipe.py, line 12 (import nothing)': the innermost line of the recipe file that led to `error`."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, text = error.lineno, error.text
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if not frames:
            return str(path)
        line, text = frames[-1].lineno, frames[-1].line
    return f"{path}, line {line} ({text.strip()})" if text else f"{path}, line {line}"


def _require_count(error: type[Exception], name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name} must be a whole number >= {least}, got {value!r}")


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        raise StrategyError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise RecipeError(f"recipe.{name} must be a function, got {value!r}")


def _require_no_module(name: str, form: str, value: object) -> None:
    """A module can be called, but not as `form` says; one that is no part of torch may know what it does."""
    is_module = hasattr(value, "named_parameters") and not isinstance(value, type)
    if is_module and (name == "model" or type(value).__module__.startswith("torch.nn.")):
        raise RecipeError(
            f"recipe.{name} must be a function {form}, got the module {type(value).__name__}; use a lambda"
        )
