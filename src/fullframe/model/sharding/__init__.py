"""Parameters, gradients and optimizer state in parts, one a rank: torch's FSDP2, and what its tensors are asked."""
