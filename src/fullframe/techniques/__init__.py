"""Ways to save memory or time in a step, one file each."""
