"""Whether the ranks still hold the same weights: of one trained parameter, each in turn, a few values at each pass.

A step of the optimizer that one rank alone leaves out, clips or takes at another rate, or a state that it alone loads,
leaves each rank with weights of its own; what they average and exchange from then on is a mix that no rank can tell
from its own numbers. Weights on a GPU are not looked at, as the host would wait for them.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from fullframe.errors import DivergenceError
from fullframe.ranks.agreement import from_all_ranks, on_any_rank_each
from fullframe.ranks.raw_bytes import in_bytes, plain

_ELEMENTS = 4096  # of a parameter that are looked at


class Weights(NamedTuple):
    """What one rank holds."""

    parameters: int  # that are trained
    turn: int  # which of them was looked at
    digest: int  # of 31 bits; of their count alone where none was


class WeightsInTurn:
    """Looks at one parameter more at each call; all ranks call it equally often."""

    def __init__(self) -> None:
        self._calls = 0

    def look(self, trained: Collection[nn.Parameter]) -> Weights:
        """What this rank holds of the next of the parameters that it trains."""
        count = len(trained)
        turn, row = self._calls % max(count, 1), self._calls // max(count, 1)
        self._calls += 1
        looked_at = next(islice(trained, turn, None), None)
        return Weights(count, turn, zlib.crc32(b"%d" % count, _digest(looked_at, row)) >> 1)

    def on_any_rank_each(
        self, flags: Sequence[bool], model: nn.Module, trained: Collection[nn.Parameter]
    ) -> list[bool]:
        """As `agreement.on_any_rank_each`, in whose message the ranks of the job compare their weights too.

        Raises DivergenceError on all of them where they differ.
        """
        own = self.look(trained)
        found, alike = on_any_rank_each(flags, own.digest)
        if not alike:
            require_same_weights(dict(enumerate(from_all_ranks(own))), model.named_parameters())
        return found


def require_same_weights(held: Mapping[int, Weights], named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises DivergenceError where the ranks, by their numbers, do not hold the same."""
    (first_rank, first), *others = held.items()
    for rank, other in others:
        if other == first:
            continue
        trained = [name for name, parameter in named if parameter.requires_grad]
        what = "other weights" if first.parameters == other.parameters else "other parameters that are trained"
        which = f": {first.parameters} on rank {first_rank}, {other.parameters} on rank {rank}"
        if first.parameters == other.parameters:
            which = f", as those of {trained[first.turn]} show" if first.turn < len(trained) else ""
        raise DivergenceError(
            f"rank {rank} holds {what} than rank {first_rank}{which}, so what they average and exchange is a mix. "
            "Every rank must take the same optimizer steps, with the same options, by what all ranks know: agree "
            "on a step to be left out (dist.all_reduce of the flag), and freeze parameters, clip gradients and load "
            "states on all ranks alike"
        )


@torch.no_grad()
def _digest(parameter: nn.Parameter | None, row: int) -> int:
    if type(parameter) is not nn.Parameter or not parameter.is_cpu or parameter.layout != torch.strided:
        return 0
    values = parameter.detach()
    while values.dim() > 1 and values.numel() > _ELEMENTS:
        values = values[row % len(values)]
    return zlib.crc32(in_bytes(plain(values.reshape(-1)[:_ELEMENTS])).numpy().data)
