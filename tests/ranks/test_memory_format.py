"""Memory formats by strides, of whole maps and of views cut out of them."""

import pytest
import torch

from fullframe.ranks.memory_format import memory_format_of


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ((2, 3, 4, 5), torch.channels_last),
        ((1, 3, 4, 5), torch.channels_last),
        ((2, 3, 2, 4, 5), torch.channels_last_3d),
    ],
)
def test_the_memory_format_of_a_map_and_of_a_part_of_it(shape: tuple[int, ...], format: torch.memory_format) -> None:
    x = torch.zeros(shape)
    assert memory_format_of(x) is torch.contiguous_format
    last = x.contiguous(memory_format=format)
    assert memory_format_of(last) is format and memory_format_of(last[..., 1:3]) is format
    assert memory_format_of(torch.zeros(2, 1, 1, 1)) is memory_format_of(torch.relu(torch.zeros(2, 1, 1, 1)))
