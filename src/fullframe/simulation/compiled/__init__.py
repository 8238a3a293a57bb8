"""Compiled blocks in a simulation: captured and lowered as in a real step, with no kernel compiled."""
