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


def python_states() -> tuple[Any, Any]:
    """The states of Python's and numpy's generators, which torch's own checkpoint does not know."""
    return random.getstate(), np.random.get_state()


def set_python_states(states: tuple[Any, Any]) -> None:
    """Put back what `python_states` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])


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
    before, of_torch = python_states(), torch.get_rng_state()
    seed = mixed_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_python_states(before)
        torch.set_rng_state(of_torch)


def mixed_seed(*numbers: int) -> int:
    """A 63-bit seed from whole numbers; close numbers give unrelated seeds, on every machine the same."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
