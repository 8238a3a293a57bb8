"""Whether the ranks still take one step together: told by a few numbers that travel with what a step adds up anyway."""

import zlib
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fullframe.errors import DivergenceError
from fullframe.model.same.operands import ROUNDING, ROUNDING_ON_GPUS
from fullframe.model.same.optimizers import options_of
from fullframe.ranks.agreement import from_all_ranks
from fullframe.strategy import Strategy
from fullframe.training.same_start import differences

_LEAST = 1e-6  # of a loss's mean, which may be what is left of large numbers


class SameStep:
    """Its optimizer's options, on which all ranks of the job must agree, and its loss, on which a replica's must.

    A loss that follows from numbers of `x.local`, from a rank's number, or from what a hook on another stage's layers
    has kept, is each rank's own: its gradients would be averaged, and its numbers added up, without a word.
    """

    def __init__(self, strategy: Strategy, optimizer: Optimizer):
        self._optimizer, self._replicas = optimizer, strategy.data
        self._ranks, self._each = strategy.ranks, strategy.ranks // strategy.data  # a replica's follow each other
        self._compares = self._each > 1 and dist.get_backend() != "fake"  # whose ranks are not there
        self._mine, self._rounding = torch.zeros(2), ROUNDING

    def told(self, loss: Tensor, count: Tensor) -> Tensor:
        """What this rank adds to the message: of its options, and of its loss, a sum over `count` elements; float64."""
        own = zlib.crc32(repr(options_of(self._optimizer)).encode()) & 0xFFFFF  # its square is exact in float64
        options = torch.stack([torch.full_like(loss, number, dtype=torch.float64) for number in (own, own * own)])
        if not self._compares:
            return options
        self._mine = torch.stack([loss.double(), count.double()])
        self._rounding = ROUNDING if loss.is_cpu else ROUNDING_ON_GPUS
        slots = self._mine.new_zeros(4, self._replicas)
        slots[:, dist.get_rank() // self._each] = torch.cat([self._mine, self._mine.square()])
        return torch.cat([options, slots.flatten()])

    def require(self, sums: Sequence[float], strategy: Strategy) -> None:
        """Raises DivergenceError on all ranks where what they told, added up to `sums`, is not alike."""
        options, squares, *slots = sums
        if squares * self._ranks != options * options:
            self.require_alike(strategy)
        for replica in range(self._replicas if self._compares else 0):
            loss, count, loss_squares, count_squares = slots[replica :: self._replicas]
            least = _LEAST * abs(count)
            if self._differ(loss, loss_squares, least) or self._differ(count, count_squares, 0.0):
                self._refuse()

    def require_alike(self, strategy: Strategy) -> None:
        """Raises DivergenceError on all ranks where strategies or optimizers differ; all ranks call it."""
        mine = {f"strategy.{name}": value for name, value in asdict(strategy).items()}
        if different := differences(mine | options_of(self._optimizer)):
            raise DivergenceError(
                f"the ranks do not take the same steps: {different}. Make them alike on all ranks, and let a scheduler "
                "go by what all ranks know"
            )

    def _differ(self, total: float, squares: float, least: float) -> bool:
        """Whether the numbers of a replica's ranks, of which these are the sums, are apart by more than rounding."""
        mean = total / self._each
        spread = squares / self._each - mean * mean  # no number where one of them is none: the step is skipped for it
        return spread > (self._rounding * abs(mean) + least / self._each) ** 2

    def _refuse(self) -> None:
        everyone = from_all_ranks(tuple(self._mine.tolist()))
        said = ", ".join(f"{loss:.6g} over {count:.6g} on rank {rank}" for rank, (loss, count) in enumerate(everyone))
        raise DivergenceError(
            f"the ranks of a replica do not compute one loss: (sum, count) is {said}. Whole numbers are the same on "
            "all of them; what follows from x.local, from a rank's number, or, with stages, from what a hook has kept "
            "of layers that others run, is each rank's own: use the split tensor or x.full(), and return what the loss "
            "needs from the model's forward"
        )
