"""The step's host on real devices: numbers read, slices in order, one order of parameters on all ranks."""

import torch

from fullframe.training.host import RealHost
from fullframe.training.microbatches import microbatches
from tests.rank_group import rank_group

CPU = torch.device("cpu")


def test_numbers_slices_and_updates_are_as_they_are() -> None:
    host, taken = RealHost(CPU, 1, offload=False), []
    assert host.read([torch.tensor(2), torch.tensor(0.5, dtype=torch.bfloat16)]) == [2.0, 0.5]
    slices = list(host.numbered(microbatches({"x": torch.arange(6)}, 3)))
    assert [(number, part["x"].tolist()) for number, part in slices] == [(1, [0, 1]), (2, [2, 3]), (3, [4, 5])]
    host.update(lambda: taken.append(1))
    assert taken == [1]
    assert host.agree_order([2, 0], 4) == [2, 0]


def order(mine: dict[int, list[int]]) -> list[int]:
    rank = torch.distributed.get_rank()
    return RealHost(CPU, 2, offload=False).agree_order(mine[rank], 5)


def test_the_first_ranks_order_holds_and_what_others_have_comes_behind() -> None:
    mine = {0: [3, 1], 1: [4, 1, 0]}
    assert rank_group(2).run(order, mine) == [[3, 1, 0, 4]] * 2
