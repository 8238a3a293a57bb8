"""What forward leaves in attributes of a module that one stage alone runs, for those who read it afterwards.

The values go to the other stages with what stages say after a call. In the place of what cannot go (large or split
tensors, objects of the user's own), and of what each microbatch has made anew, stands one that refuses to be read.
"""

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullframe.errors import StrategyError
from fullframe.model.attributes import state_of_generator
from fullframe.ranks.stage_messages import telling_others
from fullframe.spatial.tensor import SpatialTensor
from fullframe.techniques.stages.attributes import CONTAINERS, GONE, PLAIN, ChangedAttribute

_LARGEST_BYTES = 65536  # of an attribute that is sent with each call
_KEPT = (list, set, deque, dict)  # those that others may hold, too, and see change
_ABOUT = (Tensor.as_subclass, Tensor.is_inference, Tensor._version.__get__)  # type: ignore[attr-defined]
_OPERATORS = (
    "add and bool bytes call contains delitem divmod eq float floordiv format ge getitem gt iadd iand imul index int "
    "invert ior ipow isub iter itruediv ixor le len lshift lt matmul mod mul ne neg next or pos pow radd rand rdivmod "
    "rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem sub truediv xor "
    "abs array array_ufunc complex str"
)


class Left(NamedTuple):
    """An attribute as its stage leaves it: its portable `value`, and `why` what stands in its place is not read."""

    value: Any
    varies: bool  # with each microbatch
    inside: bool  # of a list or dict that was there before
    why: str


