"""Not there."""

raise ImportError("horovod.spark is not there: fullframe has Horovod's API of torch only (horovod.torch)")
