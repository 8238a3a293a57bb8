"""The modules that a program trains: seen as they are called from outside any other module, and named."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from fullframe.data.nested import tensors_in
from fullframe.doctor.probes.sketches import part_of

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "ParallelModel", "DeepSpeedEngine", "DataParallel")


@dataclass
class _Quiet:
    """A pass in training mode without gradients, or in eval mode with some."""

    parameters: set[int]  # ids of the trained ones
    text: str
    where: str
    is_followed: bool = False  # by a pass with gradients of another model that is trained


class Modules:
    """Watches calls; `oddity(kind, text, where)` is told what a call alone shows."""

    def __init__(self, oddity: Callable[[str, str, str], None]):
        self._oddity = oddity
        self._roots: list[weakref.ref[nn.Module]] = []
        self._known: set[int] = set()
        self._depth = 0
        self._unused: _Quiet | None = None  # the last pass in eval mode with a graph that nobody has used so far
        self._quiet: list[_Quiet] = []  # of which it is not known yet whether they were evaluations
        self.in_backward = False
        # Batch norms that a batch came to in backward: the tensor that counted it, and what it had counted before.
        self._recomputed: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}
        # Batch norms that have taken statistics of a batch, and whether their weights were ever to be trained.
        self._norms: weakref.WeakKeyDictionary[_BatchNorm, bool] = weakref.WeakKeyDictionary()
        self._fed: set[int] = set()  # ids of convolutions whose first input was looked at
        self.trained: set[int] = set()  # ids of parameters that optimizers hold

    def attach(self) -> list[Any]:
        """Start to watch; what ends it."""
        return [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def roots(self) -> list[nn.Module]:
        """Modules that were called from outside and that no other of them holds."""
        found = [module for reference in self._roots if (module := reference()) is not None]
        inner = {id(child) for module in found for child in module.modules() if child is not module}
        return [module for module in found if id(module) not in inner]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the roots; wrappers' `module.` is left out. Sharded ones name their part."""
        taken: set[str] = set()
        for number, root in enumerate(self.roots()):
            plain = unwrapped(root)
            for name, parameter in plain.named_parameters():
                name = name.replace("_orig_mod.", "")
                if name in taken:
                    name = f"{type(plain).__name__}{number}.{name}"
                taken.add(name)
                yield name + part_of(parameter), parameter

    def unwrapped_classes(self) -> tuple[str, ...]:
        """Classes of the roots with trainable parameters that no data parallel wrapper holds, nor its hooks."""
        loose = (root for root in self.roots() if not _is_wrapped(root))
        return tuple(type(root).__name__ for root in loose if any(p.requires_grad for p in root.parameters()))

    def evaluating(self) -> tuple[str, ...]:
        """Trained roots in eval mode which have layers that then do something else."""
        return tuple(
            type(unwrapped(root)).__name__
            for root in self.roots()
            if not unwrapped(root).training
            and any(id(p) in self.trained for p in root.parameters())
            and any(_depends_on_mode(module) for module in root.modules())
        )

    def synchronizes(self) -> bool:
        """Whether a pass of backward that begins now averages gradients, where a DDP is in use."""
        found = [root for root in self.roots() if isinstance(root, DistributedDataParallel)]
        return all(bool(root.require_backward_grad_sync) for root in found)

    def counted_again(self) -> tuple[str, ...]:
        """Batch norms that have counted a batch in the backward pass that ends now; forgotten with the answer.

        Where a recompute gives a norm a copy to count in, as `--recompute` does, its own has not counted it.
        """
        found = [
            module
            for module, (counter, before) in self._recomputed.items()
            if module.num_batches_tracked is counter and counter != before
        ]
        self._recomputed.clear()
        return tuple(self.name_of(module) for module in found)

    def frozen_norms(self) -> tuple[str, ...]:
        """Batch norms whose weights were frozen in every pass, and whose statistics went on moving."""
        return tuple(self.name_of(module) for module, learns in self._norms.items() if not learns)

    def used(self) -> None:
        """A backward pass has used what was computed."""
        self._unused = None
        self._quiet = [each for each in self._quiet if not each.is_followed]  # a generator's, for its critic's step

    def ended(self) -> None:
        """No more calls will be seen."""
        self._say_evaluations(self._quiet)
        self._say_unused()

    def name_of(self, wanted: nn.Module) -> str:
        """The path of a module."""
        for root in self.roots():
            for name, module in unwrapped(root).named_modules():
                if module is wanted:
                    return name or type(wanted).__name__
        return type(wanted).__name__

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if isinstance(module, _BatchNorm):
            self._look_at_batch_norm(module, inputs)
        if isinstance(module, _ConvNd) and module.training and id(module) not in self._fed:
            self._look_at_pixels(module, inputs)
        if not self._depth and not self.in_backward:
            self._from_outside(module)
        self._depth += 1

    def _from_outside(self, module: nn.Module) -> None:
        if id(module) not in self._known and next(module.parameters(), None) is not None:
            self._known.add(id(module))
            self._roots.append(weakref.ref(module))
        if self._unused is not None and module.training and self._unused.parameters & self._trained_of(module):
            self._say_unused()  # it was no part of a step, as both passes of a pair are
        if self._quiet or not torch.is_grad_enabled():
            self._look_at_evaluation(module)

    def _look_at_evaluation(self, module: nn.Module) -> None:
        """One in training mode is told of, unless what it gave went into another model's step."""
        trained = self._trained_of(module)
        self._say_evaluations([each for each in self._quiet if each.parameters & trained])
        if torch.is_grad_enabled():
            for each in self._quiet:
                each.is_followed |= bool(trained)
        elif module.training and self._is_trained(module):
            norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
            if norms:
                self._quiet.append(_Quiet(trained, type(unwrapped(module)).__name__, self.name_of(norms[0])))

    def _trained_of(self, module: nn.Module) -> set[int]:
        return {id(p) for p in module.parameters()} & self.trained

    def _say_unused(self) -> None:
        if self._unused is not None:
            self._oddity("evaluation keeps a graph", self._unused.text, self._unused.where)
            self._unused = None

    def _say_evaluations(self, found: list[_Quiet]) -> None:
        self._quiet = [each for each in self._quiet if each not in found]
        for each in found:
            self._oddity("statistics of evaluation", each.text, each.where)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth or self.in_backward or unwrapped(module).training or not self._is_trained(module):
            return
        if any(tensor.requires_grad for tensor in tensors_in(output)):
            self._unused = _Quiet(self._trained_of(module), type(unwrapped(module)).__name__, "")

    def _is_trained(self, module: nn.Module) -> bool:
        return any(id(p) in self.trained and p.requires_grad for p in module.parameters())

    def _look_at_batch_norm(self, module: _BatchNorm, inputs: Any) -> None:
        if not module.training:
            return
        if module.affine and module.track_running_stats:
            self._norms[module] = self._norms.get(module, False) or module.weight.requires_grad
        counted = module.num_batches_tracked
        if self.in_backward and module.track_running_stats and counted is not None:
            self._recomputed.setdefault(module, (counted, counted.clone()))
        found = None if isinstance(module, nn.SyncBatchNorm) else next(tensors_in(inputs), None)
        if found is not None and found.dim() > 1 and torch.is_grad_enabled():
            values = found.numel() // max(found.shape[1], 1)
            if values < _FEW_VALUES:
                self._oddity("few values in a batch norm", f"{values}", self.name_of(module))

    def _look_at_pixels(self, module: _ConvNd, inputs: Any) -> None:
        """Tell of an image as a file has it: a mask or a table of whole numbers has fewer of them."""
        found = next(tensors_in(inputs), None)
        if isinstance(found, FakeTensor) or (found is not None and found.is_meta):  # stages look at shapes first
            return
        self._fed.add(id(module))
        if found is None or found.requires_grad or not found.is_floating_point() or not found.numel():
            return
        values = getattr(found, "local", found).detach()[:1].float()  # of the first sample, this rank's part
        least, most = (float(value) for value in values.aminmax())
        if least < 0 or not _BRIGHT <= most <= 255 or not bool((values == values.round()).all()):
            return
        if len(values.unique()) >= _SHADES:
            text = f"whole numbers from {least:.0f} to {most:.0f}, {float(values.mean()):.0f} on average"
            self._oddity("pixels as bytes", text, self.name_of(module))


_FEW_VALUES = 16
_BRIGHT, _SHADES = 100, 64  # the largest value, and how many different ones, of an image in bytes at the least


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of data parallel training and of torch.compile."""
    while True:
        inner = module._modules.get("module") if type(module).__name__ in _WRAPPERS else None
        inner = inner or module._modules.get("_orig_mod")
        if inner is None:
            return module
        module = inner


def wrapper_of(module: nn.Module) -> str:
    """The class that averages this module's gradients over ranks; "" where none does."""
    if type(module).__name__ in _WRAPPERS:
        return type(module).__name__
    if any(type(part).__name__.startswith("FSDP") for part in module.modules()):
        return "fully_shard"
    return ""


def _is_wrapped(module: nn.Module) -> bool:
    return bool(wrapper_of(module)) or any(bool(part_of(p)) for p in module.parameters())


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return bool(module.track_running_stats)
    return isinstance(module, _DropoutNd) and module.p > 0
