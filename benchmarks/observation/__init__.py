"""What always-on observation costs: the timeline and the watch on leaks, beside the same step without them."""
