"""Split tensors: the shell, what all ranks know of it, the halo, and the rules of torch's functions."""
