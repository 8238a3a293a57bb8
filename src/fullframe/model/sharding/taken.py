"""Parameters that forward takes of a unit without calling it, as `F.linear(x, self.layers[0].weight)` does.

The unit is gathered when they are asked for, and whole until forward ends, and in backward: as if it were no unit but
part of the model itself. Parameters that someone kept from before they were sharded stand for those of now.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map_only

from fullframe.errors import GradientError
from fullframe.model.sharding.values import is_sharded


class Lending:
    """Gathers units of `root` whose parameters are asked for while it runs.

    To be made when torch's own hooks are on it, as the first gathers before ours.
    """

    def __init__(self, root: nn.Module):
        self._running = 0  # calls of root, one in another
        self.taken: list[Any] = []  # units of which something has ever been taken
        self._to_end: list[Callable[[], None]] = []
        root.register_forward_pre_hook(self._begun)
        root.register_forward_hook(self._ended, always_call=True)

    def lend(self, unit: Any, modules: list[nn.Module], begun: Callable[[], None], ended: Callable[[], None]) -> None:
        """From now on parameters of these modules of the unit may be taken; `begun` is called then, `ended` later."""

        def take() -> None:
            if self._running > 0:  # less where a hook before ours has raised
                unit.unshard()
                if unit not in self.taken:
                    self.taken.append(unit)
                    _leave_to_root(unit)
                self._to_end.append(ended)
                begun()

        for module in modules:
            module._parameters = _Asked(module._parameters, take)

    def begin(self) -> None:
        """Before a forward pass; another may have ended by an error."""
        self._running, self._to_end = 0, []
        for unit in self.taken:
            _leave_to_root(unit)  # again, where a rehearsal has put hooks back as they were
        self.give_back()

    def gather(self) -> None:
        """Before a backward pass."""
        for unit in self.taken:
            unit.unshard()

    def give_back(self) -> None:
        """After a pass."""
        for unit in self.taken:
            unit.reshard()

    def _begun(self, root: nn.Module, args: Any) -> None:
        self._running += 1

    def _ended(self, root: nn.Module, args: Any, output: Any) -> None:
        self._running -= 1
        if self._running == 0:
            to_end, self._to_end = self._to_end, []
            try:
                for ended in to_end:
                    ended()
            finally:
                self.give_back()


@contextmanager
def naming_shards() -> Iterator[None]:
    """Raises GradientError where a forward pass, or a loss, meets parameters that are not gathered."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise GradientError(
            "sharded parameters of a block that is not running meet plain tensors, as where forward goes over "
            "self.parameters(); take them by name (self.layers[0].weight), or in the loss by parameter.full_tensor(), "
            "or do without shard_parameters"
        ) from error


def _leave_to_root(unit: Any) -> None:
    """Takes torch's hooks off, so that a call, too, asks for its parameters, and neither ends it for the other."""
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


class _Asked(dict[str, Any]):
    """A module's parameters, which `take` gathers where a sharded one is asked for; a copy is a plain dict."""

    def __init__(self, own: dict[str, Any], take: Callable[[], None]):
        super().__init__(own)
        self._take = take

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if is_sharded(found):
            self._take()
            found = super().__getitem__(name)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Replaced(nn.Parameter):
    """A parameter in whose place another is since: every function of torch is given that one."""

    goes_first = True  # before what split tensors do
    _now: Callable[[], Any]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._now())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Replaced, lambda parameter: parameter._now(), (args, kwargs or {}))
        return func(*args, **kwargs)


def stand_in(parameter: Any, module: nn.Module, name: str) -> None:
    """Lets go of the parameter's values: from now on it stands for what the module has of that name."""
    holder = weakref.ref(module)
    parameter.data = parameter.data.new_empty(0)
    parameter._now = lambda: getattr(holder(), name)
    parameter.__class__ = Replaced
