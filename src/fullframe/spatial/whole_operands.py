"""The numbers, arrays and whole tensors that meet split ones, noted while somebody looks.

Every rule takes them to be the same on all ranks of a replica.
"""

import zlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from fullframe.ranks.adjoint import is_transformed
from fullframe.ranks.raw_bytes import some_elements
from fullframe.ranks.recording import recorder
from fullframe.ranks.tags import is_a_rules_own, line
from fullframe.spatial.rules.registry import writes

PLACES = 256  # calls that are told apart; further ones are added to these
MOST_CALLS = 16 * PLACES  # that are looked at; a model that is not called for long, an average say, would slow others
_ELEMENTS = 1024  # of a tensor that are looked at
_GOLDEN = 0.6180339887  # its multiples weigh elements, so that sums are others where the order is
_CONVOLUTION_BACKWARD = {torch.ops.aten.convolution_backward, torch.ops.aten.convolution_backward.default}
_WITH_STATISTICS = {F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm}  # that a module keeps
_READ_NO_VALUES = {  # of an operand that says where to, as which dtype or as what shape, and may hold anything
    *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.pin_memory, Tensor.type_as, torch.result_type),
    *(Tensor.expand_as, Tensor.view_as, Tensor.reshape_as),
}
_LARGE = 2**1000  # as large integers as a float holds

watching: "list[Noted]" = []  # whose turn it is: in few passes one, in others none


class Noted:
    """What a rank's whole operands come to, call by call; `turn` says which rows of large ones are looked at.

    Calls of other threads than `thread`, by default this one, are let be: when they come is chance.
    """

    def __init__(self, turn: int, thread: int | None = None):
        self._turn, self._calls = turn, 0
        self._thread = get_ident() if thread is None else thread
        self._lines: list[str] = []
        # A weighted sum, and that of the sizes, by places; of what lies on the host and on a GPU apart.
        self._sums: dict[tuple[int, torch.device], Tensor] = {}

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call on split tensors. What it writes into is no operand, and may hold anything."""
        if get_ident() != self._thread:
            return
        if self._calls >= MOST_CALLS:  # only how many: so it is still seen where a rank made calls of its own
            self._calls += 1
            return
        if func in _READ_NO_VALUES or is_transformed():
            return
        if recorder() is not None or is_a_rules_own():  # of a block to be compiled, whose tensors have no values
            return
        # A selective checkpoint, which is such a mode, would take ours for the model's, and miss them in backward.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._add(_operands(func, args, kwargs))

    def _add(self, operands: list[Any]) -> None:
        found = list(_numbers(operands, self._turn))
        if not found:
            return
        place, self._calls = self._calls % PLACES, self._calls + 1
        if place == len(self._lines):
            self._lines.append(line())
        for values in found:
            sums, key = _sums(values), (place, values.device)
            self._sums[key] = sums + self._sums[key] if key in self._sums else sums

    def line(self, place: int) -> str:
        """Where the first call was that is noted at `place`."""
        return self._lines[place]

    def facts(self, device: torch.device) -> Tensor:
        """How many calls at which lines, then the sums by places, of shape (1 + PLACES, 2), in float64 on `device`."""
        facts = torch.zeros(1 + PLACES, 2, dtype=torch.float64, device="cpu")
        facts[0, 0], facts[0, 1] = self._calls, zlib.crc32("\n".join(self._lines).encode())
        for (place, where), sums in self._sums.items():
            if where.type == "cpu":
                facts[1 + place] = sums
        facts = facts.to(device)
        for (place, where), sums in self._sums.items():
            if where.type != "cpu":
                facts[1 + place] += sums
        return facts


def _operands(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What the call reads."""
    beta = kwargs.get("beta")
    is_first_unread = isinstance(beta, (int, float)) and not beta  # torch.baddbmm(torch.empty(...), q, k, beta=0)
    unread = {"out", "device", "input"} if is_first_unread else {"out", "device"}
    read = args[1:] if args and (is_first_unread or writes(func, kwargs)) else args
    if func in _CONVOLUTION_BACKWARD and len(args) == 11:
        gradient, image, weight, *settings = args
        of_image, of_weight, _ = settings[-1]  # for what is not read torch.nn.grad gives an empty one
        read = (gradient, *([image] if of_weight else []), *([weight] if of_image else []), *settings)
    operands = [*read, *(value for name, value in kwargs.items() if name not in unread)]
    if func in _WITH_STATISTICS:  # buffers, which are compared elsewhere
        operands = [value for value in operands if not isinstance(value, Tensor)]
    return operands


def _numbers(values: list[Any], turn: int) -> Iterator[Tensor]:
    """Some of what each whole operand holds; nothing of parameters and flags, which are compared elsewhere."""
    plain: list[float] = []
    for value in tree_iter(values):
        if isinstance(value, slice):
            plain += [_as_float(end) for end in (value.start, value.stop, value.step) if isinstance(end, int)]
        elif isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
            plain.append(_as_float(value))
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            yield torch.as_tensor(value.reshape(-1)[:_ELEMENTS].astype(np.float64), device="cpu")
        elif type(value) is Tensor and value.layout == torch.strided and not (value.is_quantized or value.is_nested):
            yield _some(value, turn)
    if plain:
        yield torch.tensor(plain, dtype=torch.float64, device="cpu")


def _as_float(value: Any) -> float:
    return float(max(-_LARGE, min(value, _LARGE)) if isinstance(value, int) else value)


@torch.no_grad()
def _some(whole: Tensor, turn: int) -> Tensor:
    values = some_elements(whole, turn, _ELEMENTS)
    return (torch.view_as_real(values.resolve_conj()).reshape(-1) if values.is_complex() else values).double()


def _sums(values: Tensor) -> Tensor:
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    weights = torch.arange(1, len(finite) + 1, dtype=torch.float64, device=finite.device) * _GOLDEN % 1
    return torch.stack([(finite * weights).sum(), finite.abs().sum()])
