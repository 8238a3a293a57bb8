"""What splitting saves in memory: a forward and backward on one process and on a rank of 2."""
