"""Processes of one machine: ranks started, watched and stopped. Knows no torch."""
