"""Batch norm whose statistics are those of the whole job's microbatch, as `nn.SyncBatchNorm` does it on GPUs alone."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fullframe.model.forward_patch import PatchedForward
from fullframe.spatial.rules.normalization import OverReplicas


def synchronize_batchnorm(model: nn.Module, replica_ranks: int, every: bool) -> None:
    """Batch norm of `model` takes its statistics over all ranks of the job: `every` module, or `SyncBatchNorm` only.

    `replica_ranks` share one sample. A `SyncBatchNorm` with a process group of its own is left as it is.
    """
    for module in model.modules():
        synced = isinstance(module, nn.SyncBatchNorm)
        if isinstance(module, _BatchNorm) and (module.process_group is None if synced else every):
            module.forward = _Synchronized(module, replica_ranks)  # type: ignore[method-assign]


class _Synchronized(PatchedForward):
    def __init__(self, module: nn.Module, replica_ranks: int):
        super().__init__(module)
        self._module, self._replica_ranks = module, replica_ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with OverReplicas(self._replica_ranks):
            if isinstance(self._module, nn.SyncBatchNorm):  # whose own forward runs on GPUs and whole tensors only
                return _BatchNorm.forward(self._module, *args, **kwargs)
            return self.original(*args, **kwargs)