class NotHere:
    """In the place of a value: raises StrategyError, told to the other stages, where it is used.

    `value` is the one that the stage itself goes on with, `kind` its class.
    """

    def __init__(self, why: str, kind: type = object, value: Any = GONE):
        vars(self).update(_why=why, _kind=kind, _value=value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What isinstance goes by."""
        return vars(self)["_kind"]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "spec":  # which tells split tensors apart
            raise AttributeError(name)
        _refuse(self)

    def __repr__(self) -> str:
        return f"<{vars(self)['_why']}>"

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: Any) -> "NotHere":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _of_pickle, tuple(vars(self).values())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        every = [*args, *(kwargs or {}).values()]
        every += [one for given in every if type(given) in (list, tuple) for one in given]
        _refuse(next(filter(_is_not_here, every)))


class _TensorNotHere(Tensor):
    """The same of a tensor, which torch's functions take for one."""

    __repr__ = NotHere.__repr__  # type: ignore[assignment]
    __hash__, __deepcopy__, __reduce_ex__ = NotHere.__hash__, NotHere.__deepcopy__, NotHere.__reduce_ex__
    __torch_function__ = NotHere.__torch_function__


def not_here(why: str, kind: type = object, value: Any = GONE) -> Any:
    """A stand-in for a value of this class."""
    if not issubclass(kind, Tensor):
        return NotHere(why, kind, value)
    made = torch.empty(0, device="meta").as_subclass(_TensorNotHere)
    vars(made).update(_why=why, _kind=Tensor, _value=value)
    return made


def _is_not_here(value: Any) -> bool:
    return type(value) in (NotHere, _TensorNotHere)


def _of_pickle(why: str, kind: type, value: Any) -> Any:
    """A saved model has what its stage went on with."""
    return not_here(why, kind) if value is GONE else value


def _refuse(one: Any, *_: Any, **__: Any) -> Any:
    with telling_others():
        raise StrategyError(vars(one)["_why"])


for _name in _OPERATORS.split():
    setattr(NotHere, f"__{_name}__", _refuse)


class _Sent(NamedTuple):
    """A tensor on its way."""

    tensor: Tensor  # on the host
    device: str


class _State(NamedTuple):
    """That of a generator of random numbers on its way."""

    state: Any


class _Unsent(NamedTuple):
    """What is of no use elsewhere, or too large."""

    kind: type


def left(changed: ChangedAttribute, path: str, stage: int, varies: bool) -> Left:
    """What this stage has in the attribute at `path` after a call. `varies`: each microbatch has made it anew."""
    value = vars(changed.module).get(changed.name, GONE)
    portable = GONE if value is GONE else _portable(value)
    if _is_too_large(portable):
        portable = _Unsent(_public(type(value)))
    return Left(portable, varies, changed.inside, _why(changed, path, stage, varies))


def _why(changed: ChangedAttribute, path: str, stage: int, varies: bool) -> str:
    kind = type(vars(changed.module).get(changed.name, GONE))
    why = f"on stage {stage} alone, to what is not sent to the others ({kind.__name__}), where it is read now"
    remedy = "keep a number or a small detached tensor, or leave out stages"
    if varies:
        why = "for each microbatch anew, of which a call has several, so one process's value is not known after them"
        remedy = "or use microbatches=1"
    return f"{type(changed.module).__name__} sets {path} in forward {why}; make it a part of the state, {remedy}"


def hide(changed: ChangedAttribute, path: str, stage: int) -> None:
    """What each microbatch has made anew cannot be read, until `put_back`."""
    anew = Left(GONE, True, changed.inside, _why(changed, path, stage, varies=True))
    put(changed.module, changed.name, anew, is_own=True)


def put(module: nn.Module, name: str, found: Left, is_own: bool) -> None:
    """Go on with what a stage, or this one, has left."""
    there = vars(module).get(name, GONE)
    if _is_not_here(there):
        there = vars(there)["_value"]
    if is_own:
        value = there
    elif found.value is GONE:
        value = GONE
    else:
        value = _unpacked(found.value, there if found.inside else None, found.why)
    if value is GONE:
        vars(module).pop(name, None)
    elif found.varies and not _is_not_here(value):
        vars(module)[name] = not_here(found.why, type(value), value)
    else:
        vars(module)[name] = value


def put_back(module: nn.Module) -> list[str]:
    """What this stage goes on with is there again; the names of the attributes."""
    own = vars(module)
    names = [name for name, one in own.items() if _is_not_here(one) and vars(one)["_value"] is not GONE]
    own.update((name, vars(own[name])["_value"]) for name in names)
    return names


def _portable(value: Any) -> Any:
    """The value for the way to other ranks."""
    if isinstance(value, PLAIN):
        return value
    if type(value) is Tensor or isinstance(value, nn.Parameter):
        if value.is_meta or value.layout != torch.strided or value.nbytes > _LARGEST_BYTES:
            return _Unsent(Tensor)
        return _Sent(value.detach().cpu().clone(), value.device.type)
    generator = state_of_generator(value)
    if generator is not None:
        return _State(generator[0]())
    if type(value) in CONTAINERS:
        return type(value)(map(_portable, value))
    if type(value) is dict:
        return {_portable(key): _portable(each) for key, each in value.items()}
    return _Unsent(_public(type(value)))


def _unpacked(found: Any, there: Any, why: str) -> Any:
    """As `_portable` got it; in the very container that is `there`, which others may hold."""
    if isinstance(found, _Sent):
        return found.tensor.to(found.device)
    if isinstance(found, _State):
        generator = state_of_generator(there)
        if generator is None:  # it was made in forward
            return not_here(why)
        generator[1](found.state)
        return there
    if isinstance(found, _Unsent):
        return not_here(why, found.kind)
    if type(found) is dict:
        found = {_unpacked(key, None, why): _unpacked(each, None, why) for key, each in found.items()}
    elif type(found) in CONTAINERS:
        found = type(found)(_unpacked(each, None, why) for each in found)
    if type(found) in _KEPT and type(there) is type(found):
        there.clear()
        add: Callable[[Any], Any] = there.extend if isinstance(there, (list, deque)) else there.update
        add(found)
        return there
    return found


def _is_too_large(portable: Any) -> bool:
    try:
        return len(pickle.dumps(portable)) > _LARGEST_BYTES
    except Exception:  # a word of a class that others cannot find
        return True


def _public(kind: type) -> type:
    """A class that other ranks can find, or `object`."""
    try:
        pickle.dumps(kind)
    except Exception:  # a class inside a function
        return object
    return Tensor if issubclass(kind, SpatialTensor) else kind
