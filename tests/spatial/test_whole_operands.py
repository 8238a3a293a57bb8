"""What is noted of calls on split tensors: operands, by their places. In passes: `model/same/test_operands.py`."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fullframe as ff
from fullframe.errors import UnsupportedOp
from fullframe.spatial.whole_operands import MOST_CALLS, PLACES, Noted, watching
from tests.rank_group import rank_group


def _in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _in_a_transform(image: Tensor) -> None:
    """It is refused; what is noted of it would be gone with it."""
    with pytest.raises(UnsupportedOp):
        torch.func.vmap(lambda weight: image * weight)(torch.ones(3))


def _gradients(gradient: Tensor, image: Tensor, weight: Tensor, of_image: bool) -> None:
    """As `torch.nn.grad.conv2d_input` and `conv2d_weight`, which give an empty one in place of what is not read."""
    sizes: Any = [1, 1], [1, 1], [1, 1], False, [0], 1
    torch.ops.aten.convolution_backward(gradient, image, weight, None, *sizes, (of_image, not of_image, False))


def _facts() -> dict[str, Tensor]:
    image = ff.shard(torch.rand(1, 2, 4, 6), ff.init_mesh(width=2))
    canvas, one = torch.full((1, 2, 4, 6), 5.0), torch.full((2,), 3.0)
    keys, any_scores = image.flatten(2), torch.full((1, 24, 24), 5.0)
    tokens = keys.transpose(1, 2)
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
        "one of whose dtype it becomes": lambda: (image.to(canvas.double()), image.type_as(canvas)),
        "one of whose shape it becomes": lambda: (image.expand_as(canvas), image.view_as(canvas)),
        "one that counts nothing": lambda: torch.baddbmm(any_scores, tokens, keys, beta=0.0),
        "one that no gradient is asked by": lambda: _gradients(image, image, torch.full((2, 2, 3, 3), 5.0), False),
        "another": lambda: _gradients(image, canvas, torch.full((2, 2, 3, 3), 5.0), True),
        "of another thread": lambda: _in_a_thread(lambda: image * 3),
        "in a transform": lambda: _in_a_transform(image),
        "larger than a float": lambda: image[:, : 10**400],
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
    assert none == {
        *("nothing", "flags", "one that is written", "one that is written by name", "a rule's own"),
        *("one of whose dtype it becomes", "one of whose shape it becomes", "of another thread", "in a transform"),
    }
    assert sizes["one that counts nothing"] == [0.0, 0.0] and calls["larger than a float"] == 1
    assert calls["by a function of torch"] == 1
    assert sizes["one that no gradient is asked by"] == [7.0, 0.0] and sizes["another"] == [7.0 + 36 * 5, 0.0]


class _Counting(TorchDispatchMode):
    """As a selective checkpoint, which finds a result again by how many calls of its op came before."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def _calls_of_torch() -> list[int]:
    """How many a program makes while nobody looks, and while somebody does."""
    image, counts = ff.shard(torch.rand(1, 2, 4, 6), ff.init_mesh(width=2)), []
    bias = torch.ones(2, 1, 1)
    for looking in ([], [Noted(0)]):
        watching.extend(looking)
        try:
            with _Counting() as counting:
                (image * 3.0 + bias)[:, 0:1]
        finally:
            watching.clear()
        counts.append(counting.count)
    return counts


def test_a_mode_of_the_program_sees_nothing_of_it() -> None:
    for unwatched, watched in rank_group(2).run(_calls_of_torch):
        assert watched == unwatched


def test_a_device_by_its_number_is_no_operand() -> None:
    """Each rank has its own."""
    noted, image = Noted(0), torch.rand(2, 3)
    noted.note(Tensor.to, (image, 1), {})
    noted.note(Tensor.cuda, (image, 1), {"device": 1})
    noted.note(torch.zeros_like, (), {"device": 1})
    assert not noted.facts(image.device).any()


def test_who_looks_for_long_only_counts() -> None:
    noted = Noted(0)
    for _ in range(MOST_CALLS + 2):
        noted.note(torch.mul, (3,), {})
    facts = noted.facts(torch.device("cpu"))
    assert facts[0, 0] == MOST_CALLS + 2 and facts[1:, 1].sum() == 3 * MOST_CALLS
