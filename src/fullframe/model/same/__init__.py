"""Whether all ranks have the same model, run the same program and hold the same weights."""
