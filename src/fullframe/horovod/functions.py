"""One rank's parameters, optimizer state and objects, made everybody's."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.horovod.context import world
from fullframe.horovod.handles import synchronize
from fullframe.horovod.movements import allgather, broadcast, broadcast_async_
from fullframe.horovod.objects import checked, pickled, unpickled
from fullframe.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with those of rank `root_rank`: a `state_dict()`, `named_parameters()` or `parameters()`.

    What is no tensor is left as it is. Raises ValueError for anything else.
    """
    world()
    if isinstance(params, Mapping):
        named = list(params.items())
    elif isinstance(params, Tensor | str) or not hasattr(params, "__iter__"):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        named = [item if isinstance(item, tuple) else (str(number), item) for number, item in enumerate(params)]
    handles = [
        broadcast_async_(value.detach(), root_rank, f"broadcast_parameters.{name}", process_set)
        for name, value in named
        if isinstance(value, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the optimizer state and options of rank `root_rank`, also where only that one has any.

    `model` is there for Horovod's sake. Raises ValueError for LBFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    is_root = world().rank == root_rank
    skeleton, tensors = _skeleton(state) if is_root else (None, [])
    forms = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    skeleton, forms = broadcast_object((skeleton, forms), root_rank, "optimizer_state", process_set)
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    if not is_root:
        places = [device if kind == "cuda" else torch.device("cpu") for _, _, kind in forms]
        tensors = [torch.empty(s, dtype=dtype, device=d) for (s, dtype, _), d in zip(forms, places, strict=True)]
    named = [(f"optimizer.{number}", tensor) for number, tensor in enumerate(tensors)]
    broadcast_parameters(named, root_rank, process_set)
    if not is_root:
        sent = tree_map_only(_Slot, lambda slot: tensors[slot], skeleton)
        optimizer.load_state_dict(sent)
        _keep_dtypes(optimizer, sent["state"])


def _keep_dtypes(optimizer: torch.optim.Optimizer, states: dict[int, Any]) -> None:
    """State as the root has it, which `load_state_dict` casts to the parameters' dtype (a master copy in fp32)."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        own = optimizer.state[parameters[number]]
        for key, value in state.items():
            if isinstance(value, Tensor) and own[key].dtype != value.dtype:
                own[key] = value


class _Slot(int):
    """Where a tensor stands in what is sent."""


def _skeleton(state: Any) -> tuple[Any, list[Tensor]]:
    """A state dict without its tensors, and these; contiguous, as they are written from afar."""
    tensors: list[Tensor] = []

    def without(tensor: Tensor) -> _Slot:
        tensors.append(tensor.detach().contiguous())
        return _Slot(len(tensors) - 1)

    return tree_map_only(Tensor, without, state), tensors


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank `root_rank`; the root gets its own back. RequestError on all where it cannot be pickled."""
    label = f"broadcast_object.{name}" if name else ""
    is_root = world().rank == root_rank
    data = pickled(obj) if is_root else torch.zeros(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([data.numel()], device="cpu")
    length = broadcast(size, root_rank, label and f"{label}.length", process_set)
    if not is_root:
        data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    received = broadcast(data, root_rank, label or None, process_set)
    if is_root:
        checked(received)
        return obj
    return unpickled(received, 1)[0]


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` with everything but the object given."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, by rank. RequestError on all where one cannot be pickled."""
    whole = allgather(pickled(obj), f"allgather_object.{name}" if name else None, process_set)
    return unpickled(whole, process_set.size() or 1)
