"""What is known when a step runs out of memory: noted by the rank, read again by whoever shows it."""
