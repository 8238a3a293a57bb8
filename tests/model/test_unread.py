"""A stand-in that nobody may read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fullframe.errors import StrategyError
from fullframe.model.unread import copy_of, unread

READS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: torch.ones(3) - x,
    "an index": lambda x: x[:, None],
    "a copy": lambda x: x.clone(),
    "without a graph": lambda x: x.detach(),
    "in a list": lambda x: torch.stack([torch.ones(3), x]),
    "as a number": lambda x: float(x.sum()),
    "as an array": lambda x: x.numpy(),
    "a kernel": lambda x: torch.nn.functional.batch_norm(torch.ones(2, 3), x, x, training=False),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_it_is_refused(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(StrategyError, match="the mean is not known yet"):
        read(unread(torch.zeros(3), "the mean is not known yet"))


def test_what_tells_nothing_of_its_values() -> None:
    values = torch.arange(3.0)
    one = unread(values, "not yet")
    assert one.shape == (3,) and one.dtype == torch.float32 and one.device.type == "cpu" and one.nbytes == 12
    version = one._version
    values += 1
    copy = copy_of(one)
    assert one._version == version + 1 and type(copy) is Tensor and copy.tolist() == [1, 2, 3]
    assert copy_of(values).data_ptr() != values.data_ptr()
