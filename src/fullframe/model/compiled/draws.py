"""Random functions of torch in a block that is captured: drawn by the recorder, in the order of the program."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fullframe.ranks.operators import GraphRecorder
from fullframe.ranks.recording import NotCapturable

_aten = torch.ops.aten
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_FILLS = (_aten.uniform_.default, _aten.normal_.default)
_NEW = {_aten.rand.default: "uniform_", _aten.randn.default: "normal_"}
_LIKE = {_aten.rand_like.default: "uniform_", _aten.randn_like.default: "normal_"}


class Watched(TorchDispatchMode):
    """The ops of a capture: those that draw random numbers go to the recorder, or the block cannot be captured.

    `read` are the ids of all tensors that ops were given, `constants` those that are no fake ones: they are in the
    graph, as they are now; fake ones of another mode than `fake` are left of another capture. `recomputes` says that
    something inside is recomputed, which would draw other numbers.
    """

    def __init__(self, by: GraphRecorder, fake: FakeTensorMode | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self._by, self._fake = by, fake
        self.read: set[int] = set()
        self.constants: dict[int, Tensor] = {}
        self.recomputes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hooks = _top_hooks(True)
        if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
            self.recomputes = True  # nothing may be raised here, between the hooks
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.read.add(id(leaf))
                if isinstance(leaf, FakeTensor) and self._fake is not None and leaf.fake_mode is not self._fake:
                    raise NotCapturable("it keeps a tensor from one call to the next, where that cannot be seen")
                if type(leaf) in (Tensor, nn.Parameter, nn.Buffer) and not isinstance(leaf, FakeTensor):
                    if leaf.requires_grad:
                        raise NotCapturable(f"{func} reads a tensor with a gradient that is none of its parameters")
                    self.constants[id(leaf)] = leaf
                    if self._fake is not None and _writes_to(func, leaf, args, kwargs):
                        raise NotCapturable("it writes to a tensor that is none of its parameters and buffers")
        if torch.Tag.nondeterministic_seeded not in func.tags or func.namespace != "aten":
            return func(*args, **kwargs)
        if _option(func, "dropout_p", args, kwargs) == 0:  # attention, which then draws nothing
            return func(*args, **kwargs)
        drawn = None if kwargs.get("generator") is not None else self._drawn(func, args, kwargs)
        if drawn is None:
            raise NotCapturable(f"it draws random numbers by {func}")
        return drawn

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        dtype, device = kwargs.get("dtype"), kwargs.get("device") or torch.device("cpu")
        if func in _NEW:
            return self._by.draw(_NEW[func], args[0], dtype or torch.get_default_dtype(), device, 0.0, 1.0)
        if func in _LIKE:
            like = args[0]
            return self._by.draw(_LIKE[func], like.shape, dtype or like.dtype, like.device, 0.0, 1.0)
        if func is _aten.randint.default or func is _aten.randint.low:
            low = 0 if func is _aten.randint.default else args[0]
            high, size = args[-2], args[-1]
            return self._by.draw("randint", size, dtype or torch.int64, device, low, high)
        if func is _aten.randperm.default:
            return self._by.draw("randperm", [args[0]], dtype or torch.int64, device, 0, 0)
        if func in (_aten.bernoulli_.float, _aten.bernoulli.p):
            x, p = args[0], args[1] if len(args) > 1 else 0.5
            drawn = self._by.draw("bernoulli_", x.shape, x.dtype, x.device, p, 0)
            return x.copy_(drawn) if func is _aten.bernoulli_.float else drawn
        if func in _FILLS:
            x = args[0]
            a = args[1] if len(args) > 1 else 0.0
            b = args[2] if len(args) > 2 else 1.0
            return x.copy_(self._by.draw(func.overloadpacket.__name__, x.shape, x.dtype, x.device, a, b))  # type: ignore[no-any-return]
        return None


def _writes_to(func: Any, tensor: Tensor, args: Any, kwargs: Any) -> bool:
    if not func._schema.is_mutable:
        return False
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[n] if n < len(args) else kwargs.get(argument.name)
            if any(leaf is tensor for leaf in tree_iter(given)):
                return True
    return False


def _option(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    for n, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[n] if n < len(args) else kwargs.get(name, argument.default_value)
    return None


_ASKED_BY_HAND = {
    Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, Tensor.requires_grad_,
    Tensor.backward, torch.autograd.grad, torch.autograd.backward, Tensor.tolist, Tensor.numpy, Tensor.__array__,
    Tensor.data_ptr,
}  # fmt: skip
_of_tensor: Any = Tensor
_BESIDE_ITS_NUMBERS = {
    _of_tensor.data.__set__: "data", _of_tensor.requires_grad.__set__: "requires_grad",
    _of_tensor.grad.__get__: "grad", _of_tensor.grad.__set__: "grad", _of_tensor.grad.__delete__: "grad",
    _of_tensor.is_leaf.__get__: "is_leaf", _of_tensor._version.__get__: "_version",
}  # fmt: skip


class NothingByHand(TorchFunctionMode):
    """Gradients that are asked for inside a block, by hooks or at once, are none that a graph can give.

    Nor what a tensor is beside its numbers, or numbers that are read past torch's ops.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED_BY_HAND:
            raise NotCapturable(f"it calls {getattr(func, '__name__', func)}")
        if func in _BESIDE_ITS_NUMBERS:
            raise NotCapturable(f"it reads or sets {_BESIDE_ITS_NUMBERS[func]} of a tensor")
        return func(*args, **(kwargs or {}))
