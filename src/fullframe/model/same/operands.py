"""Whether the ranks of a replica have the same numbers, arrays and whole tensors where these meet split ones.

One that is drawn from a generator of the model's own (`np.random.default_rng()`), or follows from the rank, makes each
part of a map another map's, and no rank can tell from its own numbers. They are looked at in the first pass, the
second, fourth, eighth, ..., as that takes time: on a GPU the host waits for it.
"""

from threading import get_ident

import torch
from torch import Tensor

from fullframe.errors import DivergenceError
from fullframe.ranks.collectives import all_gather_no_grad
from fullframe.ranks.mesh import Spatial
from fullframe.spatial.whole_operands import Noted, watching

ROUNDING = 1e-3  # of what each rank computes whole for itself
ROUNDING_ON_GPUS = 1e-2  # which may do so by other kernels each, in 16 bits too
_NOISE = 1e-5  # of sums whose terms cancel in the model, and are rounding alone


class OperandsInPasses:
    """Notes what meets split tensors in some of a model's passes, before and after them too, and compares it.

    All ranks of a replica call it alike; nothing is noted without a `spatial`. Raises DivergenceError on all of them
    where they had other operands. Where one made calls that others did not, or others at another line, to show or to
    log, nothing is compared.
    """

    def __init__(self, spatial: Spatial | None):
        self._spatial, self._passes = spatial, 0
        self._noted: Noted | None = None
        self._before: Noted | None = None  # what images have met on their way to a forward pass
        self._thread = get_ident()  # the user's; backward may run in another
        self._note(spatial is not None)

    def __del__(self) -> None:
        self._end()

    def forward_begins(self) -> None:
        """Note apart from now on; no rank waits here, where it would not be seen in which module it does."""
        self._before = self._noted
        self._passes, self._thread = self._passes + 1, get_ident()
        self._note(_is_looked_at(self._passes))

    def forward_has_ended(self) -> None:
        """Compare what was met in it, and what images have met on their way to it."""
        self._compare(self._before, self._noted)
        self._before = None
        self._note(_is_looked_at(self._passes) or _is_looked_at(self._passes + 1))

    def backward_begins(self) -> None:
        """Compare what was met in the loss."""
        self._compare(self._noted)
        self._note(_is_looked_at(self._passes + 1))

    def _note(self, is_due: bool) -> None:
        self._end()
        if is_due:
            self._noted = Noted(self._passes, self._thread)
            watching.append(self._noted)

    def _end(self) -> None:
        if self._noted is not None:
            watching.remove(self._noted)
            self._noted = None

    def _compare(self, *parts: Noted | None) -> None:
        self._end()
        looked_at, spatial = [noted for noted in parts if noted is not None], self._spatial
        if not looked_at or spatial is None:
            return
        facts = torch.stack([noted.facts(torch.device(spatial.mesh.device_type)) for noted in looked_at])
        everyone = all_gather_no_grad(facts, spatial.replica, "whole operands", "a forward pass").cpu()
        for noted, found in zip(looked_at, everyone.permute(1, 2, 0, 3), strict=True):  # (1 + places, ranks, 2)
            if (found[0] == found[0, 0]).all():
                self._require_same(noted, found[1:], spatial)

    @staticmethod
    def _require_same(noted: Noted, facts: Tensor, spatial: Spatial) -> None:
        """Raises DivergenceError where the ranks' `facts` of places, of shape (places, ranks, 2), are not alike."""
        rounding = ROUNDING if spatial.mesh.device_type == "cpu" else ROUNDING_ON_GPUS
        most = rounding * facts[..., 1].amax(1, keepdim=True) + _NOISE
        apart = ((facts - facts[:, :1]).abs() > most[..., None]).any(2)
        if apart.any():
            place, number = apart.nonzero()[0].tolist()
            first, other = (spatial.replica_ranks[rank] for rank in (0, number))
            raise DivergenceError(
                f"a number, array or whole tensor that meets a split one is another on rank {other} than on rank "
                f"{first}, at {noted.line(place)}: each computes its part of another map. Draw from torch, "
                "numpy.random or random, whose states the ranks share where nobody seeds them apart after parallelize "
                "(torch.manual_seed(seed + mesh.get_local_rank('data')) does not), or seed a generator of your own "
                "alike on all ranks of a replica, and let nothing that meets a split tensor follow from the rank or "
                "the clock"
            )


def _is_looked_at(number: int) -> bool:
    return not number & (number - 1)
