"""What is done to a whole nn.Module so that it trains on a mesh."""
