"""An LSTM layer keeps in a simulation what its kernel keeps."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fullframe.simulation.fake.outcomes import Outcomes
from fullframe.simulation.fake.recurrent import CUDNN_KEEPS_MORE, LSTM_LAYER

SIZES = [(32, 96, 192, 48), (28, 84, 64, 96), (14, 42, 96, 24), (1, 300, 48, 33)]


def _layer(steps: int, samples: int, inputs: int, hidden: int, trains: bool = True) -> tuple[Any, ...]:
    """What the op is given."""
    weights = [torch.zeros(4 * hidden, size) for size in (inputs, hidden)]
    biases = [torch.zeros(4 * hidden) for _ in range(2)]
    state = torch.zeros(1, samples, hidden)
    options = (False, [], 2, hidden, 1, True, False, False, trains)
    return torch.zeros(steps, samples, inputs), *weights, *biases, state, state, *options


@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_kept_is_what_the_kernel_keeps(sizes: tuple[int, int, int, int]) -> None:
    real = LSTM_LAYER(*_layer(*sizes))
    steps, samples, _, hidden = sizes
    for on_gpu in (False, True):
        outcomes = Outcomes(fake := FakeTensorMode(), on_gpu)
        with fake:
            training, evaluating = _layer(*sizes), _layer(*sizes, trains=False)
        found = outcomes(LSTM_LAYER, training, {})
        assert [t.shape for t in found[:3]] == [t.shape for t in real[:3]]
        expected = 5 * 4 * steps * samples * hidden if on_gpu else real[3].nbytes
        assert found[3].nbytes == pytest.approx(expected, rel=0.04) and expected > 10_000
        assert outcomes(LSTM_LAYER, evaluating, {})[3].nbytes == 0
        assert outcomes.notes == ({CUDNN_KEEPS_MORE} if on_gpu else set())
