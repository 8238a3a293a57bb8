"""Who owns which rows, what an op reads, who sends what to whom: integers only, no torch."""
