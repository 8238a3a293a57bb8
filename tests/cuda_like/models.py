"""Networks and steps on the CUDA-like device, on one rank of a job whose messages go nowhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fullframe.model import parallelize
from fullframe.simulation.fake.replaced import replaced
from fullframe.simulation.fake.world import fake_job
from tests.cuda_like.device import to_device


def moved(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(to_device(parameter.detach()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = to_device(buffer)
    return model


@contextmanager
def one_rank(rank: int, ranks: int) -> Iterator[None]:
    """`fake_job`, in which a rank keeps its own random state, as nobody sends it another."""
    with fake_job(rank, ranks), replaced(parallelize, "share_random_states", lambda spatial, stages: None):
        yield
