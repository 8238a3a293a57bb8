"""Whether the ranks still hold the same weights: of one trained parameter, each in turn, a few values at each pass.

And the same model beside them: who trains, what is frozen, what one module, each in turn, is set to, and what its
optimizers are.

A step of the optimizer that one rank alone leaves out, clips or takes at another rate, or a state that it alone loads,
leaves each rank with weights of its own; what they average and exchange from then on is a mix that no rank can tell
from its own numbers. The host does not wait for weights on a GPU: it reads at each pass what it asked for at the one
before. GPUs of several kinds round otherwise, so that their weights need not be equal to the bit: there none is asked.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.errors import DivergenceError
from fullframe.model.same.model import state_in_words, state_of
from fullframe.model.same.optimizers import Said, Stepped, require_same_options
from fullframe.model.sharding.steps_taken import require_same_steps, steps_taken
from fullframe.ranks.agreement import first_difference, from_all_ranks, on_any_rank_each
from fullframe.ranks.device import name
from fullframe.ranks.mesh import Spatial, kept_with_mesh
from fullframe.ranks.raw_bytes import checksum, in_bytes, plain, some_elements

_ELEMENTS = 4096  # of a parameter that are looked at


class Weights(NamedTuple):
    """What one rank holds."""

    parameters: int  # that are trained
    turn: int  # which of them was looked at
    digest: int  # of 31 bits; of their count alone where none was
    state: int = 0  # of the model, as `state_of` says


class _Asked(NamedTuple):
    """Of a parameter on a GPU."""

    turn: int
    sum: Tensor  # of the host, which has it once it `is_there`
    is_there: torch.Event


class WeightsInTurn:
    """Looks at one parameter more at each call; all ranks call it equally often.

    At those on a GPU where it is made for a job whose GPUs, of all ranks of `spatial`'s mesh, are of one kind; all of
    them make it.
    """

    def __init__(self, spatial: Spatial | None = None) -> None:
        kind = "cpu" if spatial is None else spatial.mesh.device_type
        self._gpus = kind if spatial is not None and kind != "cpu" and _are_of_one_kind(spatial) else None
        self._asked: _Asked | None = None
        self._calls = 0
        self._said = Said([], [])

    def look(
        self, trained: Collection[nn.Parameter], model: nn.Module | None = None, stepped: Stepped | None = None
    ) -> Weights:
        """What this rank holds of the next of the parameters that it trains, and the state that its `model` is in.

        And what the optimizers are set to that have `stepped` with it.
        """
        count = len(trained)
        turn, row = self._calls % max(count, 1), self._calls // max(count, 1)
        self._said = Said([], []) if stepped is None else stepped.said(trained)
        state = 0 if model is None else zlib.crc32(repr(self._said).encode(), state_of(model, self._calls)) >> 1
        self._calls += 1
        if not count:
            digest = steps_taken()  # sharded, or none of ours
        else:
            turn, digest = self._digest(turn, _values(next(islice(trained, turn, None)), row))
        return Weights(count, turn, zlib.crc32(b"%d" % count, digest) >> 1, state)

    def _digest(self, turn: int, values: Tensor | None) -> tuple[int, int]:
        """Of values at this turn; of those on a GPU, of what was asked at the call before, and its turn."""
        if values is not None and values.is_cpu:
            return turn, zlib.crc32(in_bytes(plain(values)).numpy().data)
        before, self._asked = self._asked, None
        if values is not None and values.device.type == self._gpus:
            found = checksum(plain(values)).to("cpu", non_blocking=True)
            self._asked = _Asked(turn, found, torch.Event(values.device))
            self._asked.is_there.record()
        if before is None:
            return turn, 0
        before.is_there.synchronize()
        return before.turn, zlib.crc32(b"%d" % before.sum.item())

    def on_any_rank_each(
        self, flags: Sequence[bool], model: nn.Module, trained: Collection[nn.Parameter], stepped: Stepped
    ) -> list[bool]:
        """As `agreement.on_any_rank_each`, in whose message the ranks of the job compare their weights too.

        Raises DivergenceError on all of them where they differ.
        """
        own = self.look(trained, model, stepped)
        found, alike = on_any_rank_each(flags, own.digest ^ own.state)
        if not alike:
            self.require_same(dict(enumerate(from_all_ranks(own))), model)
        return found

    def require_same(
        self, held: Mapping[int, Weights], model: nn.Module | None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Raises DivergenceError on all ranks of the group, which call it, where they do not hold the same."""
        if model is not None and len({own.state for own in held.values()}) > 1:
            require_same_options(from_all_ranks(self._said, group), list(held))
            said = from_all_ranks(state_in_words(model, self._calls - 1), group)
            first, number, other = first_difference(said)
            first_rank, rank = (list(held)[n] for n in (0, number))
            raise DivergenceError(
                f"rank {rank} has its model in another state than rank {first_rank}: {first} on rank {first_rank}, "
                f"{other} on rank {rank}, so what they average and exchange is a mix. Call train(), eval() and "
                "requires_grad_(), and set attributes of modules, on all ranks alike"
            )
        require_same_weights(held, () if model is None else model.named_parameters())


def require_same_weights(held: Mapping[int, Weights], named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises DivergenceError where the ranks, by their numbers, do not hold the same."""
    (first_rank, first), *others = held.items()
    for rank, other in others:
        if other == first:
            continue
        if first.parameters == other.parameters == 0:
            require_same_steps([own.digest for own in held.values()])
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


@kept_with_mesh(maxsize=1)
def _are_of_one_kind(spatial: Spatial) -> bool:
    return len(set(from_all_ranks(name()))) == 1


@torch.no_grad()
def _values(parameter: nn.Parameter, row: int) -> Tensor | None:
    """Some of its values; None where they are not looked at."""
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return None
    return some_elements(parameter, row, _ELEMENTS)
