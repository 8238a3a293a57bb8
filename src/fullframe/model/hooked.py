"""Gradients of parameters that have hooks of users, who are to see the job's: averaged one by one, as backward comes.

A replica that alone uses such a parameter is in its hook while the others go on and send buckets of DDP's; they come to
it at the end of their pass. So these messages have a group of their own: in DDP's they would meet its buckets.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn

from fullframe.errors import DivergenceError
from fullframe.model.unused import has_hooks
from fullframe.ranks.agreement import is_same_on_all, on_any_rank
from fullframe.ranks.channel import channel_of
from fullframe.ranks.groups import group_of_all, open_groups
from fullframe.ranks.mesh import Spatial
from fullframe.spatial.gradients import mean_over_ranks


class MeansForHooks:
    """Made on all ranks alike. `differ`: replicas may use different parameters in a pass."""

    def __init__(self, spatial: Spatial, differ: bool):
        self._kind, self._is_open = spatial.mesh.device_type, not differ
        self._group: dist.ProcessGroup = group_of_all() if differ else dist.group.WORLD  # type: ignore[assignment]
        self._differ = differ

    def open(self, parameters: Iterable[nn.Parameter]) -> None:
        """At the beginning of a pass, on all ranks: NCCL may not open a group while DDP's buckets are under way."""
        if not self._is_open:
            self._is_open = True
            if on_any_rank(any(map(has_hooks, parameters))):
                open_groups([self._group], self._kind)

    def mean(self, gradient: Tensor, parameter: nn.Parameter, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The mean over all ranks of the gradient of one of the `parameters`, which are in one order on all ranks.

        Raises DivergenceError on all ranks where they are at different ones: by gloo that is told by the message.
        """
        if self._differ and channel_of(self._group).carrier is None:
            number = next(number for number, each in enumerate(parameters) if each is parameter)
            if not is_same_on_all(number, self._group):
                raise DivergenceError(
                    "replicas come to parameters with hooks in different orders, and each would get another's "
                    "gradient; with find_unused_parameters=True a hook sees its replica's alone"
                )
        return mean_over_ranks(gradient, self._group)
