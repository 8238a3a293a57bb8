"""ZeRO-1: each rank has the state of its parameters alone, and all parameters are updated everywhere."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.techniques.zero import shard_state, trainable
from tests.rank_group import rank_group

SIZES = (7, 1, 5, 3, 2)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in SIZES]
    found[1].requires_grad_(False)
    return found


def trained(sharded: bool) -> tuple[list[Tensor], list[int], list[bool]]:
    """The parameters after three steps, the sizes of those whose state is here, and which gradients are left."""
    held = parameters()
    optimizer = torch.optim.AdamW(held, lr=0.1)
    if sharded:
        shard_state(optimizer)
    for step in range(3):
        for number, parameter in enumerate(held):
            parameter.grad = torch.full_like(parameter, step - number) if parameter.requires_grad else None
        optimizer.step()
    states = sorted(parameter.numel() for parameter in optimizer.state)
    return [p.detach() for p in held], states, [p.grad is not None for p in held]


def test_each_rank_holds_a_share_and_all_get_the_new_values() -> None:
    expected, whole, _ = trained(False)
    results = rank_group(2).run(trained, True)
    assert whole == [2, 3, 5, 7]
    assert [states for _, states, _ in results] == [[2, 7], [3, 5]]  # the largest first, to whoever has least
    for values, _, left in results:
        assert all(map(torch.equal, values, expected))
        assert left == [True, False, True, True, True]


def test_frozen_parameters_are_nobodys() -> None:
    held = parameters()
    assert trainable(torch.optim.SGD(held)) == [p for p in held if p.requires_grad]
    assert not dist.is_initialized() or dist.get_world_size() == 1
