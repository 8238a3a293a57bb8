"""The training step on fake tensors: what it holds, and how long it takes, on any device."""
