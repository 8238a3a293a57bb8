"""What is seen of a run while it goes and what it wrote, read and shown; who holds memory on the GPUs."""
