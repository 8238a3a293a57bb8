"""What an optimizer keeps and needs for each parameter of the model."""
