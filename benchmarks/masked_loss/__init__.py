"""What a loss over the pixels of a boolean mask costs, against the same loss over all pixels."""
