"""Every op sends and saves in one order on all ranks: recompute repeats its messages, and a rank alone would hang.

A block runs again when backward first asks for a tensor saved in it, and stops after the last one: what a rank saves
decides when it sends.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.ranks import collectives, exchange
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import SIZES, Case, all_cases

SIZE = (17, 50)


@contextmanager
def every_message_noted(events: list[str]) -> Iterator[None]:
    """Adds "message" for each exchange or reduction, whether or not this rank has a part in it."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append("message")
            return function(*args, **kwargs)

        return noted

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(exchange.InFlight, "__init__", noting(exchange.InFlight.__init__)))
        for name in ("all_gather_no_grad", "all_sum_no_grad"):
            function = getattr(collectives, name)
            for module in [m for m in sys.modules.values() if getattr(m, name, None) is function]:
                stack.enter_context(mock.patch.object(module, name, noting(function)))
        yield


def order_of(case: Case, height: int, width: int) -> list[Any]:
    """Messages before the last tensor saved in forward, and after it; before the first one used in backward, and after.

    None where nothing is saved.
    """
    generator, events = torch.Generator().manual_seed(1), list[str]()

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()

    size = SIZE if case.sizes == SIZES else case.sizes[-1]
    split = [ff.shard(drawn((*lead, *size)), mesh(height, width)) for lead in case.split]
    whole = [drawn(shape) for shape in case.whole]

    def noted(kind: str) -> Callable[[Tensor], Tensor]:
        return lambda tensor: events.append(kind) or tensor  # type: ignore[func-returns-value]

    with every_message_noted(events), torch.autograd.graph.saved_tensors_hooks(noted("saved"), noted("used")):
        outputs = [out for out in tree_leaves(case.op(*split, *whole)) if isinstance(out, Tensor)]
        forward = len(events)
        parts = [out.local if isinstance(out, ff.SpatialTensor) else out for out in outputs]
        total = sum(part.sum() for part in parts if part.requires_grad)
        end = len(events)
        if isinstance(total, Tensor):
            total.backward()
    saved = [place for place, event in enumerate(events[:forward]) if event == "saved"]
    used = [place for place, event in enumerate(events) if event == "used" and place >= end]
    cuts = (0, saved[-1] if saved else None, forward), (end, used[0] if used else None, len(events))
    return [
        events[start:stop].count("message")
        if middle is None
        else (events[start:middle].count("message"), events[middle:stop].count("message"))
        for start, middle, stop in cuts
    ]


def orders() -> dict[str, list[Any]]:
    return {name: order_of(case, 1, 3) for name, case in all_cases().items()}


@pytest.mark.further
@pytest.mark.filterwarnings("ignore")
def test_messages_and_saved_tensors_are_in_one_order_on_all_ranks() -> None:
    first, *others = rank_group(3).run(orders)  # two ranks at the edges of the image, one within
    for other in others:
        differing = {name: (first[name], other[name]) for name in first if first[name] != other[name]}
        assert not differing
    # The strips; their gradients, and those of the weight, the bias and the image, which are no model's.
    assert first["convolution: conv 3/1/1"] == [(1, 0), (0, 4)]
