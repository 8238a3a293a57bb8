"""Numbers that are sent to a device once."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fullframe.ranks.constants import constant

CPU = torch.device("cpu")


def test_it_is_made_once_and_serves_in_training_whoever_asked_first() -> None:
    with torch.inference_mode():
        made = constant((1.0, 2.5), torch.float64, CPU)
    assert made.tolist() == [1.0, 2.5] and made.dtype == torch.float64 and not made.is_inference()
    assert constant((1.0, 2.5), torch.float64, CPU) is made
    assert constant((1.0, 2.5), torch.float32, CPU).dtype == torch.float32
    assert constant(((1, 2), (3, 4)), torch.int64, CPU).tolist() == [[1, 2], [3, 4]]


def test_a_simulation_keeps_none_and_is_given_none() -> None:
    real = constant((3.5,), torch.float32, CPU)
    with FakeTensorMode():
        assert isinstance(constant((3.5,), torch.float32, CPU), FakeTensor)
        assert isinstance(constant((4.5,), torch.float32, CPU), FakeTensor)
    assert not isinstance(constant((4.5,), torch.float32, CPU), FakeTensor)
    assert constant((3.5,), torch.float32, CPU) is real
