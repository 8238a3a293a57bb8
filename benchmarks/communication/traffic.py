"""Bytes this rank hands to communication calls, counted where all of them pass: torch's dispatcher.

DDP's buckets, functional collectives and point-to-point messages end in the same ops, whoever calls them from Python
or from C++. What is counted is what is handed in to be sent: a message, this rank's part of a gather, a whole tensor
of a reduction; not what an algorithm makes of it on the wire.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullframe.ranks import collectives, exchange

MESSAGES, GATHERS, REDUCTIONS, BROADCASTS = "messages", "gathers", "reductions", "broadcasts"


class Sent(NamedTuple):
    """One call: its kind, the bytes handed in, and the name of the process group."""

    kind: str
    bytes: int
    group: str


# Op name -> kind, and which argument holds what is sent.
CLASSIC = {
    "send": (MESSAGES, 0),
    "alltoall_": (MESSAGES, 1),
    "alltoall_base_": (MESSAGES, 1),
    "scatter_": (MESSAGES, 1),
    "allgather_": (GATHERS, 1),
    "_allgather_base_": (GATHERS, 1),
    "allgather_coalesced_": (GATHERS, 1),
    "allgather_into_tensor_coalesced_": (GATHERS, 1),
    "gather_": (GATHERS, 1),
    "allreduce_": (REDUCTIONS, 0),
    "allreduce_coalesced_": (REDUCTIONS, 0),
    "reduce_": (REDUCTIONS, 0),
    "reduce_scatter_": (REDUCTIONS, 1),
    "_reduce_scatter_base_": (REDUCTIONS, 1),
    "reduce_scatter_tensor_coalesced_": (REDUCTIONS, 1),
}
FUNCTIONAL = {
    "isend": MESSAGES,
    "all_to_all_single": MESSAGES,
    "all_gather_into_tensor": GATHERS,
    "all_gather_into_tensor_coalesced": GATHERS,
    "all_reduce": REDUCTIONS,
    "all_reduce_": REDUCTIONS,
    "all_reduce_coalesced": REDUCTIONS,
    "reduce_scatter_tensor": REDUCTIONS,
    "reduce_scatter_tensor_coalesced": REDUCTIONS,
}
SILENT = {"recv_", "recv_any_source_", "irecv", "barrier", "monitored_barrier_", "check_for_nan"}
SILENT |= {"wait_tensor", "_wrap_tensor_autograd"}


class Traffic(TorchDispatchMode):
    """Records what is sent while it is active, in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Sent] = []

    def total(self, *kinds: str) -> int:
        """Bytes of these kinds, of all when none is named."""
        return sum(call.bytes for call in self.calls if not kinds or call.kind in kinds)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        strange = [kind for kind in types if kind not in (Tensor, nn.Parameter)]
        if strange and not any(issubclass(kind, FakeTensor) for kind in strange):
            return NotImplemented  # the subclass goes first: the calls it makes come back here
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls += sent_by(func.namespace, func._schema.name.split("::")[1], args, kwargs)
        return func(*args, **kwargs)


def sent_by(namespace: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Sent]:
    """What one call hands in; nothing for a call that only receives."""
    if name in SILENT:
        return
    if namespace == "_c10d_functional":
        if name not in FUNCTIONAL:
            raise ValueError(f"{namespace}.{name} is not known to the count of bytes; add it to FUNCTIONAL")
        yield Sent(FUNCTIONAL[name], nbytes(args[0]), str(args[-1]))
        return
    group = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.ScriptObject))
    unboxed = dist.ProcessGroup.unbox(group)
    if name == "broadcast_":
        if args[2] == unboxed.rank():
            yield Sent(BROADCASTS, nbytes(args[0]), unboxed.group_name)
        return
    if name not in CLASSIC:
        raise ValueError(f"{namespace}.{name} is not known to the count of bytes; add it to CLASSIC")
    kind, position = CLASSIC[name]
    yield Sent(kind, nbytes(args[position]), unboxed.group_name)


def nbytes(tensors: Any) -> int:
    """Bytes of all tensors in nested lists."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


@contextmanager
def by_process_groups() -> Iterator[Traffic]:
    """What this rank sends meanwhile, all of it by the process groups and nothing through mailboxes."""
    with (
        mock.patch.object(exchange, "fits", lambda tensor: False),
        mock.patch.object(collectives, "fits", lambda tensor: False),
        Traffic() as traffic,
    ):
        yield traffic


def counted(step: Callable[[], object]) -> Traffic:
    """What one call of `step` sends from this rank."""
    with by_process_groups() as traffic:
        step()
    return traffic
