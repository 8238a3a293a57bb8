"""Batches: which rank reads what, and how a batch becomes a rank's part on its device."""
