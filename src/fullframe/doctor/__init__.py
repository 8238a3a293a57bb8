"""Mistakes that waste memory or break gradients, found and named."""
