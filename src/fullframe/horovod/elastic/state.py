"""What workers must hold alike: kept in memory by `commit`, put back after a failure, sent to those that come new."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fullframe.horovod.elastic.sampler import ElasticSampler
from fullframe.horovod.exceptions import HostsUpdatedInterrupt
from fullframe.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fullframe.horovod.membership import membership
from fullframe.horovod.process_sets import global_process_set
from fullframe.horovod.reductions import allreduce
from fullframe.horovod.request import ReduceOp


class State:
    """What survives a change of workers; subclass it for what `TorchState` does not know.

    `save`, `restore` and `sync` are for the subclass: keep in memory, put back, make rank 0's everybody's.
    """

    def __init__(self, **kwargs: Any):
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these after the workers changed, before the state is sent."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The workers changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now, to go on from after a failure; then `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks alike, where hosts were added or removed."""
        member = membership()
        if member is None:
            return
        said = global_process_set.rank() == 0 and member.has_news()
        flag = torch.tensor(said, dtype=torch.float64, device="cpu")
        if allreduce(flag, name="elastic.hosts", op=ReduceOp.Sum):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put back what was kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send rank 0's state to all, and keep it."""
        raise NotImplementedError

    def reset(self) -> None:
        """The workers changed; nothing to do unless a subclass says so."""


class ObjectState(State):
    """Objects as attributes: `ObjectState(epoch=0)` has `.epoch`. They must be picklable."""

    def __init__(self, **kwargs: Any):
        super().__init__()
        self._saved = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep copies."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """Put the copies back."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Rank 0's objects for everybody."""
        if self._saved:
            values = {name: getattr(self, name) for name in self._saved}
            for name, value in broadcast_object(values, 0, "elastic.objects").items():
                setattr(self, name, value)
            ObjectState.save(self)


class TorchState(ObjectState):
    """A model, an optimizer, and anything else by name: models, optimizers, schedulers, samplers, and plain objects.

    Another optimizer, say, may take the place of one by assigning to it, on all ranks alike.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any):
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts = {name: value for name, value in given.items() if isinstance(value, _WITH_STATE)}
        plain = {name: value for name, value in kwargs.items() if name not in self._parts}
        super().__init__(**plain)
        for name in ("model", "optimizer", *self._parts):
            object.__setattr__(self, name, given[name])
        self._kept: dict[str, Any] = {}
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", ()):
            self._parts[name], self._kept[name] = value, copy.deepcopy(value.state_dict())

    def commit(self) -> None:
        """Keep everything, also what other ranks have processed of the samplers; then `check_host_updates`."""
        self._share()
        super().commit()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks alike, where hosts were added or removed."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self._share()  # while those that leave are there
            raise

    def save(self) -> None:
        """Keep copies of everything."""
        super().save()
        self._kept = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def restore(self) -> None:
        """Put the copies back."""
        super().restore()
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._kept[name]))

    def sync(self) -> None:
        """Rank 0's for everybody; of samplers, what any rank has processed is."""
        for name, part in self._parts.items():
            if isinstance(part, nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            elif isinstance(part, ElasticSampler):
                states = allgather_object(part.state_dict(), "elastic.sampler")
                epoch = states[0]["epoch"]
                known = (state["processed_indices"] for state in states if state["epoch"] == epoch)
                part.load_state_dict({"epoch": epoch, "processed_indices": set().union(*known)})
            elif isinstance(part, LRScheduler):
                part.load_state_dict(broadcast_object(part.state_dict(), 0, f"elastic.{name}"))
            else:
                broadcast_optimizer_state(part, root_rank=0)
        super().sync()
        self.save()

    def reset(self) -> None:
        """Samplers share anew."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()

    def _share(self) -> None:
        """What a rank has processed is known to the others from here on, if it leaves or is lost."""
        if membership() is not None:
            for part in self._parts.values():
                if isinstance(part, ElasticSampler):
                    part.share()


_WITH_STATE = (nn.Module, torch.optim.Optimizer, LRScheduler, ElasticSampler)
