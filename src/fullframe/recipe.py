"""What to train: a recipe is a Python file with a function `recipe() -> Recipe`. No torch is loaded here."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from fullframe.arguments import checked
from fullframe.errors import RecipeError, require_count
from fullframe.wording import described

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset


class Parameters:
    """The parameters of a recipe's model, each once, as `torch.optim` takes them; `named()` has their names too."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self._named = tuple(named)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._named)

    def __len__(self) -> int:
        return len(self._named)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the model, parameter), for groups of parameters that are told by their names."""
        return iter(self._named)


_FORMS = {  # of the recipe's functions: what they are called with, and what they give
    "model": ("", "nn.Module"),
    "loss": ("model, batch", "scalar"),
    "optimizer": ("parameters", "Optimizer"),
    "data": ("", "Dataset"),
    "schedule": ("step", "number"),
    "sampler": ("data", "Sampler"),
    "sample": ("", "sample"),
    "collate": ("samples", "batch"),
    "cut": ("batch, count", "batches"),
    "evaluation_data": ("", "Dataset"),
    "evaluate": ("model, batch", "{name: (sum, count)}"),
    "finish": ("model, run_dir", "None"),
}
_ALWAYS = ("model", "loss", "optimizer", "data", "schedule")


@checked
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train. Every callable is called on every rank.

    model:           () -> nn.Module, unmodified; its initial values follow from `seed`. One that comes in eval mode, as
                     `from_pretrained` gives it, is put into training mode; its modules alone may be in eval mode, by
                     themselves or by a `train(mode)` of theirs, which is called
    loss:            (model, batch) -> scalar mean, or (sum, count): then the update is divided by the true count of
                     the whole job's batch
    optimizer:       (parameters) -> torch Optimizer; `parameters.named()` gives names too, for groups by name
    data:            () -> Dataset of dicts, lists or tuples of tensors, nested or not, beside numbers and words; of an
                     IterableDataset every rank reads all
    batch_size:      samples of one optimizer step, of the whole job
    sampler:         (data) -> torch Sampler, or a list, of numbers of samples: which an epoch has and in which order,
                     the same on every rank, in place of all, shuffled by `seed`
    sample:          () -> one sample as `data` gives it, of which only shapes and dtypes are used: for `simulate` and
                     `plan` where the data is not at hand
    unsupported:     "error" or "gather": what `parallelize` does with an op that has no exact rule
    find_unused_parameters: that some parameters get no gradient in a step is meant, so nothing is said of it
    seed:            initial values, order of the samples, augmentation, dropout
    steps:           optimizer steps of a whole run
    schedule:        (step) -> what the optimizer's learning rates are multiplied by at this step, counted from 1
    workers:         loader processes per rank; 0 reads in the main process
    collate:         (samples) -> batch, as a DataLoader's collate_fn; for training and evaluation
    cut:             (batch, count) -> `count` batches of equally many samples in order, for microbatches of a batch
                     whose tensors do not all have the samples in their first dim: boxes of all images in one, say
    evaluation_data: () -> Dataset of such samples, read in order, one sample at a time
    evaluate:        (model, batch) -> {name: (sum, count) or a torchmetrics Metric}, under no_grad in eval mode; the
                     run records sum / count, or what the metric computes, over the whole of `evaluation_data`. A metric
                     is either updated in every batch, and reset by the run, or a new one for each; over replicas all
                     that it keeps must be its states (`Running` keeps more)
    evaluate_every:  steps between two evaluations; one more is made after the last step
    best:            the name of a measure by which the best checkpoint is kept, with a "-" in front where smaller is
                     better: "miou", "-end_point_error". One is written after each evaluation that beats all before,
                     and stays when older ones are removed; `fullframe export --best` takes its weights, and with
                     `--patience` a run ends that finds no better one
    finish:          (model, run_dir) -> None, once after the last step on rank 0 with the plain model in eval mode,
                     e.g. to draw pictures; the other ranks are gone by then

    Raises RecipeError when a field does not hold.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]
    optimizer: Callable[[Parameters], Optimizer]
    data: Callable[[], Dataset[Any]]
    batch_size: int
    sampler: Callable[[Dataset[Any]], Iterable[int]] | None = None
    sample: Callable[[], Any] | None = None
    unsupported: Literal["error", "gather"] = "error"
    find_unused_parameters: bool = False
    seed: int = 0
    steps: int = 100
    schedule: Callable[[int], float] = lambda step: 1.0
    workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    cut: Callable[[Any, int], Iterable[Any]] | None = None
    evaluation_data: Callable[[], Dataset[Any]] | None = None
    evaluate: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    evaluate_every: int = 100
    best: str | None = None
    finish: Callable[[nn.Module, Path], None] | None = None

    def __post_init__(self) -> None:
        for name, (takes, gives) in _FORMS.items():
            value = getattr(self, name)
            if value is not None or name in _ALWAYS:
                _require_form(name, takes, gives, value)
        if self.unsupported not in ("error", "gather"):
            raise RecipeError(f"recipe.unsupported must be 'error' or 'gather', got {self.unsupported!r}")
        if (self.evaluate is None) != (self.evaluation_data is None):
            given, missing = ("evaluate", "evaluation_data") if self.evaluate else ("evaluation_data", "evaluate")
            raise RecipeError(f"recipe.{given} is given without recipe.{missing}; give both or neither")
        if self.best is not None and self.evaluate is None:
            raise RecipeError(f"recipe.best is {self.best!r}, and the recipe evaluates nothing; give recipe.evaluate")
        for name in ("batch_size", "steps", "evaluate_every"):
            require_count(RecipeError, f"recipe.{name}", getattr(self, name))
        for name in ("seed", "workers"):
            require_count(RecipeError, f"recipe.{name}", getattr(self, name), least=0)

    def training_model(self) -> nn.Module:
        """What `model` gives, in training mode, where the whole of it came in eval mode; that is said.

        Raises RecipeError where it gives no module.
        """
        model = self.model()
        if not hasattr(model, "named_parameters") or isinstance(model, type):
            raise RecipeError(f"recipe.model() must return an nn.Module, got {described(model)}")
        if not getattr(model, "training", True):
            warnings.warn(
                "recipe.model() gives a model in eval mode, as from_pretrained does; it is trained in training mode. "
                "For fixed statistics of batch norm or no dropout, put those modules into eval mode, not the model",
                stacklevel=2,
            )
            model.train()
        _ask_what_stays_in_eval_mode(model)
        return model


def _ask_what_stays_in_eval_mode(model: nn.Module) -> None:
    """Let modules that override `train(mode)`, as to keep a frozen part in eval mode, do as in a loop that calls it.

    What is in eval mode already stays so.
    """
    from torch import nn

    in_eval = [module for module in model.modules() if not module.training]
    for module in list(model.modules()):
        override = type(module).train
        if module.training and override is not nn.Module.train and "mode" in inspect.signature(override).parameters:
            module.train()
    for module in in_eval:
        module.training = False


def load_recipe(path: str | Path, values: Mapping[str, Any] | None = None) -> Recipe:
    """Run the recipe file and return what its `recipe(**values)` gives.

    Files beside the recipe can be imported from it. Raises RecipeError with the line at fault.
    """
    path, start = Path(path), _directory()
    build = getattr(_run_file(path), "recipe", None)
    if not callable(build):
        raise RecipeError(f"{path} has no function recipe(); add 'def recipe() -> fullframe.Recipe: ...'")
    _require_taken(path, inspect.signature(build), values or {})
    try:
        recipe = build(**(values or {}))
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from error
    except Exception as error:
        raise RecipeError(f"{_where(path, error)}: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{path}: recipe() must return a fullframe.Recipe, got {type(recipe).__name__}")
    if _directory() != start:
        os.chdir(start)
        raise RecipeError(
            f"{path} changes the working directory, from which the command line's paths count on each rank; take "
            "os.chdir out, and open files beside the recipe by Path(__file__).parent"
        )
    return recipe


def _directory() -> str:
    """The working directory; "" where it is no longer there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def values_of(assignments: Iterable[str]) -> dict[str, Any]:
    """What `name=value` words say: numbers, True, None, tuples and quoted text as in Python, anything else as text.

    Raises RecipeError for a word that is no assignment, and for a name that is given twice.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise RecipeError(f"{assignment!r} is no value for the recipe; write name=value, as in lr=1e-3")
        if name in values:
            raise RecipeError(f"{name} is given twice for the recipe")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            values[name] = text
    return values


def require_file(path: Path) -> None:
    """Raises RecipeError where there is no such file."""
    if not path.is_file():
        remedy = "give the .py file itself" if path.is_dir() else "check the path"
        raise RecipeError(f"there is no recipe file {path}; {remedy}")


def function_in(path: Path) -> ast.FunctionDef | None:
    """The function recipe() at the top level of a file, which is read and not run; raises RecipeError for no Python."""
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not a Python file: {error}") from error
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "recipe"), None)


def require_names(path: Path, values: Iterable[str]) -> None:
    """Raises RecipeError for a name that recipe() does not take, as far as its file says so without being run."""
    function = function_in(path)
    if function is None or function.decorator_list or function.args.kwarg:
        return
    kind, names = inspect.Parameter.KEYWORD_ONLY, (*function.args.args, *function.args.kwonlyargs)
    _require_taken(
        path,
        inspect.Signature([inspect.Parameter(name.arg, kind, default=None) for name in names]),
        dict.fromkeys(values),
    )


def _require_taken(path: Path, signature: inspect.Signature, values: Mapping[str, Any]) -> None:
    try:
        signature.bind(**values)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "nothing"
        raise RecipeError(f"{path}: recipe() takes {names}: {error}; values are given as --set name=value") from None


def _run_file(path: Path) -> ModuleType:
    require_file(path)
    spec = importlib.util.spec_from_file_location(f"fullframe_recipe_{path.stem}", path)
    if spec is None or not isinstance(loader := spec.loader, SourceFileLoader):
        raise RecipeError(f"{path} is not a Python file; a recipe's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        # Not from Python's cache, which takes two files of one size and one second for the same.
        exec(loader.source_to_code(loader.get_data(loader.path), loader.path), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        if "attempted relative import with no known parent" in what:
            what += "; a recipe is read as a file of its own: put it beside the package, and import by the whole name"
        raise RecipeError(f"{_where(path, error)}: {type(error).__name__}: {what}") from error
    return module


def _where(path: Path, error: Exception) -> str:
    """'recipe.py, line 12 (import nothing)': the innermost line of the recipe file that led to `error`."""
    names = (str(path), str(path.absolute()))  # as Python calls it
    if isinstance(error, SyntaxError) and error.filename in names:
        line, text = error.lineno, error.text
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in names]
        if not frames:
            return str(path)
        line, text = frames[-1].lineno, frames[-1].line
    return f"{path}, line {line} ({text.strip()})" if text else f"{path}, line {line}"


def _require_form(name: str, takes: str, gives: str, value: object) -> None:
    """Raises RecipeError unless `value` can be called with as many arguments as `takes` has."""
    form = f"({takes}) -> {gives}"
    if not callable(value):
        raise RecipeError(f"recipe.{name} must be a function, got {described(value)}; its form is {form}")
    # A module can be called, but not so; one that is no part of torch may know what it does.
    is_module = hasattr(value, "named_parameters") and not isinstance(value, type)
    if is_module and (name == "model" or (name == "loss" and type(value).__module__.startswith("torch.nn."))):
        raise RecipeError(
            f"recipe.{name} must be a function {form}, got the module {type(value).__name__}; use a lambda"
        )
    try:
        inspect.signature(value).bind(*filter(None, takes.split(", ")))
    except TypeError as error:
        what = getattr(value, "__name__", type(value).__name__)
        raise RecipeError(f"recipe.{name} is called as {what}({takes}), and it does not take that: {error}") from None
    except ValueError:  # it does not say what it takes
        pass
