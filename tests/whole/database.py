"""torch's own database of its ops and modules with sample inputs, in the form this suite needs.

An entry is one op or one module; a sample is one list of arguments for it, the same on all ranks.
"""

import contextlib
import copy
import gc
import importlib.util
import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

MOST = 2000  # samples of one entry and dtype; the largest has 1,440
MAIN = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
OTHERS = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.complex128)
# Their values are whatever lay in memory.
UNSET = {"empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "empty"}
# Each shard draws its own numbers for them; all other noise is one process's.
DRAWN_BY_SHARDS = {
    "nn.functional.dropout",
    "nn.functional.alpha_dropout",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.multi_head_attention_forward",
}


def seeded(seed: int = 0) -> None:
    """The same random numbers on all ranks from here on."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace for a GPU that may come
    random.seed(seed)
    numpy.random.seed(seed)


@dataclass(frozen=True)
class Sample:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None = None  # of an entry that is a module; to be copied before it runs

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [leaf for leaf in tree_iter((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Entry:
    name: str
    family: str  # the name without the variant of its samples
    calls: dict[str, Callable[..., Any]]  # "function", "method", "in-place", ...
    has_out: bool
    dtypes: frozenset[torch.dtype]
    make: Callable[[torch.dtype], Iterable[Sample]]
    make_wrong: Callable[[], Iterable[Sample]]
    _made: dict[Any, list[Sample]] = field(default_factory=dict)

    @property
    def main(self) -> torch.dtype | None:
        """The dtype most samples are run in."""
        return next((dtype for dtype in MAIN if dtype in self.dtypes), None)

    def samples(self, dtype: torch.dtype) -> list[Sample]:
        """What torch tests this entry with; the same list in every process."""
        return self._kept(dtype, lambda: self.make(dtype))

    def wrong(self) -> list[Sample]:
        """Arguments that torch is meant to refuse."""
        return self._kept("wrong", self.make_wrong)

    def _kept(self, key: Any, make: Callable[[], Iterable[Sample]]) -> list[Sample]:
        if key not in self._made:
            seeded()
            made: list[Sample] = []
            with contextlib.suppress(Exception):  # some generators need what this build lacks (a GPU, a library)
                made += (s for s in itertools.islice(make(), MOST) if all(map(_is_strided, s.tensors())))
            self._made[key] = made
        return self._made[key]

    def forget(self) -> None:
        """Let the samples go."""
        self._made.clear()


def _is_strided(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.device.type == "cpu"


@lru_cache
def entries() -> dict[str, Entry]:
    """Every op and module of torch's database, by a name of its own."""
    _stand_in_for_expecttest()
    # Its helpers forbid a process to set torch.backends' flags, which later tests on these ranks do.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal import common_methods_invocations, common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db

    # It draws from one fixed seed and puts the random state back, which would hide what an op does to that state.
    common_methods_invocations.wrapper_set_seed = _called
    common_utils.extract_test_fn = lambda: None  # it walks the stack for a test case; none is there
    common_utils.set_rng_seed = lambda seed=None, **_: seeded(1234 if seed is None else seed)

    found: dict[str, Entry] = {}
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        found[name] = _op(name, info)
    for info in module_db:
        found[f"module {info.name}"] = _module(info)
    gc.freeze()  # so many objects make a collection slow
    return found


def _stand_in_for_expecttest() -> None:
    """Torch's test helpers derive from a class of this package and use no more of it here."""
    if importlib.util.find_spec("expecttest") is None:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub


def _called(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _op(name: str, info: Any) -> Entry:
    calls = {
        "function": info.op,
        "method": info.method_variant,
        "in-place": info.inplace_variant,
        "operator": info.operator_variant,
        "in-place operator": info.inplace_operator_variant,
    }
    for alias in info.aliases:
        calls |= {
            f"alias {alias.name}": alias.op,
            f"alias method {alias.name}": alias.method_variant,
            f"alias in-place {alias.name}_": alias.inplace_variant,
        }

    one_tensor = type(info).__name__ == "UnaryUfuncInfo"  # many have only samples of one dim: also as an image

    def make(dtype: torch.dtype) -> Iterator[Sample]:
        graph = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        for sample in info.sample_inputs("cpu", dtype, requires_grad=graph):
            yield Sample((sample.input, *sample.args), dict(sample.kwargs))
            if one_tensor and sample.input.dim() == 1 and sample.input.numel() % 4 == 0:
                image = sample.input.detach().reshape(1, 4, -1).requires_grad_(sample.input.requires_grad)
                yield Sample((image, *sample.args), dict(sample.kwargs))

    def make_wrong() -> Iterator[Sample]:
        for error in info.error_inputs("cpu") if info.error_inputs_func is not None else ():
            sample = error.sample_input
            yield Sample((sample.input, *sample.args), dict(sample.kwargs))

    callable_ones = {key: call for key, call in calls.items() if callable(call)}
    dtypes = frozenset(info.supported_dtypes("cpu"))
    return Entry(name, info.name, callable_ones, bool(info.supports_out), dtypes, make, make_wrong)


def _module(info: Any) -> Entry:
    def make(dtype: torch.dtype) -> Iterator[Sample]:
        for training in (True, False):
            graph = dtype.is_floating_point or dtype.is_complex
            for given in info.module_inputs_func(info, "cpu", dtype, requires_grad=graph, training=training):
                if given.forward_input is None:
                    continue
                seeded()
                module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
                module = module.to(dtype).train(training)
                yield Sample(given.forward_input.args, dict(given.forward_input.kwargs), module)

    dtypes = frozenset(info.supported_dtypes("cpu"))
    return Entry(f"module {info.name}", f"module {info.name}", {"function": _forward}, False, dtypes, make, lambda: ())


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def own_copy(sample: Sample) -> nn.Module | None:
    """The sample's module, copied, so that what a run changes stays with it."""
    return copy.deepcopy(sample.module)
