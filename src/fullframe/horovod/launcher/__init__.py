"""What `fullframe horovodrun` does: workers on this machine and others, started, watched, and started again."""
