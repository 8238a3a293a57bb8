"""ZeRO-1: each rank has the state of its parameters alone, and all parameters are updated everywhere."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.errors import CheckpointError
from fullframe.techniques.zero import shard_state, trainable
from tests.rank_group import rank_group

SIZES = (7, 1, 5, 3, 2)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in SIZES]
    found[1].requires_grad_(False)
    return found


def give_gradients(held: list[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(held):
        parameter.grad = torch.full_like(parameter, step - number) if parameter.requires_grad else None


def take_steps(count: int, optimizer: torch.optim.Optimizer, held: list[nn.Parameter]) -> None:
    for step in range(count):
        give_gradients(held, step)
        optimizer.step()


def trained(sharded: bool) -> tuple[list[Tensor], list[int], list[bool]]:
    """The parameters after three steps, the sizes of those whose state is here, and which gradients are left."""
    held = parameters()
    optimizer = torch.optim.AdamW(held, lr=0.1)
    if sharded:
        shard_state(optimizer)
    take_steps(3, optimizer, held)
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


def _hooked(sharded: bool) -> list[Tensor]:
    """Hooks of the user's, before and after the state was sharded: clipping over all gradients, and an average."""
    held = parameters()
    optimizer, average = torch.optim.AdamW(held, lr=0.1), [p.detach().clone() for p in held]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(held, 0.5)

    def look(*_: Any) -> None:
        for mean, parameter in zip(average, held, strict=True):
            mean.lerp_(parameter.detach(), 0.3)

    handles = [optimizer.register_step_pre_hook(clip), optimizer.register_step_post_hook(look)]
    if sharded:
        shard_state(optimizer)
    for step in range(4):
        give_gradients(held, step)
        if step == 2:
            for handle in handles:
                handle.remove()
            optimizer.register_step_pre_hook(clip)
            optimizer.register_step_post_hook(look)
        optimizer.step()
    return [*average, *(p.detach() for p in held)]


def test_users_step_hooks_see_all_gradients_and_new_values() -> None:
    expected = _hooked(False)
    for found in rank_group(2).run(_hooked, True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class _Slow(torch.optim.SGD):
    """Lookahead: goes on from its parent's step, around which torch calls the hooks too once there was an SGD."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))


def _of_a_subclass(sharded: bool) -> list[Tensor]:
    torch.optim.SGD(parameters())
    held = parameters()
    optimizer = _Slow(held, lr=0.1, momentum=0.9)
    if sharded:
        shard_state(optimizer)
    take_steps(4, optimizer, held)
    return [p.detach() for p in held]


def test_a_step_that_calls_its_parents() -> None:
    expected = _of_a_subclass(False)
    for found in rank_group(2).run(_of_a_subclass, True):
        assert all(map(torch.equal, found, expected))


def _loaded() -> str:
    """The whole state, then the first rank's."""
    held, whole = parameters(), torch.optim.AdamW(parameters(), lr=0.1)
    for parameter in trainable(whole):
        parameter.grad = torch.ones_like(parameter)
    whole.step()
    optimizer = torch.optim.AdamW(held, lr=0.1)
    shard_state(optimizer)
    optimizer.load_state_dict(whole.state_dict())
    assert sorted(p.numel() for p in optimizer.state) == [[2, 7], [3, 5]][dist.get_rank()]
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states, 0)
    try:
        optimizer.load_state_dict(states[0])
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_state_of_another_rank_is_refused() -> None:
    first, second = rank_group(2).run(_loaded)
    assert not first
    assert "the state of another rank's part" in second


def _held() -> tuple[list[int], list[bool], int]:
    """State that is made at once, which gradients are gone after a step, and the states of one parameter of all."""
    held = parameters()
    optimizer = torch.optim.Adagrad(held, lr=0.1)
    shard_state(optimizer)
    states = sorted(parameter.numel() for parameter in trainable(optimizer) if parameter in optimizer.state)
    gradients = []
    for parameter in trainable(optimizer):
        parameter.grad = torch.ones_like(parameter)
        gradients.append(weakref.ref(parameter.grad))
    optimizer.step()
    optimizer.zero_grad()
    whole = torch.optim.AdamW(held[:1])
    held[0].grad = torch.ones_like(held[0])
    whole.step()
    alone = torch.optim.AdamW(held[:1])
    shard_state(alone)
    alone.load_state_dict(whole.state_dict())
    return states, [gradient() is None for gradient in gradients], len(alone.state)


def test_nothing_of_another_ranks_part_is_held() -> None:
    first, second = rank_group(2).run(_held)
    assert first == ([2, 7], [True] * 4, 1) and second == ([3, 5], [True] * 4, 0)


def test_frozen_parameters_are_nobodys() -> None:
    held = parameters()
    assert trainable(torch.optim.SGD(held)) == [p for p in held if p.requires_grad]
    assert not dist.is_initialized() or dist.get_world_size() == 1
