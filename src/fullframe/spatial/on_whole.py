"""Calls on maps made whole: of fewer rows than ranks, and of no elements at all, which cost nothing to send."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.errors import FullframeError
from fullframe.geometry.placement import Placement
from fullframe.spatial.operands import shells_in
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.registry import TooSmall, writes
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


def as_too_small(error: Exception, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TooSmall | None:
    """`error` where it is TooSmall, or one like it where a rule failed on split maps of no elements; else None.

    No rank may have fewer than the others there, so that all of them fail.
    """
    if isinstance(error, TooSmall):
        return error
    placements: list[Placement] = []
    for shell in shells_in(args, kwargs):
        if shell.numel() or any(p.extents.has_empty and p.extents.size for p in shell.spec.placements):
            return None
        placements += shell.spec.placements
    if not placements or writes(func, kwargs) or isinstance(error, FullframeError):
        return None
    return TooSmall(sorted({p.axis for p in placements}))


def called_whole(small: TooSmall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` again, on operands made whole along the mesh axes that the map is too small for."""
    is_operand = any(shell.spec is small.spec for shell in shells_in(args, kwargs))  # or made on the way to it

    def gather(shell: SpatialTensor) -> Tensor:
        if is_operand and shell.spec is not small.spec:
            return shell
        return wrap(*gather_axes(local_of(shell), shell.spec, small.axes))

    args, kwargs = tree_map_only(SpatialTensor, gather, (args, kwargs))
    return func(*args, **kwargs)
