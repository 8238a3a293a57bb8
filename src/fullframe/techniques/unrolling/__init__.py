"""Blocks that run many times on their own result: how often again in backward, and what is kept for it."""
