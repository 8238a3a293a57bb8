"""`fullframe doctor`: all checks, or one of them."""
