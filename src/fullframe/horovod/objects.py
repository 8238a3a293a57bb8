"""Python objects as bytes that ranks can send each other."""

import pickle
from typing import Any

import torch
from torch import Tensor

from fullframe.horovod.exceptions import RequestError


def pickled(value: Any) -> Tensor:
    """An object as (bytes + 8,) uint8, its length in front.

    Where it cannot be pickled, why, with a length below 0: all ranks raise it, as the others would wait for ever.
    """
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        length = len(data)
    except Exception as error:  # whatever the object's own methods raise
        said = f"an object of class {type(value).__name__} cannot be sent: {type(error).__name__}: {error}"
        data = said.encode(errors="replace")
        length = -len(data)
    return torch.frombuffer(bytearray(length.to_bytes(8, "little", signed=True) + data), dtype=torch.uint8)


def unpickled(whole: Tensor, count: int) -> list[Any]:
    """The objects of `count` tensors of `pickled`, one after the other; RequestError where one could not be pickled."""
    found, start = [], 0
    for _ in range(count):
        data = checked(whole[start:])
        found.append(pickle.loads(data))
        start += 8 + len(data)
    return found


def checked(whole: Tensor) -> memoryview:
    """The bytes of the first object in what `pickled` gave; RequestError where it could not be pickled."""
    data = memoryview(whole.numpy().data)
    length = int.from_bytes(data[:8], "little", signed=True)
    if length < 0:
        said = bytes(data[8 : 8 - length]).decode()
        raise RequestError(f"{said}; give what can be pickled, such as a state_dict()")
    return data[8 : 8 + length]
