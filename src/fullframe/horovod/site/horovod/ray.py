"""Not there."""

raise ImportError("horovod.ray is not there: fullframe has Horovod's API of torch only (horovod.torch)")
