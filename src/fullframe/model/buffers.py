"""A module's buffers, replaced by copies for a while: whatever is written to them then is forgotten."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

Buffer = tuple[nn.Module, str, Tensor]


def buffers_of(module: nn.Module) -> list[Buffer]:
    """Every buffer with the module that has it and its name there."""
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]


def borrow_buffers(module: nn.Module, values: Mapping[tuple[nn.Module, str], Tensor]) -> list[Buffer]:
    """Put copies in place of the buffers, of `values` where those have one; what was there, for `return_buffers`."""
    there = buffers_of(module)
    copies: dict[int, Tensor] = {}  # a buffer that two modules share stays shared
    for owner, name, buffer in there:
        if id(buffer) not in copies:
            copies[id(buffer)] = values.get((owner, name), buffer).detach().clone()
        owner._buffers[name] = copies[id(buffer)]
    return there


def return_buffers(there: Sequence[Buffer]) -> None:
    """Put back what was there before `borrow_buffers`."""
    for owner, name, buffer in there:
        owner._buffers[name] = buffer
