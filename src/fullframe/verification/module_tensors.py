"""Every tensor that goes into or comes out of a module, in order of execution, and how two of them are compared."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullframe.data.nested import tensors_in
from fullframe.verification.verdict import Found, Place

_CHUNK_ELEMENTS = 2**18
_in_backward: Callable[[], Any] = torch._C._current_autograd_node  # None outside
_INFINITE = 1e30  # attention masks use a dtype's least number for minus infinity: no scale of anything


class ModuleTensors:
    """Calls `seen(place, tensor)` for the inputs and outputs of all modules of `model` between `with` and its end.

    Inputs are seen before the forward, outputs after it; what backward runs again is not seen, nor what runs without
    numbers, on the meta device, to learn of shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        seen: Callable[[Place, Tensor], None],
        entering: Callable[[str | None, Counter[str]], None] = lambda caller, calls: None,
    ):
        """`entering(caller, calls)` is called before each call of a module; `calls` has those of each path so far."""
        self._seen, self._entering = seen, entering
        self._paths = {module: path for path, module in model.named_modules()}
        self.calls = Counter[str]()  # begun so far, by the module's path
        self.again: set[str] = set()  # paths of what backward has called again
        self._running: list[tuple[nn.Module, int]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "ModuleTensors":
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_backward():
            self.again.add(self._paths[module])
        elif _have_numbers((args, kwargs)):
            path = self._paths[module]
            self._entering(self.caller[0], self.calls)
            call = self.calls[path]
            self._report("input", module, call, (args, kwargs))
            self._running.append((module, call))
            self.calls[path] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not _in_backward() and _have_numbers((args, output)):
            _, call = self._running.pop()
            self._report("output", module, call, output)

    def _report(self, kind: str, module: nn.Module, call: int, values: Any) -> None:
        caller = self.caller
        for leaf, tensor in enumerate(tensors_in(values)):
            self._seen(Place(kind, self._paths[module], call, leaf, type(module).__name__, *caller), tensor)

    @property
    def caller(self) -> tuple[str | None, str]:
        """Path and class of the module whose forward runs."""
        if not self._running:
            return None, ""
        running, _ = self._running[-1]
        return self._paths[running], type(running).__name__


def writes_to(tensor: Tensor) -> float:
    """How many there were; in inference mode nobody counts, and nan equals nothing, so the tensor is always another."""
    return math.nan if tensor.is_inference() else tensor._version


def _have_numbers(values: Any) -> bool:
    return not any(tensor.is_meta for tensor in tensors_in(values))


@torch.no_grad()
def compared(expected: Tensor, got: Tensor, rank: int = 0) -> Found:
    """How far `got` is from `expected`, of the same shape; the same infinity, or NaN in both, is no difference."""
    local_shape = tuple(got.shape)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        problem = f"{tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
        return Found(float("inf"), 0.0, True, problem, local_shape, rank)
    floating = expected.is_floating_point() or expected.is_complex()
    if expected.numel() == 0:
        return Found(0.0, 0.0, floating, "", local_shape, rank)
    if expected.is_complex():
        expected, got = (torch.view_as_real(each.resolve_conj()) for each in (expected, got))
    largest = [
        torch.stack(_largest(*chunks))
        for chunks in zip(_chunks(expected.to(got.device)), _chunks(got), strict=True)  # no temporaries of full size
    ]
    max_abs, scale = torch.stack(largest).amax(0).tolist()
    return Found(max_abs, scale, floating, "", local_shape, rank)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), _CHUNK_ELEMENTS)


def _largest(expected: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """The largest difference, and the largest expected value."""
    expected, got = expected.double(), got.double()
    same = (expected == got) | (expected.isnan() & got.isnan())
    difference = torch.where(same, 0.0, (expected - got).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
    size = expected.abs()
    return difference.amax(), torch.where(size < _INFINITE, size, 0.0).amax()
