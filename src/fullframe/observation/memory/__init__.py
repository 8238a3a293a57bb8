"""Where the memory and the time of a run go: a line a step, and now and then all of one step."""
