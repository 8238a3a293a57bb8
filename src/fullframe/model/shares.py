"""Parameters of which each rank keeps its share of the gradient, to be averaged by someone else."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fullframe.model.unused import has_hooks
from fullframe.ranks.mesh import Spatial
from fullframe.spatial.gradients import Hook, is_accumulated, manage, mean_over_ranks


def leave_shares(parameters: Iterable[nn.Parameter], spatial: Spatial) -> None:
    """Each rank keeps its share of their gradients; a hook of the user's or `autograd.grad` sees its replica's."""
    for parameter in parameters:
        manage(parameter, _hook_of_shares(weakref.ref(parameter), spatial))


def _hook_of_shares(parameter: Any, spatial: Spatial) -> Hook:
    def hook(gradient: Tensor) -> Tensor | None:
        own = parameter()
        is_looked_at = has_hooks(own) or not is_accumulated(own)
        return mean_over_ranks(gradient, spatial.replica) if is_looked_at else None

    return hook
