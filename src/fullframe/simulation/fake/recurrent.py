"""What the kernel of an LSTM layer keeps for its backward pass, of which torch's fake kernel knows nothing.

oneDNN says how much when it runs, and that rises evenly with the steps and the samples: it is asked at small numbers of
them. Of cuDNN it is the least that backward needs: the four gates and the cell, at each step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

LSTM_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
CUDNN_KEEPS_MORE = "an LSTM on a GPU keeps at least its gates and its cell; cuDNN may keep more than that"

_STEPS, _SAMPLES = (8, 16), (32, 64)  # asked at
_GATES_AND_CELL = 5


def with_workspace(results: Sequence[Tensor], args: Sequence[Any], on_gpu: bool) -> tuple[Tensor, ...]:
    """What `LSTM_LAYER` gives of these fake arguments, with a workspace; called with the fake mode on."""
    x, hidden, has_biases, batch_first, trains = args[0], args[10], args[12], args[14], args[15]
    samples, steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    kept, trains = 0, trains and torch.is_grad_enabled()
    if trains and on_gpu:
        kept = _GATES_AND_CELL * steps * samples * hidden * x.element_size()
    elif trains:
        kept = _interpolated(steps, samples, x.shape[-1], hidden, has_biases, x.dtype)
    return (*results[:3], torch.empty(kept, dtype=torch.uint8))


def _interpolated(steps: int, samples: int, *layer: Any) -> int:
    by_samples = [_line(steps, _STEPS, [_asked(known, count, *layer) for known in _STEPS]) for count in _SAMPLES]
    return max(0, round(_line(samples, _SAMPLES, by_samples)))


def _line(at: int, known: tuple[int, int], values: list[float]) -> float:
    return values[0] + (values[1] - values[0]) * (at - known[0]) / (known[1] - known[0])


@lru_cache(maxsize=1024)
def _asked(steps: int, samples: int, inputs: int, hidden: int, has_biases: bool, dtype: torch.dtype) -> float:
    """Bytes of oneDNN's workspace."""
    with _disable_current_modes(), torch.enable_grad():  # without gradients it has none
        weights = [torch.zeros(4 * hidden, size, dtype=dtype) for size in (inputs, hidden)]
        biases = [torch.zeros(4 * hidden, dtype=dtype)] * 2
        x, state = (torch.zeros(*size, dtype=dtype) for size in ((steps, samples, inputs), (1, samples, hidden)))
        workspace = LSTM_LAYER(
            x, *weights, *biases, state, state, False, [], 2, hidden, 1, has_biases, False, False, True
        )[3]
    return float(workspace.nbytes)
