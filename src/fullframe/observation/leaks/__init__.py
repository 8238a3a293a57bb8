"""What grows from step to step, named: which tensor, the line that made it, the line that keeps it."""
