"""A run as it goes, in a terminal: a screen that is drawn again, plain lines, or one JSON object."""
