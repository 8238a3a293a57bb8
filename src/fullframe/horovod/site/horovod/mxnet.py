"""Not there."""

raise ImportError("horovod.mxnet is not there: fullframe has Horovod's API of torch only (horovod.torch)")
