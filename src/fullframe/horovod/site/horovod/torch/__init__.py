"""`import horovod.torch` is `fullframe.horovod`, with its modules under the names that scripts import."""

import sys

import fullframe.horovod
import fullframe.horovod.elastic
from fullframe.horovod import compression, functions, optimizer, sync_batch_norm
from fullframe.horovod.elastic import sampler, state

_ALSO = {
    "compression": compression,
    "elastic": fullframe.horovod.elastic,
    "elastic.sampler": sampler,
    "elastic.state": state,
    "functions": functions,
    "mpi_ops": fullframe.horovod,
    "optimizer": optimizer,
    "sync_batch_norm": sync_batch_norm,
}
sys.modules[__name__] = fullframe.horovod
sys.modules.update({f"{__name__}.{name}": module for name, module in _ALSO.items()})
