"""The worked example of docs/how_it_works/add_a_rule.md, as it stands there, on two ranks against plain torch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness import differences
from tests.rank_group import rank_group

PAGE = Path(__file__).parents[2] / "docs" / "how_it_works" / "add_a_rule.md"


def _differences(height: int, width: int, size: tuple[int, int]) -> dict[str, float]:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return differences(names["blur"], [x], [], height, width)


@pytest.mark.parametrize(("height", "width"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("size", [(9, 14), (2, 5), (3, 2)])
def test_the_example_gives_the_numbers_of_plain_torch(height: int, width: int, size: tuple[int, int]) -> None:
    for found in rank_group(2).run(_differences, height, width, size):
        assert max(found.values()) < 1e-12, found
