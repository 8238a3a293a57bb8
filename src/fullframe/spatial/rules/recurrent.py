"""Recurrent cells and layers, and the loss of sequences: tokens or pixels are the batch, each rank runs its own.

Time and channels are whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.matmul import Shared, result_spec, shared, whole_in
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, whole, wrap


@rule(torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def _cell(func: Any, input: Tensor, hx: Any, *weights: Any, **named: Any) -> Any:
    """Input (B, C) and states (B, K), the batch split anyhow; split channels are gathered."""
    pair = func is torch.lstm_cell
    given = [whole_in(t, -1) for t in (input, *(hx if pair else [hx]))]
    if not any(isinstance(t, SpatialTensor) for t in given):  # they were made whole
        return func(given[0], given[1:] if pair else given[1], *weights, **named)
    parts = shared(given, ["bi", "bk", "bk"][: len(given)])
    here, *states = parts.locals
    result = func(here, states if pair else states[0], *weights, **named)
    sizes = {"b": input.shape[0], "k": given[1].shape[-1]}
    spec = result_spec(parts.spec, "bk", sizes, parts.cuts)
    return tuple(wrap(t, spec) for t in result) if pair else wrap(result, spec)


@rule(torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
def _layers(func: Any, input: Tensor, hx: Any, *options: Any) -> Any:
    """Input (T, B, C), or (B, T, C) where the batch is first; refuses packed sequences and dropout between layers.

    Split time and channels are gathered.
    """
    if isinstance(hx, Tensor) == (func is torch.lstm) or isinstance(options[0], Tensor):
        raise Unsupported("packed sequences are not split")
    _, _, layers, dropout, train, _, batch_first = options
    if dropout and train and layers > 1:
        raise Unsupported(f"dropout {dropout} between recurrent layers is not split", "Set it to 0.")
    time = -2 if batch_first else -3
    states = hx if func is torch.lstm else [hx]
    given = [whole_in(input, -1, time), *(whole_in(t, -1, -3) for t in states)]
    if not any(isinstance(t, SpatialTensor) for t in given):
        return func(given[0], given[1:] if func is torch.lstm else given[1], *options)
    parts = shared(given, ["bti" if batch_first else "tbi", "lbk", "lbh"][: len(given)])
    here, *begun = parts.locals
    result = func(here, begun if func is torch.lstm else begun[0], *options)
    return _wrapped(result, parts, "btk" if batch_first else "tbk", input)


def _wrapped(results: Sequence[Tensor], parts: Shared, term: str, input: Tensor) -> Any:
    """Outputs and last states as they lie over the ranks."""
    wrapped = []
    for number, t in enumerate(results):
        letters = "lbk" if number else term
        sizes = dict(zip(letters, t.shape, strict=True)) | {"b": input.shape[term.index("b")]}
        wrapped.append(wrap(t, result_spec(parts.spec, letters, sizes, parts.cuts)))
    return tuple(wrapped)


@rule(F.ctc_loss, torch.ctc_loss)
def _ctc(func: Any, log_probs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Scores (T, N, C), which are made whole: each step hangs on those before it, and there are few beside an image."""
    return func(whole(log_probs), whole(targets), *args, **kwargs)  # type: ignore[no-any-return]
