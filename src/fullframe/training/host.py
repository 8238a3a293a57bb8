"""What of a step depends on where it runs: on devices, or in a simulation, which has neither numbers nor a clock."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullframe.ranks.collectives import device_of_facts
from fullframe.ranks.randomness import kept_random_state
from fullframe.ranks.waiting import waiting_for_ranks
from fullframe.techniques.budget import Costs, agreed, device_clock, measured
from fullframe.techniques.offload import saving_to_host
from fullframe.training.phases import Phases


class StepHost(Protocol):
    """What `TrainStep` asks of the place where it runs."""

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        """Scalars as numbers, by which the whole job decides."""

    def agree_order(self, mine: Sequence[int], parameters: int) -> list[int]:
        """The first rank's order of all numbers below `parameters` that a rank has among `mine`."""

    def saving(self) -> AbstractContextManager[None]:
        """Around a forward pass: where activations that are saved for backward go."""

    def block_costs(self, model: nn.Module, names: Sequence[str], forward: Callable[[], object]) -> Costs:
        """What it costs to keep the activations of the named blocks, the same on all ranks, by running `forward`."""

    def numbered(self, slices: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Those slices of a batch that are run, each with its number, counted from 1."""

    def update(self, step: Callable[[], object]) -> None:
        """Take the optimizer's `step`."""

    def phase(self, name: str) -> None:
        """What a step does from here on: "forward", "backward", "all_reduce" or "optimizer"; "" for nothing."""

    def backward(self, loss: Tensor) -> None:
        """Backward from `loss`, of which waiting for the gradients of other ranks is a phase of its own."""


class RealHost:
    """Devices and ranks as they are; `phases` knows how long each part of a step takes."""

    def __init__(self, device: torch.device, ranks: int, offload: bool):
        self._device, self._ranks = device, ranks
        self.phases = Phases(device)
        self._saving = saving_to_host(device) if offload else nullcontext

    def read(self, scalars: Sequence[Tensor]) -> list[float]:
        """As `StepHost.read`; waits for the device."""
        with waiting_for_ranks():  # a device's messages
            return torch.stack([scalar.double() for scalar in scalars]).tolist()

    def agree_order(self, mine: Sequence[int], parameters: int) -> list[int]:
        """As `StepHost.agree_order`; all ranks call it."""
        own = set(mine)
        if self._ranks == 1:
            return list(mine)
        assert dist.group.WORLD is not None
        place = device_of_facts(dist.group.WORLD, self._device)
        order = torch.tensor([*mine, *(n for n in range(parameters) if n not in own)], device=place)
        used = torch.tensor([n in own for n in range(parameters)], device=place, dtype=torch.int32)
        with waiting_for_ranks():
            dist.broadcast(order, 0)
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            is_used = used.tolist()
        return [number for number in order.tolist() if is_used[number]]

    def saving(self) -> AbstractContextManager[None]:
        """In host memory, with `offload`."""
        return self._saving()

    def block_costs(self, model: nn.Module, names: Sequence[str], forward: Callable[[], object]) -> Costs:
        """As `StepHost.block_costs`; random states are as before."""
        clock = device_clock(self._device.type)
        with kept_random_state():
            measured(model, names, forward, clock)  # the first pass is slower: kernels are loaded and chosen
            return agreed(measured(model, names, forward, clock))

    def numbered(self, slices: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """All of them."""
        return enumerate(slices, start=1)

    def update(self, step: Callable[[], object]) -> None:
        """Once."""
        step()

    def phase(self, name: str) -> None:
        self.phases.enter(name)

    def backward(self, loss: Tensor) -> None:
        """As `StepHost.backward`. DDP waits for its messages once all nodes have run."""
        self.phases.enter("backward")
        if self._ranks > 1 and loss.requires_grad and self.phases.active:
            engine: Any = torch.autograd.Variable._execution_engine
            loss.register_hook(lambda gradient: engine.queue_callback(lambda: self.phases.enter("all_reduce")))
        loss.backward()
