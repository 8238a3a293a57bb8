"""What is noted of calls on split tensors: operands, by their places. In passes: `model/same/test_operands.py`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from fullframe.spatial.whole_operands import PLACES, Noted, watching
from tests.rank_group import rank_group


def _facts() -> dict[str, Tensor]:
    image = ff.shard(torch.rand(1, 2, 4, 6), ff.init_mesh(width=2))
    canvas, one = torch.full((1, 2, 4, 6), 5.0), torch.full((2,), 3.0)
    calls = {
        "nothing": lambda: image.relu() + image,
        "a number": lambda: image * 3,
        "flags": lambda: F.relu(image, inplace=False),
        "numpy's": lambda: image * np.float64(3.0),
        "positions": lambda: image[:, np.array([0, 1])],
        "a slice": lambda: image[:, 0:2],
        "statistics": lambda: F.batch_norm(image, one, one, training=False, eps=3.0),
        "one that is written": lambda: canvas.copy_(image),
        "one that is written by name": lambda: torch.add(image, image, out=canvas),
        "a rule's own": lambda: F.scaled_dot_product_attention(image, image, image),
        "by a function of torch": lambda: F.gaussian_nll_loss(image, image.detach(), image.exp()),
        "of 16 bits": lambda: image.bfloat16() * torch.tensor([[2.0, 4.0, 8.0, 1.0, 0.0, 1.0]], dtype=torch.bfloat16),
        "many": lambda: [image * 3 for _ in range(PLACES + 2)],
    }
    found = {}
    for name, call in calls.items():
        noted = Noted(0)
        watching.append(noted)
        try:
            with image.local.device:  # a mode, whose own methods stand between the program and ours
                call()
        finally:
            watching.remove(noted)
        found[name] = noted.facts(image.local.device).cpu()
    return found


def test_operands_are_noted_and_nothing_else() -> None:
    found, again = rank_group(2).run(_facts)
    assert all(torch.equal(facts, again[name]) for name, facts in found.items())
    calls = {name: int(facts[0, 0]) for name, facts in found.items()}
    sizes = {name: facts[1:, 1].tolist()[:2] for name, facts in found.items()}
    assert calls.pop("many") == PLACES + 2 and sizes["many"] == [6.0, 6.0] and found["many"][PLACES, 1] == 3
    assert sizes["a number"] == sizes["numpy's"] == [3.0, 0.0] and sizes["statistics"] == [3.1, 0.0]
    assert sizes["positions"] == [1.0, 0.0] and sizes["a slice"] == [2.0, 0.0] and sizes["of 16 bits"] == [16.0, 0.0]
    none = {name for name, count in calls.items() if not count}
    assert none == {"nothing", "flags", "one that is written", "one that is written by name", "a rule's own"}
    assert calls["by a function of torch"] == 1
