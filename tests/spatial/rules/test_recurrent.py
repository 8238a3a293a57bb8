"""Recurrent cells on split tokens, layers over whole time, and cells that are written with convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, small
from tests.spatial.rules.test_transformers import of_module

DOUBLE = {"dtype": torch.float64}


def pixels(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N * H * W, C)."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def steps(run: Op, x: Tensor) -> list[Tensor]:
    """Three steps without a state at first."""
    state = None
    for scale in (1.0, 0.5, -2.0):
        state = run(pixels(x) * scale, state)
    return list(state) if isinstance(state, tuple) else [state]


def whole_state(run: Op, x: Tensor) -> Tensor:
    """A whole state for all pixels; another for tokens of one row, of which ranks may have none."""
    t = pixels(x)
    state = torch.linspace(-1, 1, t.shape[0] * 3, **DOUBLE).view(-1, 3)  # type: ignore[call-overload]
    return run(t, state), run(t[:3], state[:3]), run(t[0], state[0])


def over_time(run: Op, x: Tensor, y: Tensor) -> list[Tensor]:
    outputs, last = run(torch.stack([pixels(x), pixels(y)]))
    return [outputs, *(last if isinstance(last, tuple) else [last])]


def batch_first(run: Op, x: Tensor, y: Tensor) -> list[Tensor]:
    outputs, last = run(torch.stack([pixels(x), pixels(y)], 1))
    return [outputs, *(last if isinstance(last, tuple) else [last])]


def conv_lstm(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    hidden = cell = x[:, :2] * 0
    for scale in (1.0, 0.5, -2.0):
        i, f, o, g = F.conv2d(torch.cat([x * scale, hidden], 1), weight, bias, padding=1).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    return [hidden, cell]


def conv_gru(x: Tensor, gates: Tensor, candidate: Tensor) -> Tensor:
    hidden = x.new_zeros(x.shape[0], 2, *x.shape[2:])
    for scale in (1.0, 0.5, -2.0):
        z, r = torch.sigmoid(F.conv2d(torch.cat([hidden, x * scale], 1), gates, padding=1)).chunk(2, 1)
        new = torch.tanh(F.conv2d(torch.cat([r * hidden, x * scale], 1), candidate, padding=1))
        hidden = (1 - z) * hidden + z * new
    return hidden


def of_split_channels(run: Op, x: Tensor) -> list[Tensor]:
    """Nothing but channels and time is split."""
    return [*run(x[0, :, :3, :4])[1], *run(x[:, 0, :3, :4])[1]]


def read_as_text(x: Tensor) -> list[Tensor]:
    """A line of text: the image's columns are the steps."""
    scores = x.mean(2).permute(2, 0, 1).log_softmax(-1)  # (W, N, C)
    steps, samples = scores.shape[:2]
    labels, lengths = torch.tensor([[1, 3, 1], [2, 0, 0]]), torch.tensor([3, 1])
    return [
        F.ctc_loss(scores, labels, torch.tensor([steps, steps - 2]), lengths),
        F.ctc_loss(scores, labels, (steps,) * samples, (3, 1), blank=2, reduction="none", zero_infinity=True),
        nn.CTCLoss(reduction="sum")(scores[:, 0], labels[0], torch.tensor(steps), torch.tensor(3)),
    ]


CASES: dict[str, Case] = {
    "GRUCell": of_module(lambda: nn.GRUCell(4, 3, **DOUBLE), steps),
    "LSTMCell": of_module(lambda: nn.LSTMCell(4, 3, **DOUBLE), steps),
    "RNNCell": of_module(lambda: nn.RNNCell(4, 3, **DOUBLE), steps),
    "RNNCell with relu": of_module(lambda: nn.RNNCell(4, 3, bias=False, nonlinearity="relu", **DOUBLE), steps),
    "a whole state": of_module(lambda: nn.GRUCell(4, 3, **DOUBLE), whole_state),
    "LSTM": of_module(lambda: nn.LSTM(4, 3, 2, bidirectional=True, **DOUBLE), over_time, 2),
    "LSTM with a projection": of_module(lambda: nn.LSTM(4, 3, proj_size=2, **DOUBLE), over_time, 2),
    "split channels": of_module(lambda: nn.LSTM(4, 3, **DOUBLE), of_split_channels),
    "GRU": of_module(lambda: nn.GRU(4, 3, batch_first=True, **DOUBLE), batch_first, 2),
    "RNN": of_module(lambda: nn.RNN(4, 3, **DOUBLE), over_time, 2),
    "CTC loss": small(read_as_text),
    "ConvLSTM": Case(conv_lstm, whole=((8, 6, 3, 3), (8,)), sizes=((7, 11),)),
    "ConvGRU": Case(conv_gru, whole=((4, 6, 3, 3), (2, 6, 3, 3)), sizes=((7, 11),)),
}

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _refused() -> list[str]:
    messages = []
    t = pixels(ff.shard(torch.ones(2, 4, 6, 6), mesh(1, 2)))
    for call in (
        lambda: nn.GRU(4, 3, 2, dropout=0.5)(t[None]),
        lambda: nn.GRUCell(5, 3)(t),
    ):
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_is_refused() -> None:
    for dropout, wrong in rank_group(2).run(_refused):
        assert "dropout 0.5 between recurrent layers" in dropout
        assert wrong.startswith("RuntimeError")
