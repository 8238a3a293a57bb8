"""What goes wrong in a run, noticed and named: hangs, ranks that drift apart, numbers that are not finite, memory."""
