"""Not there."""

raise ImportError("horovod.tensorflow is not there: fullframe has Horovod's API of torch only (horovod.torch)")
