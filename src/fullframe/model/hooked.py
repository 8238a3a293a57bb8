"""Gradients of parameters that have hooks of users, who are to see the job's: averaged one by one, as backward comes.

A replica that alone uses such a parameter is in its hook while the others go on and send buckets of DDP's; they come to
it at the end of their pass. So these messages have a group of their own: in DDP's they would meet its buckets. A hook
may be on some ranks alone, as one that logs; the others send their part all the same.
"""

from collections.abc import Iterable
from itertools import compress

import torch.distributed as dist
from torch import Tensor, nn

from fullframe.model.unused import has_hooks
from fullframe.ranks.agreement import on_any_rank_each
from fullframe.ranks.groups import group_of_all, open_group_of_all
from fullframe.ranks.mesh import Spatial
from fullframe.spatial.gradients import averages_others, mean_over_all, mean_over_ranks


class MeansForHooks:
    """Made on all ranks alike. `differ`: replicas may use different parameters in a pass."""

    def __init__(self, spatial: Spatial, differ: bool):
        self._differ = differ
        self._is_known = dist.get_world_size() == 1 or not spatial.channel.tagged
        self._elsewhere: set[nn.Parameter] = set()  # those that have hooks on any rank
        several = dist.get_world_size() > spatial.size and spatial.channel.tagged
        self._kind = spatial.mesh.device_type if several else "cpu"
        if several:
            group_of_all()

    def tell(self, parameters: Iterable[nn.Parameter]) -> None:
        """After the first forward pass, on all ranks, which tell each other which of the parameters have hooks.

        `parameters` are all of the model's, in one order.
        """
        if not self._is_known:
            self._is_known = True
            parameters = list(parameters)
            flags, _ = on_any_rank_each(list(map(has_hooks, parameters)), 0)
            self._elsewhere = set(compress(parameters, flags))

    def open(self, parameters: Iterable[nn.Parameter]) -> None:
        """At the beginning of a backward pass, on all ranks: NCCL may not open a group while buckets are under way.

        It does once there are hooks, or parameters that are no model's.
        """
        if self._kind != "cpu" and (averages_others() or any(map(self.are_there, parameters))):
            open_group_of_all(self._kind)

    def are_there(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter has hooks on this rank, or had some on any in the first pass."""
        return parameter in self._elsewhere or has_hooks(parameter)

    def mean(self, gradient: Tensor, parameter: nn.Parameter, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The mean over all ranks of the gradient of one of the `parameters`, which are in one order on all ranks.

        Raises DivergenceError on all ranks where they are at different ones.
        """
        if not self._differ:
            return mean_over_ranks(gradient, dist.group.WORLD)  # type: ignore[arg-type]
        number = next(number for number, each in enumerate(parameters) if each is parameter)
        return mean_over_all(gradient, f"trained parameter {number}")
