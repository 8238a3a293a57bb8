"""Which strategy to train with: enumerate, estimate, simulate, rank, and say why each loser loses."""
