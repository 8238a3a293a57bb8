"""Not there."""

raise ImportError("horovod.keras is not there: fullframe has Horovod's API of torch only (horovod.torch)")
