"""What a step holds: its tensors from birth to death, the allocator, what lies beside them."""
