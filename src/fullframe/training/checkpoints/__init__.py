"""A run's state on disk: written whole or not at all, read on any mesh."""
