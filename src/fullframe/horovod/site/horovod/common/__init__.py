"""The modules of `horovod.common` that scripts import from."""
