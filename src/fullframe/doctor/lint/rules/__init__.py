"""All rules of `doctor lint`, one file a family."""
