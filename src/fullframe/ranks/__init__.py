"""What ranks say to each other: the mesh, the exchange, and how they notice that they run apart."""
