"""What is replaced in torch is torch's own again afterwards, also when something was raised meanwhile."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fullframe.simulation.fake.replaced import replaced, replaced_kernels, silenced


def test_an_attribute_is_put_back() -> None:
    owner = SimpleNamespace(number=1)
    with pytest.raises(RuntimeError), replaced(owner, "number", 2):
        assert owner.number == 2
        raise RuntimeError
    assert owner.number == 1


def test_what_a_base_has_is_not_left_on_the_class() -> None:
    with replaced(Tensor, "numpy", None):
        assert torch.ones(2).numpy is None
    assert "numpy" not in vars(Tensor) and torch.ones(2).numpy().tolist() == [1, 1]


def test_a_kernel_is_put_back() -> None:
    def twice(x: Tensor) -> Tensor:
        return x + x

    x = torch.tensor([-1.0, 3.0])
    with pytest.raises(RuntimeError), replaced_kernels("AutogradCPU", {"selu": twice}):
        assert torch.selu(x).tolist() == [-2.0, 6.0]
        raise RuntimeError
    assert torch.selu(x)[0] > -2.0


def test_a_logger_speaks_again(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("of a test")
    with pytest.raises(RuntimeError), silenced("of a test"):
        logger.error("inside")
        raise RuntimeError
    logger.error("outside")
    assert caplog.messages == ["outside"]
