"""Full backward hooks of modules (`register_full_backward_hook`, `register_full_backward_pre_hook`) on split tensors.

torch passes what enters and leaves such a module through a function that does nothing, and hooks that function's node.
Here the function gets the local tensors, and the hooks one process's gradients, split where the tensors are.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.modules import _functions as torch_functions

from fullframe.spatial.gradients import seen, unseen
from fullframe.spatial.operands import aligned
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import local_or_whole, wrap
from fullframe.spatial.views import version_of

Gradients = tuple[Tensor | None, ...]


class BackwardHookFunction(torch_functions.BackwardHookFunction):
    """torch's function, by whose name its hooks find the node; the node has `specs`, with None for a whole tensor."""


Node: Any = BackwardHookFunction._backward_cls


class Shown:
    """A gradient that arrived here, and what a hook is given in its place."""

    def __init__(self, arrived: Tensor | None, spec: Spec | None):
        self._arrived, self.spec = arrived, spec
        self.given: Any = arrived if arrived is None or spec is None else wrap(seen(arrived, spec), spec)
        self._version = None if self.given is None else version_of(local_or_whole(self.given))

    def taken_back(self, result: Tensor | None) -> Tensor | None:
        """What goes on in backward where a hook gave `result`, which may be what it was given, written to or not."""
        if result is None or self.spec is None:
            return result
        if result is self.given and version_of(local_or_whole(result)) == self._version:
            return self._arrived
        return unseen(aligned(result, self.spec), self.spec)


def _register_hook(node: Any, hook: Callable[[Gradients, Gradients], Gradients | None]) -> Any:
    specs: tuple[Spec | None, ...] = node.specs

    def called(before: Gradients, after: Gradients) -> Gradients | None:
        shown = [Shown(gradient, spec) for gradient, spec in zip(before, specs, strict=True)]
        # the function does nothing: but for a gradient that torch fills in, they are the same
        outer = [s if a is b else Shown(a, s.spec) for a, b, s in zip(after, before, shown, strict=True)]
        result = hook(tuple(s.given for s in shown), tuple(s.given for s in outer))
        if result is None:
            return None
        return tuple(s.taken_back(new) for s, new in zip(shown, result, strict=True))

    return super(Node, node).register_hook(called)


Node.register_hook = _register_hook
