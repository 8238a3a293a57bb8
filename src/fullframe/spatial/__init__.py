"""Split tensors: the mesh, the exchange, the shell, its rules, and the model around them."""
