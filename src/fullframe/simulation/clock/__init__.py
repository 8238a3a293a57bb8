"""How long a step takes, op by op."""
