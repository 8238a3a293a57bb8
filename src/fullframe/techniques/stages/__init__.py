"""A chain of parts on several ranks as stages, each of which holds its own part of the graph."""
