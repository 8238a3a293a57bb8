"""Starting ranks: on this machine, and later on clusters."""
