"""Batch norm whose statistics are those of the whole job's microbatch, as `nn.SyncBatchNorm` does it on GPUs alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fullframe.errors import StrategyError
from fullframe.model.forward_patch import PatchedForward, unpatch
from fullframe.spatial.rules.normalization import OverReplicas


def synchronize_batchnorm(model: nn.Module, replica_ranks: int, every: bool) -> None:
    """Batch norm of `model` takes its statistics over all ranks of the job: `every` module, or `SyncBatchNorm` only.

    `replica_ranks`, on all stages, share one sample. A `SyncBatchNorm` with a process group of its own is left as it
    is. With `every`, a forward pass in training raises StrategyError in a batch norm that takes its statistics without
    `F.batch_norm`.
    """
    for module in model.modules():
        synced = isinstance(module, nn.SyncBatchNorm)
        if isinstance(module, _BatchNorm) and (module.process_group is None if synced else every):
            if isinstance(module.forward, _Synchronized):  # by another parallel model, which shares it
                unpatch(module)
            module.forward = _Synchronized(module, replica_ranks, every)  # type: ignore[method-assign]


class _Synchronized(PatchedForward):
    def __init__(self, module: nn.Module, replica_ranks: int, every: bool):
        super().__init__(module)
        self._module, self._replica_ranks, self._every = module, replica_ranks, every

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.original
        with OverReplicas(self._replica_ranks) as over:
            if not isinstance(self._module, nn.SyncBatchNorm):
                found = forward(*args, **kwargs)
            elif getattr(forward, "__func__", None) is nn.SyncBatchNorm.forward:
                found = _BatchNorm.forward(self._module, *args, **kwargs)
            else:
                with _sync_batch_norm_is_batch_norm():
                    found = forward(*args, **kwargs)
        if self._every and self._module.training and not over.asked:
            raise StrategyError(
                f"sync_batchnorm reaches what calls F.batch_norm; {type(self._module).__name__} takes its statistics "
                "by itself, so they would be those of one replica; leave out sync_batchnorm, or use another norm"
            )
        return found


@contextmanager
def _sync_batch_norm_is_batch_norm() -> Iterator[None]:
    """For subclasses that call it: SyncBatchNorm's forward runs on GPUs and whole tensors only."""
    its_own = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = its_own  # type: ignore[method-assign]
