"""Python objects as bytes that ranks can send each other."""

import pickle
from typing import Any

import torch
from torch import Tensor


def pickled(value: Any) -> Tensor:
    """An object as (bytes + 8,) uint8, its length in front."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)


def unpickled(whole: Tensor, count: int) -> list[Any]:
    """The objects of `count` tensors of `pickled`, one after the other."""
    data, found, start = whole.numpy().tobytes(), [], 0
    for _ in range(count):
        length = int.from_bytes(data[start : start + 8], "little")
        found.append(pickle.loads(data[start + 8 : start + 8 + length]))
        start += 8 + length
    return found
