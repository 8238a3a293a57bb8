"""What AOTAutograd of torch 2.13 and 2.14 computes wrongly without a word, so that no program is made of it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullframe.ranks.recording import NotCapturable
from fullframe.spatial.tensor import local_or_whole
from fullframe.spatial.views import share_memory, version_of

# Called as (input, p, training), where nothing is dropped they return the input.
_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip
_OFF_UNLESS_TRAINING = {F.alpha_dropout, F.feature_alpha_dropout}


class WithoutAOTFaults(TorchFunctionMode):
    """Calls of a block after which AOTAutograd's view of memory is not torch's: set right, or noted.

    A dropout that drops nothing returns its input, where 2.13 takes a write to the result for none to the input.
    What is written into windows of `unfold` reaches the tensor, with zeros for what is in none of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: list[tuple[Tensor, int]] = []  # with gaps between or behind them, and their versions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _DROPOUTS and _drops_nothing(func, args, kwargs):
            return args[0] if args else kwargs["input"]
        if func is Tensor.unfold and not _covers(*args, **kwargs):
            windows = local_or_whole(result)
            self._windows.append((windows, version_of(windows)))
        return result

    def check(self, outputs: Sequence[Tensor]) -> None:
        """Raises NotCapturable for what the calls so far, or the block's `outputs`, have of it."""
        if any(version_of(windows) != version for windows, version in self._windows):
            raise NotCapturable("it writes to windows of unfold, or to what they are cut from")
        views = [t for t in outputs if t.requires_grad and t._is_view()]
        if any(share_memory(view, t) for view in views for t in outputs if not t.requires_grad):
            raise NotCapturable("it returns a view and the same without its gradient")


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("training", kwargs.get("train", func not in _OFF_UNLESS_TRAINING))
    training = args[2] if len(args) > 2 else given
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return not training or p == 0


def _covers(x: Tensor, dimension: int, size: int, step: int) -> bool:
    """Whether each element of x is in one window."""
    return size == step and x.shape[dimension] % size == 0
