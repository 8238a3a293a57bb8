"""What a torch function means on split tensors: one file a family, all in `catalog`."""
