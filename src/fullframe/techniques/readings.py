"""What a forward pass reads beside its inputs, and whether it is still what it was when the pass began."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullframe.spatial.refetch import require_unwritten
from fullframe.spatial.tensor import local_or_whole

_NO_STATE = (type(None), bool, int, float, str, Tensor, nn.Module, type)
_NOT_THERE: Any = object()
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


class _Reading(NamedTuple):
    what: str
    tensor: Tensor
    version: int
    is_trained: bool


class Readings:
    """Tensors with their versions, and objects with their attributes, as they are now. Nothing is asked of a device."""

    def __init__(self) -> None:
        self._tensors: list[_Reading] = []
        self._objects: list[tuple[object, dict[str, Any]]] = []

    def add(self, what: str, tensor: Tensor) -> None:
        """`what` says whose it is."""
        tensor = local_or_whole(tensor)
        if not tensor.is_inference():
            self._tensors.append(_Reading(what, tensor, tensor._version, tensor.requires_grad))

    def add_objects(self, given: Iterable[Any]) -> None:
        """Arguments with attributes, as a dataclass has them."""
        for one in given:
            if not isinstance(one, _NO_STATE) and getattr(one, "__dict__", None):
                entries = dict(vars(one))
                self._objects.append((one, entries))
                for name, value in entries.items():
                    if isinstance(value, Tensor):
                        self.add(f"{name} of the {type(one).__name__} it is given", value)

    def written(self) -> str | None:
        """What has been written to since, the first of it."""
        for what, tensor, version, _ in self._tensors:
            if tensor._version != version:
                return what
        for one, before in self._objects:
            now = vars(one)
            for name in {**before, **now}:
                if now.get(name, _NOT_THERE) is not before.get(name, _NOT_THERE):
                    return f"{name} of the {type(one).__name__} it is given"
        return None

    def frozen(self) -> str | None:
        """What is trained now and was not, or the other way round, the first of it."""
        for what, tensor, _, is_trained in self._tensors:
            if tensor.requires_grad != is_trained:
                return what
        return None


class ForeignParameters(TorchFunctionMode):
    """Inside, parameters other than `own` that torch's functions get are put into `known`, and so into `readings`."""

    def __init__(self, own: Iterable[nn.Parameter], known: dict[nn.Parameter, None], readings: Readings):
        super().__init__()
        self._own, self._known, self._readings = set(map(id, own)), known, readings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for given in (*args, *kwargs.values()):
            for one in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(one, nn.Parameter) and id(one) not in self._own and one not in self._known:
                    self._known[one] = None
                    self._readings.add(foreign(one), one)
        return func(*args, **kwargs)


class SavedAgain:
    """What a second pass saves, held against its version when backward uses it, as torch does where no hooks are.

    Both passes save by the hooks that are there, torch's, of which those of the second give what backward then gets
    from those of the first. What the second saves beyond the first torch does not get to see: it would have stopped.
    """

    def __init__(self) -> None:
        self._count = 0  # that the first pass has saved
        self._versions: dict[int, int] = {}  # by the number of a tensor that torch holds

    def first(self) -> AbstractContextManager[None]:
        """Around the first pass."""
        pack, unpack = _top_hooks(True)

        def pack_counted(tensor: Tensor) -> Any:
            self._count += 1
            return pack(tensor)

        def unpack_unwritten(packed: Any) -> Tensor:
            tensor: Tensor = unpack(packed)
            require_unwritten(tensor, self._versions.get(id(tensor), tensor._version), tensor.shape)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack_counted, unpack_unwritten)

    def second(self) -> AbstractContextManager[None]:
        """Around the second pass."""
        pack, unpack = _top_hooks(True)
        left = self._count

        def pack_with_version(tensor: Tensor) -> Any:
            nonlocal left
            held = tensor.detach()  # the very one that torch then gives
            if left == 0:
                return held
            left -= 1
            self._versions[id(held)] = held._version
            return pack(held)

        return torch.autograd.graph.saved_tensors_hooks(pack_with_version, unpack)


def foreign(parameter: nn.Parameter) -> str:
    """What to call a parameter of another module, whose name is not known here."""
    return f"a parameter of another module, of shape {tuple(parameter.shape)}"
