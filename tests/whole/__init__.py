"""Suites that run everything torch has, rather than what was thought of."""
