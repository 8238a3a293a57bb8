"""The recipe's evaluation on fake tensors, after the steps and beside all that they leave: what it holds on a rank.

One sample is enough but where metrics keep something of each: then what all samples leave is there when the last comes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import Dataset

from fullframe.errors import FullframeError
from fullframe.model.parallelize import ParallelModel
from fullframe.ranks.randomness import sample_randomness
from fullframe.recipe import Recipe
from fullframe.simulation.fake.blame import blamed
from fullframe.simulation.memory.trace import Tracer
from fullframe.strategy import Strategy
from fullframe.techniques.ema import ParameterAverage
from fullframe.training.evaluation import evaluation_data, measuring
from fullframe.training.loading.listing import first_sample, length_of
from fullframe.training.metrics import is_metric

_REPEATED = 2  # evaluations that tell what each leaves


@dataclass(frozen=True)
class EvaluationSample(Dataset[Any]):
    """The first sample of the evaluation data, and how many there are; a data set in which all are like it."""

    first: Any
    samples: int | None  # None: of a stream

    def __len__(self) -> int:
        return self.samples  # type: ignore[return-value]  # no number: a TypeError, as of a stream

    def __getitem__(self, number: int) -> Any:
        return self.first


def read_evaluation(recipe: Recipe) -> EvaluationSample | FullframeError | None:
    """With its numbers, as the evaluation reads it first; the error where it gives none; None without evaluation."""
    if recipe.evaluate is None:
        return None
    try:
        with sample_randomness(recipe.seed, 0, 0), blamed("recipe.evaluation_data() gives no sample"):
            data: Any = evaluation_data(recipe)
            return EvaluationSample(first_sample(data), length_of(data))
    except FullframeError as error:
        return error


def evaluate_fakes(
    recipe: Recipe,
    strategy: Strategy,
    model: ParallelModel,
    average: ParameterAverage | None,
    tracer: Tracer,
    batch: Callable[[], Any],
    samples: int | None,
    note: Callable[[str], object],
) -> None:
    """Evaluate as many of the job's `samples` as it takes, each a `batch()`; `note` gets what is not known."""
    assert recipe.evaluate is not None
    metrics, held, taken = [], list[int](), None
    turns = _REPEATED + 1 if samples is None else -(-samples // strategy.data)
    with measuring(model, "cpu", strategy.precision, average):
        while turns > len(held) <= _REPEATED:
            if len(held) == _REPEATED:
                of_each = held[1] - held[0]
                if of_each <= 0:
                    break
                if samples is None:
                    note("the evaluation's metrics keep something of each sample, and how many a stream has is unknown")
                tracer.hold("kept by metrics", of_each * (turns - _REPEATED - 1))
            taken = batch()  # while the one before still lives, as in a loop over batches
            metrics += [value for value in recipe.evaluate(model, taken).values() if is_metric(value)]
            held.append(tracer.held_bytes)
    with _disable_current_modes():  # its states are real again
        for metric in metrics:
            metric.reset()
