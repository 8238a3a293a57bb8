"""The documentation is run: what a page shows is what happened."""
