"""What a forward pass with its loss may change beside buffers, and what must not change where it is run once more."""

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


def _sums(model: nn.Module, of: str) -> list[int]:
    """A version does not tell of what is written by `.data`."""
    if of == "none":
        return []
    return checksums(p for p in model.parameters() if not (of == "frozen" and p.requires_grad) and not is_sharded(p))
