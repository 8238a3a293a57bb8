"""What a forward pass with its loss may change beside buffers, and what must not change where it is run once more."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any, Literal

from torch import Tensor, nn

from fullframe.data.nested import leaves
from fullframe.model.sharding.values import is_sharded
from fullframe.ranks.raw_bytes import checksums
from fullframe.spatial.tensor import local_or_whole


class Changes:
    """Of the tensors of `batch` and the parameters of `model` since now: of all, of the frozen, or of none.

    An encoder that follows another by momentum has frozen parameters which its forward moves.
    """

    def __init__(self, batch: Any, model: nn.Module, of: Literal["all", "frozen", "none"]):
        tensors = [local_or_whole(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._model, self._of = model, of
        self._sums = _sums(model, of)

    def of_batch(self) -> bool:
        """Whether something was written into a tensor of the batch."""
        return any(tensor._version != version for tensor, version in self._versions)

    def of_parameters(self) -> bool:
        """Whether parameters are others."""
        return _sums(self._model, self._of) != self._sums


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards what modules hold as plain attributes is as before: numbers, words, tensors (not what is in these)."""
    before = [(module, _plain(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, plain in before:
            for name in _plain(module).keys() - plain.keys():
                delattr(module, name)
            vars(module).update(plain)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {n: value for n, value in vars(module).items() if isinstance(value, (Tensor, Number, str, type(None)))}


def _sums(model: nn.Module, of: str) -> list[int]:
    """A version does not tell of what is written by `.data`."""
    if of == "none":
        return []
    return checksums(p for p in model.parameters() if not (of == "frozen" and p.requires_grad) and not is_sharded(p))
