"""The process's random states (torch, its GPU, numpy, random): kept, put back, and seeded for one sample."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fullframe.ranks import device

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """Every random state of this process, in types that `torch.load(weights_only=True)` reads."""
    numpy: Any = np.random.get_state(legacy=False)
    words = numpy["state"]
    return {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {"key": words["key"].tolist(), "pos": words["pos"]}},
        "torch": torch.get_rng_state(),
        "device": device.random_state(),
    }


def set_random_state(state: RandomState) -> None:
    """Put back what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    device.set_random_state(state["device"])


def seed_everything(seed: int) -> None:
    """Set every random state of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device.accelerator() is None:
        torch.default_generator.manual_seed(seed)  # the other keeps a traceback for each device that is not there
    else:
        torch.manual_seed(seed)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn inside leaves the states outside as they were."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


@contextmanager
def sample_randomness(*numbers: int) -> Iterator[None]:
    """Inside, the CPU's random states follow from `numbers` alone; outside they are as before."""
    # Not random_state(): this runs once a sample, and a sample must not touch the GPU's generator.
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = mixed_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def mixed_seed(*numbers: int) -> int:
    """A 63-bit seed from whole numbers; close numbers give unrelated seeds, on every machine the same."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
