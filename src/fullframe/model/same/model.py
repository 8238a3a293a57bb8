"""Whether all ranks have the same model: its tensors, its modules and what these are set to, train or eval.

An `eps`, a `p`, a padding mode or an activation leaves every shape as it is, so that ranks which differ in one would go
on, each to numbers of its own, and average these.
"""

import hashlib
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fullframe import __version__
from fullframe.errors import ShapeError
from fullframe.model.attributes import OF_EVERY_MODULE
from fullframe.ranks.agreement import first_difference, from_all_ranks, is_first_rank
from fullframe.wording import inside

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.layout, torch.memory_format, type(None))
_DEEPEST = 8  # of lists in lists
_ELEMENTS = 4096  # of a tensor in an attribute that is compared by its values


def require_same_model(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raises ShapeError on all ranks, naming the first difference, where they have other models; all ranks call it.

    Other parameters, buffers or modules, torch's modules set otherwise, other `options`, another torch. Other
    attributes of users' own modules, which may be meant (`self.rank`), are a warning.
    """
    mine = [*_of_the_program(), *(f"{name}={_text(value)}" for name, value in options.items()), *_of_tensors(model)]
    attributes: list[str] = []
    for path, module in model.named_modules():
        mine.append(f"{path or 'the model'}: {_name_of(type(module))}")
        for name, text in settings_of(module).items():
            decides = _is_in(name, _decisive(module))
            (mine if decides else attributes).append(f"{inside(path, name)} = {text}")
    everyone = from_all_ranks((_digest(mine), _digest(attributes)))
    if len({digest for digest, _ in everyone}) > 1:
        first, rank, other = first_difference(from_all_ranks(mine))
        raise ShapeError(
            f"the ranks have different models: where rank 0 has {first}, rank {rank} has {other}; build the same "
            "model on all ranks"
        )
    if len({digest for _, digest in everyone}) > 1:
        first, rank, other = first_difference(from_all_ranks(attributes))
        if is_first_rank():
            warnings.warn(
                f"the ranks' models have different attributes: where rank 0 has {first}, rank {rank} has {other}; if "
                "the model computes by it, the ranks' numbers are mixed up: set it alike on all ranks",
                stacklevel=6,
            )


def settings_of(module: nn.Module) -> dict[str, str]:
    """What the module is set to, in words, by the names of its attributes: numbers, strings, functions, lists of them.

    Not its parameters, buffers and modules, nor objects of which cannot be told whether they are equal; of others'
    modules not what is private, such as the numbers by which `torch.compile` knows them, of ours not what a class lists
    as `found_in_calls`, which follows from a replica's own samples.
    """
    found = {}
    ours = type(module).__module__.startswith("fullframe.")
    for name in sorted(vars(module).keys() - OF_EVERY_MODULE - getattr(type(module), "found_in_calls", frozenset())):
        text = _text(vars(module)[name]) if ours or not name.startswith("_") else None
        if text is not None:
            found[name] = text
    return found


def state_of(model: nn.Module, turn: int) -> int:
    """A number, of 31 bits, that is the same where all modules train alike and the same parameters want gradients.

    And where one module, that of `turn`, and how torch computes are set alike. It is quick.
    """
    modules = _modules(model)
    flags = bytearray()
    for module in modules:
        flags.append(bool(module.training))
        flags.extend([parameter is not None and parameter.requires_grad for parameter in module._parameters.values()])
    text = repr((_decided(modules[turn % len(modules)]), _precision()))
    return zlib.crc32(text.encode(), zlib.crc32(flags)) >> 1


def state_in_words(model: nn.Module, turn: int) -> list[str]:
    """What `state_of` looks at."""
    paths = {module: path for path, module in model.named_modules()}
    said = [f"{path or 'the model'} is in {'train' if module.training else 'eval'}()" for module, path in paths.items()]
    said += [f"{name} is {'trained' if p.requires_grad else 'frozen'}" for name, p in model.named_parameters()]
    modules = _modules(model)
    module = modules[turn % len(modules)]
    path = paths.get(module, "")
    return said + [f"{inside(path, name)} = {text}" for name, text in _decided(module).items()] + _precision()


def _precision() -> list[str]:
    casts = {kind: torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}
    return [
        *(f"autocast to {dtype or 'nothing'} on {kind}" for kind, dtype in casts.items()),
        f"torch.get_float32_matmul_precision() {torch.get_float32_matmul_precision()}",
    ]


def _modules(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()` in some order, and quicker."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _decided(module: nn.Module) -> dict[str, str]:
    decides = _decisive(module)
    return {} if decides == frozenset() else {n: text for n, text in settings_of(module).items() if _is_in(n, decides)}


def _is_in(name: str, names: frozenset[str] | None) -> bool:
    return names is None or name in names


def _decisive(module: nn.Module) -> frozenset[str] | None:
    """Which attributes of a module decide what it computes, as they are torch's own or ours; None: all."""
    kind: Any = type(module)
    return _decisive_of(kind)


@lru_cache(1024)
def _decisive_of(kind: Any) -> frozenset[str] | None:
    modules = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    known = [base for base in modules if base.__module__.startswith(("torch.", "fullframe."))]
    if known == modules:  # not so where torch has made a class of a user's, as for sharded parameters
        return None
    return frozenset(n for base in known if "__init__" in vars(base) for n in signature(base.__init__).parameters)


def _of_the_program() -> list[str]:
    return [
        f"fullframe {__version__}",
        f"torch {torch.__version__.partition('+')[0]}",
        f"torch.get_default_dtype() {torch.get_default_dtype()}",
        f"torch.are_deterministic_algorithms_enabled() {torch.are_deterministic_algorithms_enabled()}",
    ]


def _of_tensors(model: nn.Module) -> list[str]:
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{', trained' * (name in trained)}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).digest()


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _text(value: Any, depth: int = 0) -> str | None:
    """A value in words that are the same for equal ones; None where that cannot be."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return re.sub(r"cuda:\d+", "cuda", repr(value))  # each rank has its own
    if isinstance(value, partial):
        value = (value.func, value.args, value.keywords)
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and depth < _DEEPEST:
        every = value.items() if isinstance(value, Mapping) else value
        parts = [_text(part, depth + 1) or "?" for part in every]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)})"
    if isinstance(value, Tensor):
        return _text_of_tensor(value)
    if callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return _name_of(value)
    return None


def _text_of_tensor(value: Tensor) -> str | None:
    if type(value) is not Tensor or not value.is_cpu or value.layout != torch.strided or value.numel() > _ELEMENTS:
        return None
    return f"{tuple(value.shape)} {value.dtype} {zlib.crc32(repr(value.tolist()).encode()):08x}"
