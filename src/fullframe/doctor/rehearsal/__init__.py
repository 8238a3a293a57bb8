"""A few steps of a recipe, or of a script, on real ranks with probes attached."""
