"""Metrics of ranks, each with some of the updates, give what one with all of them would."""

import pytest
import torch
import torchmetrics
from torchmetrics.utilities import dim_zero_cat

from fullframe.errors import RecipeError
from fullframe.training.metrics import computed


@pytest.mark.parametrize("updated", [0, 1, 2])
def test_a_metric_that_one_replica_alone_has_updated(updated):
    metrics = [torchmetrics.CatMetric() for _ in range(3)]
    metrics[updated].update(torch.tensor([0.25, 0.5]))
    assert computed("all", [[metric] for metric in metrics]) == {"all.0": 0.25, "all.1": 0.5}


class Growing(torchmetrics.Metric):
    """Each update makes a tensor longer, and a list, and takes its part in a mean; the value depends on the order."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.empty(0), dist_reduce_fx="cat")
        self.add_state("each", [], dist_reduce_fx="cat")
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values):
        self.seen = torch.cat([self.seen, values])
        self.each += values.unbind()
        self.mean += (values.mean() - self.mean) / self._update_count  # counted already

    def compute(self):
        return [*self.seen, *dim_zero_cat(self.each), self.mean]


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_what_grows_or_is_a_mean_is_what_one_process_would_have(updates):
    alone, metrics = Growing(), [Growing(), Growing()]
    for number, values in enumerate(torch.arange(2.0 * updates).view(updates, 2)):
        alone.update(values)
        metrics[number % 2].update(values)
    assert computed("all", [[metric] for metric in metrics]) == pytest.approx(computed("all", [[alone]]))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_normalized_errors_of_more_than_two_are_refused(replicas):
    """Of these torchmetrics takes the first and the last alone, and says nothing."""
    alone, *metrics = [torchmetrics.NormalizedRootMeanSquaredError(num_outputs=3) for _ in range(1 + replicas)]
    for number, values in enumerate(torch.rand(3, 2, 4, 3, generator=torch.Generator().manual_seed(0))):
        alone.update(*values)
        metrics[number % replicas].update(*values)
    if replicas < 3:
        found = computed("error", [[metric] for metric in metrics])
        assert found == pytest.approx(computed("error", [[alone]]), rel=1e-5)
        return
    with pytest.raises(RecipeError, match="puts at most two of them together; give"):
        computed("error", [[metric] for metric in metrics])


def test_of_updates_that_added_unequally_many_those_of_a_rank_stay_together():
    metrics = [Growing(), Growing()]
    for number, (metric, sizes) in enumerate(zip(metrics, ((1, 2), (2, 2)), strict=True)):
        for size in sizes:
            metric.update(torch.full((size,), float(number)))
    assert [*computed("all", [[metric] for metric in metrics]).values()] == [0, 0, 0, 1, 1, 1, 1] * 2 + [0.5]
