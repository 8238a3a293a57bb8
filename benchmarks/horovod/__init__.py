"""What Horovod's API costs over torch's own: an allreduce, and a training step."""
