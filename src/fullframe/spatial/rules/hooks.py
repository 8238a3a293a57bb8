"""Gradient hooks: only those of FSDP2, which watch for the moment at which a gradient arrives and change nothing."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullframe.spatial.rules.registry import Refused, getter, rule
from fullframe.spatial.tensor import SpatialTensor, local_of


@rule(Tensor.register_hook, checked=False)
def _register_hook(func: Any, x: SpatialTensor, hook: Callable[[Tensor], Any]) -> Any:
    if not type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
        raise Refused("a hook would see one part's gradient", "Register it on x.local, whose gradient is one part's.")
    return when_gradient_arrives(local_of(x), hook)


def when_gradient_arrives(value: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Call `hook` in backward before anything that `value` was computed from is reached.

    A view loses its hooks once something is written in place, its base does not; the results of many rules are views.
    """
    base = value._base
    return (value if base is None or not base.requires_grad else base).register_hook(hook)


@rule(getter("_base"), checked=False)
def _base(func: Any, x: SpatialTensor) -> None:
    """None: FSDP2 would warn of the views that lose their hooks."""
