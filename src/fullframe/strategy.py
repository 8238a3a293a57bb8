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
from typing import TYPE_CHECKING, Any, Literal

from fullframe.errors import RecipeError, StrategyError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

Batch = Mapping[str, Any]  # what a dataset of dicts gives after collation


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How one batch is spread: `data` replicas of `height` x `width` ranks, each in `microbatches` slices.

    The update is that of the whole batch for any of these, but for batch norm, whose statistics in training are of
    one replica's slice, as in plain DDP.

    Raises StrategyError when a field is not a whole number >= 1.
    """

    data: int = 1
    height: int = 1
    width: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _require_count(StrategyError, f"strategy.{field.name}", getattr(self, field.name))

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
    unsupported:     "error" or "gather": what `parallelize` does with an op that has no exact rule
    find_unused_parameters: whether some parameters get no gradient in a step (DDP's option)
    seed:            initial values, order of the samples, augmentation, dropout
    steps:           optimizer steps of a whole run
    schedule:        (step) -> what the optimizer's learning rates are multiplied by at this step, counted from 1
    workers:         loader processes per rank; 0 reads in the main process
    evaluation_data: () -> Dataset of dicts of tensors, read in order, one sample at a time
    evaluate:        (model, batch) -> {name: (sum, count)}, under no_grad in eval mode; the run records sum / count
                     over the whole of `evaluation_data`
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
    unsupported: Literal["error", "gather"] = "error"
    find_unused_parameters: bool = False
    seed: int = 0
    steps: int = 100
    schedule: Callable[[int], float] = lambda step: 1.0
    workers: int = 0
    evaluation_data: Callable[[], Dataset[Any]] | None = None
    evaluate: Callable[[nn.Module, Batch], Mapping[str, tuple[Tensor, Tensor | float]]] | None = None
    evaluate_every: int = 100
    finish: Callable[[nn.Module, Path], None] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "data", "schedule"):
            _require_callable(name, getattr(self, name))
        for name in ("evaluation_data", "evaluate", "finish"):
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


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise RecipeError(f"recipe.{name} must be a function, got {value!r}")
