"""How each library is used, as its documentation says: split an image, prepare a module, look at results.

`load` imports the library and raises ImportError where that is impossible; nothing else here imports it.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

RANKS = 2


class Library(Protocol):
    """One way to split; made on a rank, after the process group."""

    def split(self, full: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        """`full` split along its last dim, and a function for this rank's part of its gradient."""

    def prepare(self, module: nn.Module) -> Callable[..., Any]:
        """The module ready for split tensors; its parameters stay reachable in `module`."""

    def whole(self, output: Any) -> Tensor:
        """The full output on every rank, differentiable."""

    def local(self, output: Any) -> Tensor:
        """What this rank holds of an output, differentiable; nothing is sent but what the output still owes."""

    def settle(self, module: nn.Module) -> None:
        """What is owed after backward until the gradients are those of the whole image."""

    def plain(self, value: Tensor) -> Tensor:
        """A parameter's gradient or a buffer as a plain tensor."""


def columns(full: Tensor) -> Tensor:
    """This rank's part, cut as `torch.chunk` does."""
    return full.chunk(RANKS, -1)[dist.get_rank()].contiguous()


def leaf(value: Tensor) -> Tensor:
    """A copy to take the gradient of."""
    return value.clone().requires_grad_(value.is_floating_point())


class Fullframe:
    """This project."""

    def __init__(self) -> None:
        import fullframe as ff

        self.ff = ff
        self.mesh = ff.init_mesh(width=RANKS)

    def split(self, full: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        whole = leaf(full)

        def gradient() -> Tensor:
            assert whole.grad is not None, "no gradient arrived at the image"
            dist.all_reduce(whole.grad)  # the gradient is the mean over the ranks
            return columns(whole.grad / RANKS)

        return self.ff.shard(whole, self.mesh).contiguous(), gradient

    def prepare(self, module: nn.Module) -> Callable[..., Any]:
        return self.ff.parallelize(module, self.mesh)

    def whole(self, output: Any) -> Tensor:
        return self.ff.full(output)

    def local(self, output: Any) -> Tensor:
        return output.local if isinstance(output, self.ff.SpatialTensor) else output

    def settle(self, module: nn.Module) -> None:
        """Nothing: DDP has done it during backward."""

    def plain(self, value: Tensor) -> Tensor:
        return value


class DTensors:
    """torch's DTensor; a convolution borrows along the width in its tensor-parallel handler."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DTensor, Shard, distribute_module

        self.kind, self.shard, self.distribute = DTensor, Shard, distribute_module
        self.mesh = init_device_mesh("cpu", (RANKS,))

    def split(self, full: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        part = leaf(columns(full))
        place = [self.shard(full.ndim - 1)]
        split = self.kind.from_local(part, self.mesh, place, shape=full.shape, stride=full.stride())
        return split, lambda: arrived(part)

    def prepare(self, module: nn.Module) -> Callable[..., Any]:
        return self.distribute(module, self.mesh)

    def whole(self, output: Any) -> Tensor:
        return output.full_tensor() if isinstance(output, self.kind) else output

    def local(self, output: Any) -> Tensor:
        return held(output) if isinstance(output, self.kind) else output

    def settle(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if isinstance(parameter.grad, self.kind):
                parameter.grad.full_tensor()

    def plain(self, value: Tensor) -> Tensor:
        return self.whole(value)


class ShardTensors:
    """NVIDIA PhysicsNeMo's ShardTensor; parameters stay plain tensors."""

    def __init__(self) -> None:
        from physicsnemo.domain_parallel import ShardTensor
        from torch.distributed.tensor import Shard

        self.kind, self.shard = ShardTensor, Shard
        self.mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("domain",))

    def split(self, full: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        part = leaf(columns(full))
        place = [self.shard(full.ndim - 1)]
        split = self.kind.from_local(part, self.mesh, place, sharding_shapes="chunk", global_shape=tuple(full.shape))
        return split, lambda: arrived(part)

    def prepare(self, module: nn.Module) -> Callable[..., Any]:
        return module

    def whole(self, output: Any) -> Tensor:
        return output.full_tensor() if isinstance(output, self.kind) else output

    def local(self, output: Any) -> Tensor:
        return held(output) if isinstance(output, self.kind) else output

    def settle(self, module: nn.Module) -> None:
        """Nothing: every convolution has reduced its weight's gradient during backward."""

    def plain(self, value: Tensor) -> Tensor:
        return self.whole(value)


class DistConv:
    """LLNL DistConv; parameters under its own DDP."""

    def __init__(self) -> None:
        from distconv import DCTensor, ParallelStrategy
        from distconv.ddp import DistConvDDP

        self.kind, self.wrapper = DCTensor, DistConvDDP
        self.strategy = ParallelStrategy(num_shards=RANKS, shard_dim=3, device_type="cpu")

    def split(self, full: Tensor) -> tuple[Any, Callable[[], Tensor]]:
        part = leaf(columns(full))
        return self.kind.from_shard(part, self.strategy), lambda: arrived(part)

    def prepare(self, module: nn.Module) -> Callable[..., Any]:
        if not any(True for _ in module.parameters()):
            return module
        return self.wrapper(module, parallel_strategy=self.strategy)

    def whole(self, output: Any) -> Tensor:
        return output.to_replicate() if isinstance(output, self.kind) else output

    def local(self, output: Any) -> Tensor:
        return output

    def settle(self, module: nn.Module) -> None:
        """Nothing: its DDP has done it during backward."""

    def plain(self, value: Tensor) -> Tensor:
        return value


def held(output: Any) -> Tensor:
    """The local part; a sum over the ranks that was put off is done now."""
    from torch.distributed.tensor import Replicate

    if any(place.is_partial() for place in output.placements):
        output = output.redistribute(placements=[Replicate() if p.is_partial() else p for p in output.placements])
    return output.to_local()


def arrived(part: Tensor) -> Tensor:
    """The gradient, which must be there."""
    if part.grad is None:
        raise ValueError("no gradient arrived at the image")
    return part.grad


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for what a library imports but does not need here, and only where the real one is missing."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load_nothing() -> None:
    """Part of torch, or this project."""


def load_physicsnemo() -> None:
    """On a machine without CUDA the library leaves its ops unregistered; they are registered here."""
    absent = Absent(("s3fs", "timm", "torchvision"))
    sys.meta_path.append(absent)
    try:
        from physicsnemo.domain_parallel import register_custom_ops

        register_custom_ops()
    finally:  # others, such as transformers, ask whether these are installed
        sys.meta_path.remove(absent)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]


def load_distconv() -> None:
    """Its tensors and its DDP are imported separately."""
    importlib.import_module("distconv")
    importlib.import_module("distconv.ddp")


OURS = "fullframe"
LIBRARIES: dict[str, tuple[Callable[[], None], Callable[[], Library]]] = {
    OURS: (load_nothing, Fullframe),
    "torch DTensor": (load_nothing, DTensors),
    "PhysicsNeMo ShardTensor": (load_physicsnemo, ShardTensors),
    "LLNL DistConv": (load_distconv, DistConv),
}


def loaded() -> dict[str, str | None]:
    """Each library, and why it cannot be used where it cannot."""
    found: dict[str, str | None] = {}
    for name, (load, _) in LIBRARIES.items():
        try:
            load()
        except ImportError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = None
    return found
